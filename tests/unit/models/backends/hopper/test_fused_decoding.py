"""Which steps the kernel of very few decode rows computes; the kernel itself is tested on GPUs."""

import pytest
import torch

from models.decoders.qwen3_vl import Qwen3VL
from models.kernels.ops import NewHeads
from models.kernels.reference.attention import TorchAttention
from models.kernels.reference.ops import TorchOps
from tests.unit.models.backends.hopper.attention_step import Step
from tests.unit.models.backends.hopper.kernels_in_torch import use_torch_kernels
from tests.unit.models.harness import ONE_IMAGE, PagedRunner, Prompt

pytest.importorskip("triton")  # beside the kernel that is replaced
from models.kernels.hopper import fused_decoding
from models.kernels.hopper.attention import fixed_attention_factory
from models.kernels.hopper.fused_decoding import FusedDecoding


def test_which_steps_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch_kernels(monkeypatch)
    monkeypatch.setattr(fused_decoding, "FUSED_ROWS", 2)

    def is_fused(
        num_rows: int, head_dim: int = 128, heads: tuple[int, int] = (4, 2), multiprocessors: int = 132, normed: bool = True
    ) -> bool:
        monkeypatch.setattr(fused_decoding, "num_multiprocessors", lambda device: multiprocessors)
        step = Step.build([1], heads, head_dim).to(torch.device("cpu"), torch.bfloat16)
        return isinstance(fixed_attention_factory([step.pool], heads[0], 8, 8, normed)(num_rows), FusedDecoding)

    assert is_fused(1) and is_fused(2) and not is_fused(1, normed=False) and not is_fused(3) and not is_fused(1, head_dim=64)
    assert is_fused(1, heads=(8, 8), multiprocessors=16) and not is_fused(1, multiprocessors=16)


def test_a_decoder_asks_for_all_at_once_where_it_can(tiny: Qwen3VL, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, asked = Prompt.build(tiny.config, ONE_IMAGE), []
    expected = PagedRunner(tiny).greedy(prompt, steps=8)

    class Fused(TorchAttention):
        def run_fused(self, layer: int, new: NewHeads) -> torch.Tensor:
            asked.append(layer)
            return self.run(layer, TorchOps().norm_rope_store_(new, self.pool(layer)))

    runner = PagedRunner(tiny)
    runner.attention = Fused(runner.pools)
    assert runner.greedy(prompt, steps=8) == expected
    assert asked == list(range(tiny.config.text.num_layers)) * 8
