"""Pictures and conversations as arrays: preprocessing, labels, token ids, M-RoPE positions, packing. Used by `feed` and `net`; no torch.

Batches have fixed sizes, so that a whole training step can be one CUDA graph. Every padding piece is a sequence of its own without loss.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from models.demo.questions import Turn, jpeg_quality
from models.demo.render import IMAGE_GEOMETRY, Mark, draw
from models.demo.scenes import COLOURS, SHAPES, Scene

PATCH, MERGE = IMAGE_GEOMETRY.patch_size, IMAGE_GEOMETRY.merge_size
LABELS = {name: i + 1 for i, name in enumerate((*"0123456789abcdefghijklmnopqrstuvwxyz", *SHAPES))}  # 0: nothing there
COLOUR_LABELS = {name: i + 1 for i, name in enumerate(COLOURS)}
IGNORED = -100


@dataclass(frozen=True, slots=True)
class Sizes:
    """Fixed sizes of a batch: patches, tokens, answer tokens, picture and conversation segments."""

    patches: int = 49152
    tokens: int = 24576
    answers: int = 4096
    pictures: int = 768
    conversations: int = 384
    longest_picture: int = IMAGE_GEOMETRY.max_pixels // PATCH**2
    longest_conversation: int = 1536


@dataclass(slots=True)
class Batch:
    """One packed batch; P patches in merge order, T tokens, N = P / 4 visual tokens, A answers. All offsets are ends-exclusive prefixes."""

    patches: np.ndarray  # (P, 768) uint8, channel first
    grid_rows: np.ndarray  # (P,) int32, row of the patch in `GridTable`
    labels: np.ndarray  # (P,) uint8, what is drawn there
    colours: np.ndarray  # (P,) uint8, and in which colour
    cu_pictures: np.ndarray  # (pictures + 1,) int32
    ids: np.ndarray  # (T,) int32
    positions: np.ndarray  # (3, T) int32, M-RoPE
    visual: np.ndarray  # (T,) int32, index of the visual token that stands here, or -1
    picture_index: np.ndarray  # (T,) uint8, which picture of its conversation the token belongs to, from 1; 0 for text
    cu_conversations: np.ndarray  # (conversations + 1,) int32
    answer_at: np.ndarray  # (A,) int32, position whose next token is asked for
    answer_ids: np.ndarray  # (A,) int32, that token, or IGNORED

    def arrays(self) -> dict[str, np.ndarray]:
        """Name to array, in declaration order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def empty_batch(sizes: Sizes) -> Batch:
    """A batch of zeros."""
    p, t, a = sizes.patches, sizes.tokens, sizes.answers
    return Batch(
        np.zeros((p, 3 * PATCH * PATCH), np.uint8), np.zeros(p, np.int32), np.zeros(p, np.uint8), np.zeros(p, np.uint8),
        np.zeros(sizes.pictures + 1, np.int32), np.zeros(t, np.int32), np.zeros((3, t), np.int32), np.zeros(t, np.int32),
        np.zeros(t, np.uint8), np.zeros(sizes.conversations + 1, np.int32), np.zeros(a, np.int32), np.zeros(a, np.int32),
    )  # fmt: skip


class GridTable:
    """Numbers all patches of all grids that the preprocessing can produce, so that a patch's position is one integer."""

    def __init__(self) -> None:
        side, unit = PATCH * MERGE, IMAGE_GEOMETRY
        most = unit.max_pixels // side**2
        least = unit.min_pixels // side**2
        shapes = [(h, w) for h in range(1, most + 1) for w in range(1, most // h + 1) if h * w >= least and max(h, w) <= 8 * min(h, w)]
        self.grids = [(h * MERGE, w * MERGE) for h, w in shapes]
        starts = np.cumsum([0] + [h * w for h, w in self.grids])
        self.rows = int(starts[-1])
        self.start = {grid: int(start) for grid, start in zip(self.grids, starts[:-1], strict=True)}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A drawn picture after the reference preprocessing, and what its patches show."""

    scene: Scene
    grid: tuple[int, int]
    patches: np.ndarray
    labels: np.ndarray
    colours: np.ndarray


def prepare(rng: np.random.Generator, scene: Scene) -> Prepared:
    """Draw, pass half of the pictures through JPEG, resize and cut as the reference's image processor does (before normalising)."""
    drawing = draw(scene, rng)
    image = drawing.image
    if rng.random() < 0.5 and scene.mess > 0:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=jpeg_quality(rng, scene))
        image = Image.open(buffer).convert("RGB")
    _, grid_h, grid_w = IMAGE_GEOMETRY.grid(scene.height, scene.width)
    size = (grid_w * PATCH, grid_h * PATCH)
    pixels = np.asarray(image if image.size == size else image.resize(size, Image.Resampling.BICUBIC))
    labels, colours = _label_grids(drawing.marks, grid_h, grid_w, grid_h * PATCH / scene.height, grid_w * PATCH / scene.width)
    cut = pixels.reshape(grid_h, PATCH, grid_w, PATCH, 3).transpose(0, 2, 4, 1, 3).reshape(grid_h, grid_w, -1)
    return Prepared(scene, (grid_h, grid_w), _merge_order(cut), _merge_order(labels)[:, 0], _merge_order(colours)[:, 0])


def _merge_order(grid: np.ndarray) -> np.ndarray:
    """(h, w, n) to (h * w, n) with the four patches of a visual token next to each other."""
    height, width, depth = grid.shape
    blocks = grid.reshape(height // MERGE, MERGE, width // MERGE, MERGE, depth).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(blocks).reshape(height * width, depth)


def _label_grids(marks: tuple[Mark, ...], grid_h: int, grid_w: int, scale_y: float, scale_x: float) -> tuple[np.ndarray, np.ndarray]:
    """Per patch: the mark that covers its centre; a mark that covers none takes the patch its own centre is in."""
    labels, colours = np.zeros((grid_h, grid_w, 1), np.uint8), np.zeros((grid_h, grid_w, 1), np.uint8)
    for mark in marks:
        spans = []
        for centre, size, count in ((mark.y * scale_y, mark.height * scale_y, grid_h), (mark.x * scale_x, mark.width * scale_x, grid_w)):
            low, high = (round((centre + sign * size / 2) / PATCH) for sign in (-1, 1))
            middle = min(count - 1, max(0, int(centre / PATCH)))
            spans.append(slice(low, high) if high > low else slice(middle, middle + 1))
        labels[spans[0], spans[1]] = LABELS[mark.label]
        colours[spans[0], spans[1]] = COLOUR_LABELS[mark.colour]
    return labels, colours


@dataclass(slots=True)
class Conversation:
    """A conversation as token ids with its pictures; `positions` is (3, n), `visual` numbers the visual tokens from 0, -1 for text."""

    ids: list[int]
    positions: np.ndarray
    visual: np.ndarray
    picture_index: np.ndarray
    answers: list[int]  # indices of ids to be predicted
    pictures: list[Prepared]


class Encoder:
    """Turns conversations into ids exactly as the chat template and the tokenizer of the checkpoint do."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.text = lru_cache(maxsize=50_000)(self._text)
        names = ("im_start", "im_end", "vision_start", "image_pad", "vision_end")
        self.special = {name: tokenizer.encode(f"<|{name}|>").ids[0] for name in names}

    def _text(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def conversation(self, system: str | None, turns: list[Turn], pictures: list[Prepared]) -> Conversation:
        """All turns with their answers; every answer is to be predicted, its end included."""
        pieces: list[tuple[list[int], int, bool]] = []  # ids, index of the picture or -1, whether it is an answer
        start, end = [self.special["im_start"]], [self.special["im_end"]]
        if system:
            pieces.append((start + self.text("system\n") + self.text(system) + end + self.text("\n"), -1, False))
        for turn in turns:
            pieces.append((start + self.text("user\n"), -1, False))
            for texts, picture in _runs(turn.parts):
                pieces.append((self.text(texts), -1, False) if picture < 0 else ([], picture, False))
            pieces.append((end + self.text("\n") + start + self.text("assistant\n"), -1, False))
            pieces += [(self.text(turn.answer) + end, -1, True), (self.text("\n"), -1, False)]
        return self._assemble(pieces, pictures)

    def _assemble(self, pieces: list[tuple[list[int], int, bool]], pictures: list[Prepared]) -> Conversation:
        ids: list[int] = []
        columns: list[np.ndarray] = []
        visual: list[np.ndarray] = []
        index: list[np.ndarray] = []
        answers: list[int] = []
        at = seen = 0
        for texts, picture, is_answer in pieces:
            grid = None
            if picture >= 0:
                height, width = (n // MERGE for n in pictures[picture].grid)
                grid = (height, width)
                texts = [self.special["vision_start"], *[self.special["image_pad"]] * (height * width), self.special["vision_end"]]
            if is_answer:
                answers += range(len(ids), len(ids) + len(texts))
            ids += texts
            column, at = _positions(at, len(texts), grid)
            columns.append(column)
            marks = np.full(len(texts), -1, np.int32)
            if grid:
                marks[1:-1] = np.arange(seen, seen + len(texts) - 2)
                seen += len(texts) - 2
            visual.append(marks)
            index.append(np.full(len(texts), picture + 1, np.uint8))
        return Conversation(ids, np.concatenate(columns, 1), np.concatenate(visual), np.concatenate(index), answers, pictures)


def _runs(parts: tuple[str | int, ...]) -> Iterator[tuple[str, int]]:
    """Parts with neighbouring texts joined, as the template joins them: (text, -1) or ("", picture)."""
    text = ""
    for part in parts:
        if isinstance(part, str):
            text += part
            continue
        if text:
            yield text, -1
        text = ""
        yield "", part
    if text:
        yield text, -1


def _positions(at: int, count: int, grid: tuple[int, int] | None) -> tuple[np.ndarray, int]:
    """M-RoPE positions of a piece that begins at `at`, and where the next one begins."""
    if grid is None:
        return np.broadcast_to(np.arange(at, at + count, dtype=np.int32), (3, count)), at + count
    height, width = grid
    rows, columns = np.divmod(np.arange(height * width, dtype=np.int32), width)
    start, end = np.full((3, 1), at, np.int32), np.full((3, 1), at + 1 + max(grid), np.int32)
    inside = np.stack([np.zeros_like(rows), rows, columns]) + at + 1
    return np.concatenate([start, inside, end], 1), at + 2 + max(grid)


class Packer:
    """Fills one batch with conversations until the next one does not fit."""

    def __init__(self, batch: Batch, sizes: Sizes, table: GridTable) -> None:
        self.batch, self.sizes, self.table = batch, sizes, table
        self.patches = self.tokens = self.answers = self.pictures = self.conversations = 0

    def add(self, item: Conversation) -> bool:
        """Append a conversation; False, and nothing done, when it does not fit."""
        patches = sum(len(picture.labels) for picture in item.pictures)
        sizes, spare = self.sizes, 8  # segments kept free for padding pieces
        pad_pictures = (sizes.patches - self.patches) // sizes.longest_picture + spare
        fits = (
            self.patches + patches <= sizes.patches
            and self.tokens + len(item.ids) < sizes.tokens
            and self.answers + len(item.answers) <= sizes.answers
            and self.pictures + len(item.pictures) + pad_pictures <= sizes.pictures
            and self.conversations + sizes.tokens // sizes.longest_conversation + spare < sizes.conversations
        )
        if fits:
            self._write(item)
        return fits

    def _write(self, item: Conversation) -> None:
        batch, start, count = self.batch, self.tokens, len(item.ids)
        first_visual = self.patches // MERGE**2
        for picture in item.pictures:
            span = slice(self.patches, self.patches + len(picture.labels))
            batch.patches[span], batch.labels[span], batch.colours[span] = picture.patches, picture.labels, picture.colours
            row = self.table.start[picture.grid]
            batch.grid_rows[span] = np.arange(row, row + len(picture.labels))
            self.patches, self.pictures = span.stop, self.pictures + 1
            batch.cu_pictures[self.pictures] = self.patches
        span = slice(start, start + count)
        batch.ids[span], batch.positions[:, span], batch.picture_index[span] = item.ids, item.positions, item.picture_index
        batch.visual[span] = np.where(item.visual >= 0, item.visual + first_visual, -1)
        answers = slice(self.answers, self.answers + len(item.answers))
        batch.answer_at[answers] = np.array(item.answers) + start - 1
        batch.answer_ids[answers] = [item.ids[i] for i in item.answers]
        self.tokens, self.answers, self.conversations = start + count, answers.stop, self.conversations + 1
        batch.cu_conversations[self.conversations] = self.tokens

    def finish(self) -> None:
        """Fill the rest with padding."""
        batch, sizes = self.batch, self.sizes
        for array in (batch.patches, batch.grid_rows, batch.labels, batch.colours):
            array[self.patches :] = 0
        for array in (batch.ids, batch.positions.T, batch.picture_index):
            array[self.tokens :] = 0
        batch.visual[self.tokens :] = -1
        batch.answer_at[self.answers :], batch.answer_ids[self.answers :] = 0, IGNORED
        _pad_segments(batch.cu_pictures, self.pictures, self.patches, sizes.patches, sizes.longest_picture)
        _pad_segments(batch.cu_conversations, self.conversations, self.tokens, sizes.tokens, sizes.longest_conversation)


def _pad_segments(offsets: np.ndarray, used: int, at: int, end: int, longest: int) -> None:
    """Cover [at, end) with pieces of at most `longest`; the remaining segments are empty."""
    offsets[0] = 0
    for i in range(used + 1, len(offsets)):
        at = min(end, at + longest)
        offsets[i] = at
    assert offsets[-1] == end
