"""The library humming-kernels in plain torch, without its layout: for products of low-bit matrices without a GPU."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from models.config.schemes import Scheme
from models.weights.low_bit import LowBit

pytest.importorskip("triton")  # next to the products
from models.kernels import humming

BLOCK = 8  # choices of a block
ELEMENTS = {kind: element for element, kind in humming.TYPES.items()}


def prepared(tensors: dict[str, torch.Tensor], rows: int, columns: int, schema: Any, num_experts: int | None, **options: Any) -> Any:
    scheme = Scheme(ELEMENTS[schema.b_dtype], schema.weight_scale_group_size, schema.has_zero_point)
    return Config(scheme, rows, columns, num_experts), tensors


class Config(SimpleNamespace):
    def __init__(self, scheme: Scheme, rows: int, columns: int, num_experts: int | None) -> None:
        super().__init__(scheme=scheme, rows=rows, columns=columns, count=num_experts, kernels=[])

    def __hash__(self) -> int:
        return id(self)

    def to_str(self) -> "Config":
        return self


def compiled(config: Config, options: str, ranges: list[list[Any]], device: torch.device) -> Config:
    config.kernels += ranges
    return config


def launch(
    *, configs: Config, inputs: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, zero_point: torch.Tensor | None = None,
    outputs: torch.Tensor | None = None, sorted_ids: torch.Tensor | None = None, expert_ids: torch.Tensor | None = None,
    num_tokens_padded: torch.Tensor | None = None, top_k: int = 1, locks: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Arguments are those of the library's `launch_kernel`; `configs` is the matrix's."""
    count, stacked = configs.count or 1, configs.count is not None
    codes, scales, zeros = (None if each is None else each.flatten(0, int(stacked)) for each in (weight, weight_scale, zero_point))
    assert codes is not None and scales is not None and locks.dtype == torch.int32
    shape = torch.Size((configs.rows * count, configs.columns))
    values = LowBit(configs.scheme, shape, codes, scales, zeros, None).dequantized()
    outputs = inputs.new_empty((len(inputs), configs.rows)) if outputs is None else outputs
    if not stacked:
        return outputs.copy_(inputs @ values.t())
    assert sorted_ids is not None and expert_ids is not None and num_tokens_padded is not None
    for block in range(int(num_tokens_padded) // BLOCK):
        slots = sorted_ids[block * BLOCK : (block + 1) * BLOCK].long()
        slots, expert = slots[slots < len(outputs)], int(expert_ids[block])
        outputs[slots] = inputs[slots // top_k] @ values[expert * configs.rows : (expert + 1) * configs.rows].t()
    return outputs


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install it as humming-kernels."""
    contents: dict[str, dict[str, Any]] = {
        "humming": {}, "humming.kernel": {},
        "humming.kernel.humming": {"HummingKernel": SimpleNamespace(prepare_kernels=compiled)},
        "humming.ops": {"launch_kernel": launch},
        "humming.schema": {"HummingWeightSchema": SimpleNamespace},
        "humming.transform": {"prepare_and_transform_humming_tensors": prepared},
        "humming.tune": {"get_heuristics_config": lambda config, **options: {"block_shape": (BLOCK, 64, 64), "use_stream_k": True}},
    }  # fmt: skip
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
