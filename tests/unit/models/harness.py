"""Runs a model the way the worker does, in few lines: prompts with images, paged KV cache, chunks, mixed rows. Used by tests of models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
from torch import nn

from models.cache.layout import AttentionLayout
from models.cache.states import RowStates
from models.checkpoint.load import load_eagle3, load_weights
from models.checkpoint.update import InMemory
from models.config.huggingface import read_config
from models.config.types import ModelConfig
from models.decoders.batch import ForwardBatch, VisualSlice
from models.decoders.contract import make_model
from models.decoders.qwen3_vl import Qwen3VL
from models.kernels.backend import Backend
from models.kernels.ops import StateRows
from models.kernels.paged import AttentionBackend, allocate_pools
from models.kernels.reference.backend import TorchBackend
from models.media.geometry import Grid
from models.media.mrope import mrope_positions
from models.media.video import VideoGeometry, time_text
from models.parallel.group import TensorParallel
from models.weights.matrix import matrices_of

Want = Literal["last", "all", "none"]
Part = list[int] | torch.Tensor  # token ids, an image (H, W, 3) or a video (F, H, W, 3), uint8

FPS = 2.0  # of a video's frames
VIDEO_GEOMETRY = VideoGeometry(16, 2, 2, 4096, 25_165_824)  # of the published checkpoints

CPU = torch.device("cpu")
TORCH = TorchBackend(CPU)


MAX_ROWS = 16


def make(config: ModelConfig, tp: TensorParallel) -> Qwen3VL:
    return cast(Qwen3VL, make_model(config, tp, TORCH, torch.float32))


def load(folder: Path, with_head: bool = False, quantized_to: str | None = None, eagle3: str = "") -> Qwen3VL:
    config = read_config(folder, with_head, eagle3)
    model = make(replace(config, text=replace(config.text, quantized_to=quantized_to)), TensorParallel.single())
    load_weights(model, folder, lambda done, total: None)
    if eagle3:
        load_eagle3(model, Path(eagle3), lambda done, total: None)
    model.finish()
    return model


def stored_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    matrices = [(path, each) for path, matrix in matrices_of(module) for each in matrix.storage.stored]
    stored = {path + each.suffix.removeprefix(".weight"): each.tensor for path, each in matrices}
    return {path: x.view(torch.uint8) if x.itemsize == 1 else x for path, x in (dict(module.named_parameters()) | stored).items()}


def assert_same(first: nn.Module, second: nn.Module) -> None:
    ours, theirs = stored_tensors(first), stored_tensors(second)
    assert ours.keys() == theirs.keys()
    assert not [path for path in ours if not ours[path].equal(theirs[path])]


class TensorSource(dict[str, InMemory]):
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__({name: InMemory(tensor) for name, tensor in tensors.items()})


@dataclass
class Prompt:
    """Token ids with every image expanded to its placeholders between vision start and end; a video's pairs behind their times."""

    ids: list[int]
    images: list[torch.Tensor]  # and pairs (2, H, W, 3)
    spans: list[tuple[int, Grid]]  # first placeholder, grid in tokens
    grids: list[Grid] = field(default_factory=list)
    videos: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def build(cls, config: ModelConfig, parts: Sequence[Part]) -> "Prompt":
        prompt = cls([], [], [])
        for part in parts:
            if isinstance(part, list):
                prompt.ids += part
            elif part.ndim == 3:
                prompt._add(config, part, config.geometry.grid(part.shape[0], part.shape[1]), config.placeholder_ids["image"])
            else:
                prompt._add_video(config, part)
        return prompt

    def _add_video(self, config: ModelConfig, frames: torch.Tensor) -> None:
        self.videos.append(frames)
        _, rows, columns = VIDEO_GEOMETRY.grid(*frames.shape[:3])
        self.ids.append(config.vision_start_token_id)
        for i, time in enumerate(VIDEO_GEOMETRY.pair_times([index / FPS for index in range(len(frames))])):
            self.ids += time_text(time).encode()  # as if every character was a token
            pair = torch.stack((frames[2 * i], frames[min(2 * i + 1, len(frames) - 1)]))
            self._add(config, pair, (1, rows, columns), config.placeholder_ids["video"])
        self.ids.append(config.vision_end_token_id)

    def _add(self, config: ModelConfig, item: torch.Tensor, grid: Grid, placeholder: int) -> None:
        self.images.append(item)
        self.grids.append(grid)
        self.spans.append((len(self.ids) + 1, config.geometry.merged(grid)))
        self.ids += [config.vision_start_token_id, *[placeholder] * config.geometry.num_tokens(grid), config.vision_end_token_id]


def noise_image(height: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def smooth_image(height: int, width: int, seed: int = 0) -> torch.Tensor:
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    waves = [np.sin(6 * x * (c + 1) + seed) * np.cos(5 * y * (c + 1) - seed) for c in range(3)]
    return torch.from_numpy((np.stack(waves, -1) * 127 + 128).clip(0, 255).astype(np.uint8))


TEXT = [list(range(5, 900, 23))]
ONE_IMAGE: list[Part] = [[3, 1, 4, 1, 5], smooth_image(260, 340), [9, 2, 6, 5, 3, 5]]
FIVE_IMAGES: list[Part] = [
    *(noise_image(h, w, seed=h) for h, w in ((256, 256), (100, 700), (256, 256), (33, 17))),
    [8, 9, 7],
    smooth_image(300, 280, seed=4),
    [9, 3, 2],
]
SEVERAL_TURNS: list[Part] = [
    [7, 7],
    smooth_image(256, 320, seed=1),
    [11, 12, 13],
    [4001, 21, 22],
    noise_image(310, 256, seed=2),
    smooth_image(256, 256, seed=3),
    [31, 32],
]
VIDEOS: list[Part] = [
    [5, 6, 7],
    torch.stack([smooth_image(90, 130, seed=i) for i in range(5)]),
    [8, 9],
    smooth_image(260, 300, seed=5),
    torch.stack([noise_image(64, 96, seed=i) for i in range(4)]),
    [3, 1, 4],
]
PROMPTS = {"text": TEXT, "one image": ONE_IMAGE, "five images": FIVE_IMAGES, "several turns": SEVERAL_TURNS, "videos": VIDEOS}


@dataclass
class Session:
    ids: list[int]
    positions: np.ndarray
    delta: int
    spans: list[tuple[int, torch.Tensor]]  # first placeholder, embedding (1 + L, N, D)
    row: int
    pages: list[int] = field(default_factory=list)
    computed: int = 0


class PagedRunner:
    """A model with its KV pools. Pages are handed out in a shuffled order, so that none is where a contiguous cache would have it."""

    def __init__(self, model: Qwen3VL, num_blocks: int = 512, page_size: int = 4, backend: Backend = TORCH) -> None:
        self.model = model
        self.page_size = page_size
        config = model.config.text
        self.pools = allocate_pools(model.cache_spec.paged, num_blocks, page_size, model.dtype, model.device)
        self.attention: AttentionBackend = backend.attention(self.pools, config.num_heads // model.tp.size)
        self.states = tuple(RowStates(group, MAX_ROWS, model.device) for group in model.cache_spec.states)
        self._num_rows = 0
        self._free = np.random.default_rng(0).permutation(num_blocks).tolist()

    def start(self, prompt: Prompt) -> Session:
        embeddings: list[torch.Tensor] = [torch.empty(0)] * len(prompt.images)
        for ndim in (3, 4):
            chosen = [i for i, item in enumerate(prompt.images) if item.ndim == ndim]
            if not chosen:
                continue
            found = self.model.tower.encode([prompt.images[i].to(self.model.device) for i in chosen], [prompt.grids[i] for i in chosen])
            for i, embedding in zip(chosen, found, strict=True):
                embeddings[i] = embedding
        positions, delta = mrope_positions(len(prompt.ids), prompt.spans)
        self._num_rows += 1
        spans = [(start, embedding) for (start, _), embedding in zip(prompt.spans, embeddings, strict=True)]
        return Session(list(prompt.ids), positions, delta, spans, self._num_rows % MAX_ROWS)

    def step(self, rows: Sequence[tuple[Session, int]], num_prefill_rows: int, want: Want = "last") -> torch.Tensor:
        """Computes the next tokens of each row, `(session, count)`; logits of each row's last token, of all tokens, or of none."""
        batch = self.batch(rows, num_prefill_rows, want)
        self.attention.plan(batch.attention)
        logits = self.model.logits(self.model(batch, self.attention))
        for session, count in rows:
            session.computed += count
        return logits

    def prefill(self, session: Session, chunk: int) -> torch.Tensor:
        while True:
            count = min(chunk, len(session.ids) - session.computed)
            logits = self.step([(session, count)], num_prefill_rows=1)
            if session.computed == len(session.ids):
                return logits

    def greedy(self, prompt: Prompt, steps: int, chunk: int = 1 << 30) -> list[int]:
        session = self.start(prompt)
        logits = self.prefill(session, chunk)
        for _ in range(steps - 1):
            session.ids.append(int(logits.argmax()))
            logits = self.step([(session, 1)], num_prefill_rows=0)
        return [*session.ids[len(prompt.ids) :], int(logits.argmax())]

    def batch(self, rows: Sequence[tuple[Session, int]], num_prefill_rows: int, want: Want) -> ForwardBatch:
        ids: list[int] = []
        positions, slots, visual, pages = [], [], [], []
        qo, kv, page_ends, wanted = [0], [], [0], []
        for session, count in rows:
            begin, end = session.computed, session.computed + count
            while len(session.pages) * self.page_size < end:
                session.pages.append(self._free.pop())
            span = np.arange(begin, end)
            known = session.positions.shape[1]
            position = np.tile(span + session.delta, (3, 1))
            position[:, : max(0, known - begin)] = session.positions[:, begin:end]
            positions.append(position)
            slots.append(np.asarray(session.pages)[span // self.page_size] * self.page_size + span % self.page_size)
            for start, embedding in session.spans:
                low, high = max(start, begin), min(start + embedding.shape[1], end)
                if low < high:
                    visual.append(VisualSlice(len(ids) + low - begin, high - low, low - start, embedding))
            ids += session.ids[begin:end]
            pages += session.pages
            qo.append(len(ids))
            kv.append(end)
            page_ends.append(len(pages))
            wanted.append(len(ids) - 1)
        layout = AttentionLayout(
            *(torch.tensor(values, dtype=torch.int32) for values in (qo, kv, page_ends)),
            pages=self._tensor(pages, torch.int32),
            slot_mapping_T=self._tensor(np.concatenate(slots), torch.int64),
            num_prefill_rows=num_prefill_rows,
        )
        starts_R1 = self._tensor(qo, torch.int32)
        indices = {"last": wanted, "all": range(len(ids)), "none": []}[want]
        return ForwardBatch(
            input_ids_T=self._tensor(ids, torch.int64),
            positions_3T=self._tensor(np.concatenate(positions, axis=1), torch.int64),
            attention=layout,
            visual=tuple(visual),
            logits_indices=self._tensor(indices, torch.int64),
            states=self.states,
            rows=StateRows(self._tensor([session.row for session, _ in rows], torch.int64), starts_R1, num_prefill_rows),
        )

    def _tensor(self, values: Sequence[int] | np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values), dtype=dtype).to(self.model.device)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def every_logit(model: Qwen3VL, prompt: Prompt, chunk: int = 1 << 30, backend: Backend = TORCH) -> torch.Tensor:
    runner = PagedRunner(model, backend=backend)
    session, parts = runner.start(prompt), []
    while (left := len(prompt.ids) - session.computed) > 0:
        parts.append(runner.step([(session, min(chunk, left))], num_prefill_rows=1, want="all"))
    return torch.cat(parts)


def check_rows_of_one_step(model: Qwen3VL) -> None:
    """A step with a first chunk, a later chunk inside an image and two decode rows gives each row what it gets alone."""
    prompts = [Prompt.build(model.config, parts) for parts in (ONE_IMAGE, FIVE_IMAGES, TEXT, SEVERAL_TURNS)]
    done = (0, 100, len(prompts[2].ids) - 1, len(prompts[3].ids) - 1)  # tokens computed before the step
    counts = (60, 77, 1, 1)
    runner = PagedRunner(model)
    sessions = [runner.start(prompt) for prompt in prompts]
    for session, before in zip(sessions, done, strict=True):
        if before:
            runner.step([(session, before)], num_prefill_rows=1)
    together = runner.step(list(zip(sessions, counts, strict=True)), num_prefill_rows=2)
    for row, (prompt, before, count) in enumerate(zip(prompts, done, counts, strict=True)):
        alone = PagedRunner(model)
        expected = alone.step([(alone.start(prompt), before + count)], num_prefill_rows=1)
        assert relative(together[row], expected[0]) < 1e-4


def check_a_step_without_wanted_tokens(model: Qwen3VL) -> None:
    prompt = Prompt.build(model.config, ONE_IMAGE)
    runner = PagedRunner(model)
    session = runner.start(prompt)
    assert runner.step([(session, 50)], num_prefill_rows=1, want="none").shape == (0, model.config.text.vocab_size)
    logits = runner.prefill(session, chunk=1 << 30)
    assert relative(logits, PagedRunner(model).prefill(runner.start(prompt), chunk=1 << 30)) < 1e-4
