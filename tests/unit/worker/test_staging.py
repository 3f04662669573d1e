"""Packing of a step's arrays: red when a graph's inputs could move between two steps, or when arrays overlap."""

import numpy as np
import pytest
import torch

from engine.worker.staging import Staging, staged_bytes
from tests.unit.worker.in_process import CPU

ARRAYS = [
    np.arange(5),
    np.arange(12, dtype=np.float32).reshape(3, 4).T,
    np.zeros((3, 0), dtype=np.int64),
    np.broadcast_to(np.int32(7), (2, 3)),
    np.arange(40, dtype=np.int32)[::2],
]


def test_arrays_keep_types_shapes_and_places() -> None:
    """Also of arrays with strides, and empty ones; a second step of the same sizes lies where the first one did."""
    staging = Staging(staged_bytes(ARRAYS), CPU)
    addresses = []
    for step in range(2):
        staging.begin()
        tensors = [staging.put(array + array.dtype.type(step)) for array in ARRAYS]
        staging.copy()
        for tensor, array in zip(tensors, ARRAYS, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array + step)
            assert tensor.numpy().dtype == array.dtype and tensor.is_contiguous()
        addresses.append([tensor.data_ptr() for tensor in tensors])
    assert addresses[0] == addresses[1]


def test_the_rest_begins_where_the_next_array_will_be() -> None:
    staging = Staging(4096, CPU)
    for length in (1, 700):
        staging.begin()
        staging.put(np.arange(3))
        rest = staging.rest(torch.int32)
        pages = staging.put(np.arange(length, dtype=np.int32))
        assert rest.data_ptr() == pages.data_ptr() and rest[:length].equal(pages) and len(rest) >= 700


def test_a_step_that_does_not_fit_is_loud() -> None:
    staging = Staging(1024, CPU)
    staging.begin()
    staging.put(np.zeros(120))
    with pytest.raises(AssertionError, match="more than 1024 bytes"):
        staging.put(np.zeros(120))
