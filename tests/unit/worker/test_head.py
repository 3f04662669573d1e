"""The model's own head: its draft tokens equal those of the formula on transformers' layers, for any step that computes them; and they
change no answer."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, Qwen3VLForConditionalGeneration

from engine.scheduler.drafts.mtp import HeadDrafter
from engine.scheduler.request import Request
from engine.wire.config import MAX_HEAD_DRAFTS
from engine.wire.messages import ON_DEVICE, Admit, Chunk, Region, SamplingParams, StepPlan
from engine.worker import rows
from engine.worker.rows import HostStep
from engine.worker.runner import LaunchedStep
from engine.worker.stopwatch import Stopwatch
from models.config.huggingface import read_config
from models.config.types import ModelConfig
from models.decoders.qwen3_vl import Qwen3VL
from models.demo import CHECKPOINT
from models.scaffold import SHAPES, write_model_folder
from models.weights.float8 import BlockScaled
from tests.unit.models import harness, qwen3_5_checkpoints, reference
from tests.unit.models.eagle3_checkpoints import TAPS, Eagle3
from tests.unit.models.harness import Prompt
from tests.unit.scheduler.simulation import Key, key_of
from tests.unit.worker.in_process import Engine, Picture, make_picture
from tests.unit.worker.test_drafts import FEW_BLOCKS, GRAPHS, ask_everything, compiled_regex, text

NIGHTLY = pytest.mark.nightly

OUTPUT = 30


@dataclass
class Both:
    ours: Qwen3VL
    theirs: PreTrainedModel
    head: nn.ModuleDict

    @torch.inference_mode()
    def expected(self, prompt: Prompt, count: int) -> list[int]:
        """What the head makes of a sequence: from the norms of each next token's embedding and of each hidden state, then of its own."""
        seen = {}
        model = self.theirs.model.language_model

        def note(name: str, value: torch.Tensor) -> None:
            seen[name] = value

        handles = [
            model.layers[0].register_forward_pre_hook(lambda _, args: note("embedded", args[0][0])),
            model.rotary_emb.register_forward_pre_hook(
                lambda _, args, named: note("positions", [*args, *named.values()][-1]), with_kwargs=True
            ),
            model.norm.register_forward_hook(lambda _, args, normed: note("hidden", normed[0])),
        ]
        reference.logits(self.theirs, self.ours.config, prompt)
        for handle in handles:
            handle.remove()
        embedded_TD, hidden_TD, positions_31T = seen["embedded"][1:], seen["hidden"][:-1], seen["positions"]
        tokens = []
        for _ in range(count):
            joined = (self.head["pre_fc_norm_embedding"](embedded_TD), self.head["pre_fc_norm_hidden"](hidden_TD))
            x_1TD = self.head["fc"](torch.cat(joined, dim=-1))[None]
            angles = model.rotary_emb(x_1TD, positions_31T[..., : x_1TD.shape[1]])
            last_D = self.head["norm"](self.head["layers"][0](x_1TD, position_embeddings=angles, attention_mask=None))[0, -1]
            tokens.append(int(self.theirs.lm_head(last_D).argmax()))
            embedded_TD = torch.cat((embedded_TD, model.embed_tokens(torch.tensor(tokens[-1:]))))
            hidden_TD = torch.cat((hidden_TD, last_D[None]))
            positions_31T = torch.cat((positions_31T, positions_31T[..., -1:] + 1), dim=-1)
        return tokens


@dataclass
class BothEagle3(Both):
    """With a head of another checkpoint, which reads the inputs of three layers."""

    head: Eagle3

    @torch.inference_mode()
    def expected(self, prompt: Prompt, count: int) -> list[int]:
        model, seen = self.theirs.model.language_model, {}
        handles = [model.layers[tap].register_forward_pre_hook(lambda _, args, tap=tap: seen.update({tap: args[0][0]})) for tap in TAPS]
        handles += [
            model.layers[0].register_forward_pre_hook(lambda _, args: seen.update(embedded=args[0][0])),
            model.rotary_emb.register_forward_pre_hook(
                lambda _, args, named: seen.update(positions=[*args, *named.values()][-1]), with_kwargs=True
            ),
        ]
        reference.logits(self.theirs, self.ours.config, prompt)
        for handle in handles:
            handle.remove()
        head, ids, own = self.head, torch.tensor(prompt.ids), self.head.embed_tokens
        table = model.embed_tokens if head.is_nested else own
        is_text_T1 = (ids != self.ours.config.placeholder_ids["image"])[:, None]
        embedded_TD = torch.where(is_text_T1, table(ids), seen["embedded"])[1:]
        hidden_TD, positions_31T = head.fc(torch.cat([seen[tap] for tap in TAPS], dim=-1))[:-1], seen["positions"]
        tokens: list[int] = []
        for _ in range(count):
            used = positions_31T[..., : len(hidden_TD)]
            angles = model.rotary_emb(hidden_TD[None], used[:1].expand(3, -1, -1) if head.is_nested else used)
            last_D = head(embedded_TD, hidden_TD, angles)[-1]
            tokens.append(int(head.ids[head.lm_head(head.norm(last_D)).argmax()]))
            embedded_TD = torch.cat((embedded_TD, table(torch.tensor(tokens[-1:]))))
            hidden_TD = torch.cat((hidden_TD, last_D[None]))
            positions_31T = torch.cat((positions_31T, positions_31T[..., -1:] + 1), dim=-1)
        return tokens


@pytest.fixture(scope="module", params=["dense", pytest.param("sparse", marks=NIGHTLY), "eagle3", "eagle3 nested"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp("head")
    if "eagle3" in request.param:
        target = Qwen3VLForConditionalGeneration.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
        eagle3 = Eagle3(target.config.text_config, "nested" in request.param)
        eagle3.save(folder / "head")
        return BothEagle3(harness.load(CHECKPOINT, eagle3=str(folder / "head")), target, eagle3)
    demo = json.loads((CHECKPOINT / "config.json").read_text())  # whose grammars count its tokens
    ids = {name: demo[name] for name in qwen3_5_checkpoints.IDS}
    theirs = qwen3_5_checkpoints.write(folder, request.param == "sparse", ids=ids, vocab_size=demo["text_config"]["vocab_size"])
    shutil.copy(CHECKPOINT / "generation_config.json", folder)
    head = qwen3_5_checkpoints.add_head(folder, theirs)
    return Both(harness.load(folder, with_head=True), theirs, head)


class Telling:
    """Records the head's drafts and replaces each by the coming token with probability `share`: random heads predict nothing."""

    def __init__(self, engine: Engine, known: dict[Key, list[int]], share: float) -> None:
        assert engine._runner.head is not None
        self._head, self._core = engine._runner.head, engine.core
        self._known, self._share, self._rng = known, share, random.Random(0)
        self.noted: list[tuple[Request, int, list[int]]] = []  # behind so many tokens of output
        engine._runner.head = self

    def run(self, step: HostStep, tokens_S: torch.Tensor, rows_S: torch.Tensor, count: int) -> torch.Tensor:
        found = self._head.run(step, tokens_S, rows_S, count)
        altered = found.clone()
        requests = {request.row: request for request in self._core.state.running}
        samples = step.samples
        for i, (row, position) in enumerate(zip(samples.rows.tolist(), samples.positions.tolist(), strict=True)):
            request = requests[row]
            done = position + 1 - request.num_prompt
            if rows_S[i] == row and count:
                self.noted.append((request, done, found[i].tolist()))
            right = self._known[key_of(request.rid, request.index)][done : done + count]
            for k, token in enumerate(right):
                altered[i, k] = token if self._rng.random() < self._share else self._rng.randrange(300)
        return altered


def prompts(config: ModelConfig) -> list[list[list[int] | Picture]]:
    """One is cut inside an image, none before one: the head would not know its first token there."""
    start, end = config.vision_start_token_id, config.vision_end_token_id
    return [
        [text(50, 0)],
        [text(13, 1)],
        [[*text(5, 2), start], make_picture(0, 64, 96), [end, *text(4, 3), start], make_picture(1, 96, 64), [end, *text(29, 4)]],
        [[start], make_picture(2, 64, 64), [end]],
    ]


@pytest.mark.parametrize(
    ("limits", "chosen"),
    [
        pytest.param({}, (0, 1, 2, 3), marks=NIGHTLY),
        (GRAPHS, (2, 3)),
        pytest.param(GRAPHS, (0, 1, 2, 3), marks=NIGHTLY),
        ({"max_num_batched_tokens": 12, "max_num_mixed_tokens": 8}, (0, 1)),
    ],
)
def test_drafts_are_those_of_the_formula(both: Both, limits: dict[str, Any], chosen: tuple[int, ...]) -> None:
    asked = [prompts(both.ours.config)[i] for i in chosen]
    plain = Engine(both.ours)
    engine = Engine(both.ours, drafter=HeadDrafter(64), prefix_cache=False, **limits)
    telling = Telling(engine, plain.tokens, 0.7)
    for one in (plain, engine):
        for rid, parts in enumerate(asked):
            one.add(rid, parts, max_tokens=OUTPUT)
        one.run()
    assert engine.tokens == plain.tokens and engine.core.state.counters.accepted_draft_tokens > OUTPUT // 2
    lengths = {len(drafts) for _, _, drafts in telling.noted}
    assert MAX_HEAD_DRAFTS in lengths and len(telling.noted) > OUTPUT
    firsts = [one for one in telling.noted if one[1] == 1]
    for request, done, drafts in (*firsts, *random.Random(0).sample(telling.noted, 16)):
        parts = [part if isinstance(part, list) else torch.from_numpy(part.pixels) for part in asked[request.rid]]
        for place, part in enumerate(parts):  # the ids around images come with them
            if isinstance(part, torch.Tensor):
                parts[place - 1], parts[place + 1] = parts[place - 1][:-1], parts[place + 1][1:]
        prompt = Prompt.build(both.ours.config, parts)
        prompt.ids += engine.tokens[request.rid][:done]
        assert drafts == both.expected(prompt, len(drafts)), (request.rid, done)


class LateCopies:
    """Stands in for a slow device: a copy to the host is done when an event after it was waited for; until then it is 1s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._mark = Stopwatch.mark
        monkeypatch.setattr(rows, "to_host", self._to_host)
        monkeypatch.setattr(Stopwatch, "mark", lambda watch: self._note(watch))
        monkeypatch.setattr(Stopwatch, "wait", lambda watch: self._finish(watch.num_copies))

    def _to_host(self, values: torch.Tensor) -> torch.Tensor:
        self._copies.append((torch.ones_like(values), values.clone()))
        return self._copies[-1][0]

    def _note(self, watch: Any) -> None:
        self._mark(watch)
        watch.num_copies = len(self._copies)

    @torch.inference_mode()
    def _finish(self, num_copies: int) -> None:
        for late, values in self._copies[:num_copies]:
            late.copy_(values)


@pytest.mark.parametrize("limits", [FEW_BLOCKS, *(pytest.param(one, marks=NIGHTLY) for one in ({}, GRAPHS))])
def test_drafts_that_only_the_device_knows_change_nothing(both: Both, monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any]) -> None:
    """Red if a draft is taken for that of another row, request or step, or read before it is on the host, which only masks wait for."""
    regex, free, plain = compiled_regex(), Engine(both.ours), Engine(both.ours, max_num_seqs=17)
    free.add(0, [text(20, 0)], max_tokens=40, seed=5, temperature=1.0)
    ask_everything(plain, regex, free.run()[0])
    LateCopies(monkeypatch)
    engine = Engine(both.ours, drafter=HeadDrafter(128), depth=2, max_num_seqs=17, **limits)
    Telling(engine, plain.tokens, 0.8)
    ask_everything(engine, regex, free.tokens[0])
    counters = engine.core.state.counters
    assert engine.tokens == plain.tokens and not engine.errors and counters.accepted_draft_tokens > 50
    assert (counters.preemptions > 0) == ("num_blocks" in limits)
    for key, expected in plain.logprobs.items():
        assert [item.top_ids for item in engine.logprobs[key]] == [item.top_ids for item in expected]


def test_a_result_leaves_before_the_heads_passes(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(both.ours, drafter=HeadDrafter(64), max_num_seqs=1)
    runner, order, reported = engine._runner, [], []
    assert runner.head is not None
    launch, head, mark = runner.launch, runner.head.run, Stopwatch.mark

    def launched(plan: StepPlan) -> LaunchedStep:
        step = launch(plan)
        (drafts,) = step.result().proposed
        reported.append((bool(plan.admits), len(drafts)))
        return step

    monkeypatch.setattr(runner, "launch", launched)
    monkeypatch.setattr(runner.head, "run", lambda *args: (order.append("head"), head(*args))[1])
    monkeypatch.setattr(Stopwatch, "mark", lambda watch: (order.append("mark"), mark(watch))[1])
    for rid in range(2):
        engine.add(rid, [text(5, rid)], max_tokens=4)
        engine.run()
    assert order == ["mark", "mark", "head", "mark"] * len(reported) and len(reported) > 4
    assert all((num_drafts == 0) == is_new for is_new, num_drafts in reported)
    runner.rows.admit(Admit(0, Region(1, 0, 4), [], [], [], SamplingParams()), np.ones(1, dtype=np.int32))
    with pytest.raises(AssertionError, match="not proposed"):
        runner.rows.build([], [Chunk(0, 1, 2, True, [], [], (ON_DEVICE,))], {})


@torch.inference_mode()
def test_drafts_come_from_an_output_matrix_in_float8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model_folder(tmp_path, SHAPES["3.5-tiny"], weights="random", seed=0)
    model = harness.load(tmp_path, with_head=True)
    model.lm_head.weight.mul_(torch.logspace(-2, 0, len(model.lm_head.weight))[:, None])
    hidden_SD = torch.randn((64, model.config.text.hidden_size), generator=torch.Generator().manual_seed(0))
    logits_SV = model.logits(hidden_SD)
    assert model.predictor.top_tokens(hidden_SD).equal(logits_SV.argmax(dim=-1))
    model.predictor.round_output_matrix()
    model.lm_head.weight.zero_()
    found_S = logits_SV.gather(1, model.predictor.top_tokens(hidden_SD)[:, None])[:, 0]
    assert (found_S > 0.9 * logits_SV.amax(dim=-1)).all()
    monkeypatch.delattr(BlockScaled, "empty")  # an update has no memory for a second one
    model.predictor.finish()
    assert not model.predictor.top_tokens(hidden_SD).any(), "of zeros"


def test_a_model_without_a_head_says_so(tmp_path: Path) -> None:
    qwen3_5_checkpoints.write(tmp_path)
    with pytest.raises(ValueError, match="prediction head"):
        read_config(tmp_path, with_head=True)


def changed_head(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    Eagle3(Qwen3VLForConditionalGeneration.config_class.from_pretrained(CHECKPOINT).text_config, is_nested=False).save(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: change(tensors[name])}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("fc.weight", lambda x: x[:, 3:].contiguous(), r"tensor eagle3\.fc\.weight has shape \(192, 573\)"),
        ("midlayer.self_attn.k_proj.weight", lambda x: x[:128].contiguous(), r"k_proj\.weight has shape \(128, 384\)"),
        ("d2t", lambda x: x + 700, "tensor d2t .* outside the vocabulary"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    tmp_path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor], reason: str
) -> None:
    folder = changed_head(tmp_path / "head", name, change)
    with pytest.raises(ValueError, match=reason):
        harness.load(CHECKPOINT, eagle3=str(folder))
