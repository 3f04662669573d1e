"""Waits until no client waits for an answer: what an orchestrator runs before it stops a replica. `python drain.py SECONDS`.

New requests must already go elsewhere. Reads `ENGINE_PORT` (8000 if unset) and `ENGINE_API_KEY`, as the engine does. Ends in any case
after SECONDS, and at once if the engine no longer answers.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request

EVERY_S = 0.5


def open_streams() -> int:
    """Choices that a client waits for. OSError if the engine does not answer."""
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get("ENGINE_API_KEY")) else {}
    request = urllib.request.Request(f"http://127.0.0.1:{os.environ.get('ENGINE_PORT', '8000')}/load", headers=headers)
    with urllib.request.urlopen(request, timeout=4) as answer:
        return int(json.load(answer)["server_load"])


def main(seconds: float) -> None:
    """Two looks without a stream in between: what an endpoint's list still sent here has then been seen."""
    deadline, quiet = time.monotonic() + seconds, 0
    while quiet < 2 and time.monotonic() < deadline:
        try:
            quiet = 0 if open_streams() else quiet + 1
        except (OSError, urllib.error.URLError) as problem:
            sys.exit(f"drain: {problem}")
        time.sleep(EVERY_S)


if __name__ == "__main__":
    main(float(sys.argv[1]))
