"""What holds for all tests: one thread of arithmetic each, and no deadline by the clock, so that a busy machine changes no result."""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; the engine's own processes choose theirs
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.register_profile("project", deadline=None)
settings.load_profile("project")
settings.register_profile("long", deadline=None, max_examples=20_000)  # `--hypothesis-profile=long`: minutes for tests that take seconds
