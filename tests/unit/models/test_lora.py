"""Adapters against transformers with PEFT, float32 on the CPU."""

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration, Qwen3VLForConditionalGeneration

from models.checkpoint.load import load_weights
from models.config.huggingface import read_config
from models.decoders.batch import ForwardBatch
from models.decoders.qwen3_vl import Qwen3VL
from models.lora.adapter import read_adapter
from models.lora.slots import AdapterSlots, read_weights
from models.parallel.group import TensorParallel
from tests.unit.models import adapters, qwen3_5_checkpoints, reference
from tests.unit.models.harness import ONE_IMAGE, SEVERAL_TURNS, TEXT, TORCH, PagedRunner, Prompt, Session, Want, load, make, relative
from tests.unit.models.ranks import start_ranks

NUM_SLOTS, MAX_RANK = 4, 24
MIXED: dict[str, Any] = {"ranks": {"q_proj": 3, "layers.1.mlp.up_proj": 17}, "alpha_pattern": {"v_proj": 5, "layers.2.mlp.up_proj": 3}}


class AdaptedRunner(PagedRunner):
    def __init__(self, model: Qwen3VL, slots: AdapterSlots, **options: Any) -> None:
        super().__init__(model, **options)
        self.slots, self.slot_of = slots, dict[int, int]()

    def start_with(self, slot: int, prompt: Prompt) -> Session:
        with self.slots.tower(slot) if prompt.images else nullcontext():
            session = self.start(prompt)
        self.slot_of[id(session)] = slot
        return session

    def batch(self, rows: Sequence[tuple[Session, int]], num_prefill_rows: int, want: Want) -> ForwardBatch:
        slots = [self.slot_of[id(session)] for session, count in rows for _ in range(count)]
        slots_T = torch.tensor(slots, dtype=torch.int32, device=self.model.device) if max(slots) >= 0 else None
        return replace(super().batch(rows, num_prefill_rows, want), adapters_T=slots_T)


def adapt(folder: Path, *adapter_folders: Path) -> tuple[Qwen3VL, AdapterSlots]:
    model = load(folder)
    slots = AdapterSlots(model, TORCH, NUM_SLOTS, MAX_RANK)
    for slot, adapter in enumerate(adapter_folders):
        slots.load(slot, read_weights(read_adapter(adapter, model.config, MAX_RANK), model.dtype))
    return model, slots


def every_logit(runner: AdaptedRunner, slot: int, prompt: Prompt, chunk: int = 1 << 30) -> torch.Tensor:
    session, parts = runner.start_with(slot, prompt), []
    while (left := len(prompt.ids) - session.computed) > 0:
        parts.append(runner.step([(session, min(chunk, left))], num_prefill_rows=1, want="all"))
    return torch.cat(parts)


def peft_model(model: Any, folder: Path) -> Any:
    return pytest.importorskip("peft").PeftModel.from_pretrained(model.eval(), folder).eval()


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True, **MIXED}], ids=["plain", "rank and alpha per module"])
def test_text_equals_peft(tiny_folder: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    adapter = adapters.write(tmp_path / "adapter", tiny_folder, 1, **settings)
    theirs = peft_model(Qwen3VLForConditionalGeneration.from_pretrained(tiny_folder, dtype=torch.float32), adapter)
    model, slots = adapt(tiny_folder, adapter)
    prompt = Prompt.build(model.config, TEXT)
    expected = reference.logits(theirs.get_base_model(), model.config, prompt)
    for chunk in (1 << 30, 7):
        assert relative(every_logit(AdaptedRunner(model, slots), 0, prompt, chunk), expected) < 1e-4
    assert relative(expected, every_logit(AdaptedRunner(model, slots), -1, prompt)) > 0.1, "the adapter changes nothing"


def of_both(module: str) -> bool:
    return True


def test_images_with_an_adapter_of_tower_and_decoder_equal_peft(tiny_folder: Path, tmp_path: Path) -> None:
    adapter = adapters.write(tmp_path / "adapter", tiny_folder, 2, takes=of_both, **MIXED)
    theirs = peft_model(Qwen3VLForConditionalGeneration.from_pretrained(tiny_folder, dtype=torch.float32), adapter)
    model, slots = adapt(tiny_folder, adapter)
    assert [part.name for part in model.checkpoint_tensors()] == [part.name for part in load(tiny_folder).checkpoint_tensors()]
    prompt = Prompt.build(model.config, SEVERAL_TURNS)
    runner = AdaptedRunner(model, slots)
    without = every_logit(runner, -1, prompt)
    assert relative(every_logit(runner, 0, prompt, 50), reference.logits(theirs.get_base_model(), model.config, prompt)) < 1e-4
    assert every_logit(runner, -1, prompt).equal(without)
    assert relative(without, every_logit(AdaptedRunner(load(tiny_folder), slots), -1, prompt)) < 1e-6


@pytest.mark.parametrize("is_sparse", [False, True])
def test_hybrid_model_equals_peft(tmp_path: Path, is_sparse: bool) -> None:
    qwen3_5_checkpoints.write(tmp_path / "model", is_sparse)
    kind = Qwen3_5MoeForConditionalGeneration if is_sparse else Qwen3_5ForConditionalGeneration
    rename = lambda path: re.sub(r"self_attn\.(in_proj|out_proj)", r"linear_attn.\1", path)  # noqa: E731
    adapter = adapters.write(tmp_path / "adapter", tmp_path / "model", 3, takes=of_both, rename=rename)
    theirs = peft_model(kind.from_pretrained(tmp_path / "model", dtype=torch.float32), adapter)
    model, slots = adapt(tmp_path / "model", adapter)
    prompt = Prompt.build(model.config, ONE_IMAGE)
    expected = reference.logits(theirs.get_base_model(), model.config, prompt)
    assert relative(every_logit(AdaptedRunner(model, slots), 0, prompt, 64), expected) < 1e-4


def rank_logits(rank: int, size: int, folder: Path, adapter: Path, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=size)
    model = make(read_config(folder), TensorParallel(rank, size, dist.group.WORLD))
    load_weights(model, folder, lambda done, total: None)
    slots = AdapterSlots(model, TORCH, NUM_SLOTS, MAX_RANK)
    slots.load(2, read_weights(read_adapter(adapter, model.config, MAX_RANK), model.dtype))
    torch.save(every_logit(AdaptedRunner(model, slots), 2, Prompt.build(model.config, ONE_IMAGE), 50), out / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_ranks_share_adapters_as_their_matrices(tiny_folder: Path, tmp_path: Path, size: int) -> None:
    adapter = adapters.write(tmp_path / "adapter", tiny_folder, 5, takes=of_both, **MIXED)
    theirs = peft_model(Qwen3VLForConditionalGeneration.from_pretrained(tiny_folder, dtype=torch.float32), adapter)
    start_ranks(rank_logits, size, tiny_folder, adapter, tmp_path)
    config = read_config(tiny_folder)
    expected = reference.logits(theirs.get_base_model(), config, Prompt.build(config, ONE_IMAGE))
    for rank in range(size):
        assert relative(torch.load(tmp_path / f"{rank}.pt"), expected) < 1e-4
