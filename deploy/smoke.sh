#!/usr/bin/env bash
# Serves the demo out of an environment of install.sh, from an empty folder, and uses it as an orchestrator and a client do:
# `deploy/smoke.sh PREFIX PICTURE ANSWER [flags of the engine]`, say `deploy/smoke.sh /opt/engine models/demo/pictures/number.png 472`.
set -euo pipefail

prefix=$(cd "$1" && pwd) picture=$(realpath "$2") answer=$3
shift 3
cd "$(mktemp -d)"
port=${ENGINE_PORT:-8017}
"$prefix/bin/python" -m engine.serve --port "$port" "$@" &
engine=$!
trap 'kill "$engine" 2>/dev/null || true; wait "$engine" || true' EXIT
for _ in $(seq 120); do
  ENGINE_PORT=$port "$prefix/bin/python" "$prefix/deploy/healthcheck.py" && break
  kill -0 "$engine"
  sleep 1
done
ENGINE_PORT=$port "$prefix/bin/python" "$prefix/deploy/healthcheck.py"
url="data:image/png;base64,$(base64 -w0 "$picture")"
printf '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "%s"}}, {"type": "text", "text": "What number is in the picture?"}]}]}' "$url" > body.json
"$prefix/bin/python" - "$port" "$answer" << 'PYTHON'
import json, sys, urllib.request
request = urllib.request.Request(f"http://127.0.0.1:{sys.argv[1]}/v1/chat/completions", open("body.json", "rb").read(), {"Content-Type": "application/json"})
said = json.load(urllib.request.urlopen(request, timeout=120))["choices"][0]["message"]["content"]
print("asked what number is in the picture, said:", said)
sys.exit(said != sys.argv[2])
PYTHON
ENGINE_PORT=$port "$prefix/bin/python" "$prefix/deploy/drain.py" 10
kill "$engine"
trap - EXIT
wait "$engine"
echo "served, answered, drained, ended with 0"
