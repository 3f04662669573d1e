#!/usr/bin/env bash
# What the images do, without a container: `deploy/install.sh PREFIX [EXTRA]` puts an environment with the engine, and the scripts that
# orchestrators call, into PREFIX, from the clone that this file lies in. Nothing of the clone is needed afterwards.
set -euo pipefail

prefix=$1 extra=${2:-}
clone=$(cd "$(dirname "$0")/.." && pwd)

python3 -m venv "$prefix"
if [ -n "${TORCH_INDEX:-}" ]; then
  "$prefix/bin/pip" install --no-cache-dir -q --index-url "$TORCH_INDEX" torch
fi
# From a copy: a build leaves files behind that the next one would take for sources.
copy=$(mktemp -d)
(cd "$clone" && cp -r engine server models bench pyproject.toml MANIFEST.in README.md CHANGELOG.md SECURITY.md CONTRIBUTING.md LICENSE "$copy")
"$prefix/bin/pip" wheel --no-cache-dir -q --no-deps --wheel-dir "$copy/wheels" "$copy"
"$prefix/bin/pip" install --no-cache-dir -q "$(echo "$copy"/wheels/*.whl)${extra:+[$extra]}"
rm -r "$copy"
mkdir -p "$prefix/deploy"
cp "$clone/deploy/healthcheck.py" "$clone/deploy/drain.py" "$prefix/deploy/"
