"""A child process that fails at once and ends without cleaning up, as a worker does. Its argument is the file of a Runtime."""

import os

from engine.wire.child import Child

REASON = "the weights do not fit"

if __name__ == "__main__":
    Child.attach("worker-0").failed(REASON)
    os._exit(1)
