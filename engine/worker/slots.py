"""Slots on the device for weights that some requests use in addition to the model's."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from engine.wire.adapters import ReadAdapter
from engine.wire.messages import Load


class FixedWeights:
    """Interface of weight slots for the runner and the image cache. This class has no slots; a class with slots overrides every method."""

    def read(self, order: ReadAdapter) -> None:
        """Read weights to host memory in a thread, which reports the result."""
        raise AssertionError("there are no slots")

    def load(self, orders: Sequence[Load]) -> None:
        """Execute a plan's orders, in stream order."""

    def tower(self, slot: int) -> AbstractContextManager[None]:
        """Return the context in which the tower encodes images with a slot; -1: none."""
        return nullcontext()
