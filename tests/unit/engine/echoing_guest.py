"""A guest for tests. It ends by the signal whose number is its job, or never for `burn`; any other job is its answer."""

import os
from collections.abc import Callable


def prepare() -> Callable[[bytes], bytes]:
    return answer


def answer(job: bytes) -> bytes:
    while job == b"burn":
        pass
    if job.isdigit():
        os.kill(os.getpid(), int(job))
    return job
