"""Products of each format in the interpreter against plain torch, each kernel pinned by a class of rows."""

import itertools

import pytest
import torch

from models.kernels.stream import Residual, RowClass
from models.weights.float8 import GroupScaled
from models.weights.matrix import Matrix
from tests.unit.models.backends.portable.interpreter import interpreted


@interpreted(gate=True)
def test_every_class_of_rows_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no, one or two parts that the norm still lacks. cuBLAS alone adds bfloat16 products in parts."""
    from models.kernels.triton import activations, float8

    for module in (activations, float8):
        monkeypatch.setattr(module, "quantized", GroupScaled.quantized)  # the interpreter, not a GPU, loses a carry when it rounds
    torch.manual_seed(0)
    weight, norm = torch.randn(256, 256) / 16, torch.rand(256) + 0.5
    for format, num_tokens, rows, num_parts in itertools.product(("plain", "float8"), (1, 3), RowClass, (0, 1, 2)):
        if num_tokens > rows:
            continue
        x, parts = torch.randn(num_tokens, 256), torch.randn(num_parts, num_tokens, 256) if num_parts else None
        ours = Matrix.of(weight, "portable", format)
        pairs = []
        for each in (ours, ours.on("torch")):
            stream, added = Residual(x.clone(), parts), Residual(x.clone())
            product = each.product(stream.normed(norm, 1e-6), rows)
            if format == "float8" or rows in (RowClass.SINGLE, RowClass.MANY):
                each.add_to(added, x, rows)
            pairs.append((product, stream.sum_TD, added.sum_TD + (0 if added.parts_STD is None else added.parts_STD.sum(0))))
        for found, expected, limit in zip(*pairs, (0.15 if format == "float8" else 1e-5, 1e-6, 5e-3), strict=True):
            assert float((found - expected).norm() / expected.norm()) < limit, (format, num_tokens, rows.name, num_parts)
