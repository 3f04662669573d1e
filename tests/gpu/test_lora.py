"""Adapters on one GPU at the sizes of 8B: kernels in a CUDA graph against plain torch, and a model against merged weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models.config.registry import imported
from models.decoders.batch import ForwardBatch
from models.decoders.qwen3_vl import Qwen3VL
from models.kernels.backend import Backend
from models.lora.adapter import read_adapter
from models.lora.low_rank import OPS, LowRank, LowRankOps, TokenSlots, TorchLowRank, make_low_rank
from models.lora.slots import AdapterSlots, read_weights
from models.parallel.group import TensorParallel
from models.scaffold.adapters import write_adapter
from tests.gpu.generated import config_of, fill_generated
from tests.unit.models import adapters
from tests.unit.models.harness import PagedRunner, Prompt, Session, Want, relative, smooth_image

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(600)]

DEVICE = torch.device("cuda")
NUM_SLOTS, MAX_RANK = 16, 64
QKV = (4096, ((0, 4096, 0), (4096, 5120, 1), (5120, 6144, 2)))


def random_low_rank(inputs: int, ranges: tuple[tuple[int, int, int], ...]) -> LowRank:
    """Slots of all ranks; values beyond a rank are not numbers."""
    made = make_low_rank(NUM_SLOTS, MAX_RANK, inputs, ranges, DEVICE, torch.bfloat16)
    made.a_SGRK.normal_(std=inputs**-0.5)
    made.b_SNR.normal_(std=0.3)
    for slot in range(NUM_SLOTS):
        rank = (16, 32, 64, 0)[slot % 4]
        made.ranks_SG[slot] = rank
        made.a_SGRK[slot, :, rank:] = torch.nan
        made.b_SNR[slot, :, rank:] = torch.nan
    return made


def random_slots(num_tokens: int, kinds: int) -> torch.Tensor:
    slots = torch.randint(0, kinds, (num_tokens,), dtype=torch.int32, device=DEVICE)
    slots[1::16] = -1
    return slots


def add_(ops: LowRankOps, out_TN: torch.Tensor, x_TK: torch.Tensor, low_rank: LowRank, slots_T: torch.Tensor) -> None:
    slots = TokenSlots(slots_T)
    ops.expand_(out_TN, ops.shrink(x_TK, low_rank, slots), low_rank, slots)


def close(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((ours.float() - expected.float()).norm() < 1e-2 * expected.float().norm())


def test_graphs_read_slots_and_ranks_as_data(backend: Backend) -> None:
    (inputs, ranges), ours = QKV, imported(OPS[backend.name])()
    low_rank = random_low_rank(inputs, ranges)
    x, slots = torch.randn((64, inputs), dtype=torch.bfloat16, device=DEVICE), torch.full((64,), -1, dtype=torch.int32, device=DEVICE)
    out = torch.zeros((64, ranges[-1][1]), dtype=torch.bfloat16, device=DEVICE)
    add_(ours, out, x, low_rank, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_(ours, out, x, low_rank, slots)
    for kinds in (1, 16):
        slots.copy_(random_slots(64, kinds))
        low_rank.ranks_SG.copy_(low_rank.ranks_SG.roll(4, 0))
        out.zero_()
        graph.replay()
        expected = torch.zeros_like(out)
        add_(TorchLowRank(), expected, x, low_rank, slots)
        assert close(out, expected)


class AdaptedRunner(PagedRunner):
    slot_of: dict[int, int]

    def batch(self, rows: list[tuple[Session, int]], num_prefill_rows: int, want: Want) -> ForwardBatch:
        slots = [self.slot_of[id(session)] for session, count in rows for _ in range(count)]
        return replace(super().batch(rows, num_prefill_rows, want), adapters_T=torch.tensor(slots, dtype=torch.int32, device=DEVICE))


@pytest.mark.parametrize("quantized_to", [None, "float8"])
def test_logits_are_those_of_merged_weights(backend: Backend, tmp_path: Path, quantized_to: str | None) -> None:
    config = config_of("8B", tmp_path / "model")
    config = replace(config, text=replace(config.text, num_layers=8))
    folders = [write_adapter(tmp_path / str(i), config, i, (16, 40)[i], takes=lambda _: True, strength=0.3) for i in range(2)]
    weights = [read_weights(read_adapter(folder, config, MAX_RANK), torch.bfloat16) for folder in folders]
    prompt = Prompt.build(config, [list(range(1000, 90_000, 971)), smooth_image(320, 480), list(range(7, 300, 13))])

    def model_of(quantized: str | None) -> Qwen3VL:
        model = Qwen3VL(
            replace(config, text=replace(config.text, quantized_to=quantized)), TensorParallel.single(), backend, torch.bfloat16
        )
        fill_generated(model)
        return model

    expected = []
    with torch.inference_mode():
        for folder in (None, *folders):
            model = model_of(None)
            if folder is not None:
                adapters.merge_(model, folder)
            runner = PagedRunner(model, num_blocks=256, page_size=16, backend=backend)
            expected.append(runner.step([(runner.start(prompt), len(prompt.ids))], 1, want="all"))
        model = model_of(quantized_to)
        model.finish()
        slots = AdapterSlots(model, backend, 4, MAX_RANK)
        for slot, found in enumerate(weights):
            slots.load(slot, found)
        ours = AdaptedRunner(model, num_blocks=256, page_size=16, backend=backend)
        ours.slot_of, sessions = {}, []
        for slot in (-1, 0, 1):
            with slots.tower(slot):
                sessions.append(ours.start(prompt))
            ours.slot_of[id(sessions[-1])] = slot
        with slots.tower(1):
            alone = ours.start(prompt)  # its last layer multiplies a single token
        ours.slot_of[id(alone)] = 1
        last = ours.step([(alone, len(prompt.ids))], 1)
        size = len(prompt.ids)
        first = ours.step([(session, size - 2) for session in sessions], 3, want="all").split(size - 2)
        second = ours.step([(session, 1) for session in sessions], 0)
        third = [ours.step([(session, 1)], 0) for session in sessions]
    tolerance = 2e-2 if quantized_to is None else 8e-2
    for row, whole in enumerate(expected):
        assert relative(torch.cat((first[row], second[row : row + 1], third[row])), whole) < tolerance, row
    assert relative(last, expected[2][-1:]) < tolerance
    assert relative(expected[1], expected[0]) > 0.1
