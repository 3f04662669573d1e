#!/usr/bin/env bash
# Install the engine from this clone, in the steps of the images:
#   deploy/install.sh dependencies PREFIX [EXTRA]   create an environment with the packages that pyproject.toml requires, in the versions of constraints.txt
#   deploy/install.sh wheel FOLDER                  build the wheel
#   deploy/install.sh engine PREFIX FOLDER          install the wheel of that folder
#   deploy/install.sh PREFIX [EXTRA]                all three, and the scripts for orchestrators; the clone is not needed afterwards
set -euo pipefail

clone=$(cd "$(dirname "$0")/.." && pwd)

dependencies() { # PREFIX [EXTRA]
  python3 -m venv "$1"
  if [ -n "${TORCH_INDEX:-}" ]; then
    "$1/bin/pip" install --no-cache-dir -q -c "$clone/constraints.txt" --index-url "$TORCH_INDEX" torch
  fi
  "$1/bin/python" - "$clone/pyproject.toml" "${2:-}" << 'PYTHON' > "$1/requirements.txt"
import sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
print(*project["dependencies"], *(project["optional-dependencies"][sys.argv[2]] if sys.argv[2] else ()), sep="\n")
PYTHON
  "$1/bin/pip" install --no-cache-dir -q -c "$clone/constraints.txt" -r "$1/requirements.txt"
}

wheel() ( # FOLDER; builds a copy, because a build leaves files that the next one would take for sources
  copy=$(mktemp -d)
  trap 'rm -r "$copy"' EXIT
  (cd "$clone" && cp -r engine server models bench pyproject.toml MANIFEST.in README.md CHANGELOG.md SECURITY.md CONTRIBUTING.md LICENSE "$copy")
  python3 -m pip wheel --no-cache-dir -q --no-deps --wheel-dir "$1" "$copy"
)

engine() { # PREFIX FOLDER
  "$1/bin/pip" install --no-cache-dir -q --no-deps "$2"/*.whl
  "$1/bin/pip" check
}

case $1 in
  dependencies | wheel | engine) "$@" ;;
  *)
    dependencies "$@"
    wheels=$(mktemp -d)
    PATH=$(cd "$1" && pwd)/bin:$PATH wheel "$wheels"
    engine "$1" "$wheels"
    rm -r "$wheels"
    mkdir -p "$1/deploy"
    cp "$clone/deploy/healthcheck.py" "$clone/deploy/drain.py" "$1/deploy/"
    ;;
esac
