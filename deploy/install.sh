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
wheels=$(mktemp -d)
"$prefix/bin/pip" wheel --no-cache-dir -q --no-deps --wheel-dir "$wheels" "$clone"
"$prefix/bin/pip" install --no-cache-dir -q "$(echo "$wheels"/*.whl)${extra:+[$extra]}"
rm -r "$wheels"
mkdir -p "$prefix/deploy"
cp "$clone/deploy/healthcheck.py" "$clone/deploy/drain.py" "$prefix/deploy/"
