"""Exit status 0 while the engine makes progress: for images and scripts. `ENGINE_PORT` is the engine's, 8000 if unset."""

import os
import sys
import urllib.error
import urllib.request

try:
    urllib.request.urlopen(f"http://127.0.0.1:{os.environ.get('ENGINE_PORT', '8000')}/health", timeout=4)
except (urllib.error.URLError, TimeoutError) as problem:
    sys.exit(f"not healthy: {problem}")
