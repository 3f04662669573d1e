"""The faults that the end-to-end checks must find: each is put into the engine on purpose, and the check must then fail.

Real questions, the demo checkpoint, the server's prompt and image identity, the engine's scheduler and runner; only the processes are
missing, so that a function can be replaced. The check is that of `test_demo` (the answers are transformers') and a finer one: so are the
log-probabilities behind them. Some faults shift so little that the model still answers rightly; only the finer check finds those.
"""

import dataclasses
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

import engine.worker.rows as rows
from engine.config import EngineConfig
from engine.messages import ChatPrompt, Chunk
from engine.scheduler.blocks import BlockHasher
from engine.worker.sampling.sampler import Sampled, Sampler
from models.decoders.batch import VisualSlice
from models.demo import CHECKPOINT
from models.demo.evaluate import Reference
from models.demo.questions import Question, Turn, encode, question
from models.demo.scenes import Item, Scene
from models.media.geometry import Grid
from models.media.mrope import Positions, mrope_positions
from models.vision.encoder import ImageEncoder
from server.checkpoint import read_checkpoint
from server.processor.inspect import Inspector
from server.processor.prompt import PromptBuilder
from tests.unit.worker import in_process

pytestmark = pytest.mark.nightly

SIDE = 192  # 36 image tokens
WHOLE, CUT = 8192, 24  # tokens of a step: whole prompts, or every picture in two pieces at least
MAX_TOKENS = 32
MAX_DIFFERENCE = 0.01  # of a log-probability, from transformers in float32: 0.0008 without a fault
MIN_DIFFERENCE = 0.3  # with a fault: 0.8 to 31
SHAPES = (("red", "circle"), ("blue", "star"), ("green", "square"), ("purple", "heart"))

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Reading:
    """What was answered, and the log-probabilities (tokens, V) that each token of the answer was drawn from."""

    text: str
    logprobs: torch.Tensor


class Checked:
    """The questions, what transformers reads in them, and the engine to be checked."""

    def __init__(self) -> None:
        checkpoint = read_checkpoint(CHECKPOINT)
        self._builder = PromptBuilder(checkpoint)
        self._image_token_id = checkpoint.image_token_id
        self._inspector = Inspector(EngineConfig(), checkpoint, gpu_decodes=True)
        self._model = in_process.load_model(CHECKPOINT)
        self._questions = make_questions()
        reference = Reference(CHECKPOINT, torch.device("cpu"))
        self._expected = [read_with_transformers(reference, item) for item in self._questions]
        assert [reading.text for reading in self._expected] == [item.answer for item in self._questions]

    def check(self, patch: pytest.MonkeyPatch, chunk: int) -> tuple[int, float]:
        """(wrong answers, largest difference of a log-probability) of the engine as it is now, asked one question after the other."""
        drawn: list[torch.Tensor] = []
        sample = Sampler.sample

        def note_and_sample(sampler: Sampler, logits_SV: torch.Tensor, *rest: Any) -> Sampled:
            drawn.append(logits_SV.clone())
            return sample(sampler, logits_SV, *rest)

        patch.setattr(Sampler, "sample", note_and_sample)
        engine = in_process.Engine(self._model, max_num_batched_tokens=chunk, max_num_mixed_tokens=chunk)
        num_wrong, difference = 0, 0.0
        for rid, (item, expected) in enumerate(zip(self._questions, self._expected, strict=True)):
            drawn.clear()
            engine.add(rid, self._parts(item), MAX_TOKENS, ignore_eos=False)
            engine.run()
            reading = Reading(self._builder.tokenizer.decode(engine.tokens[rid]), torch.cat(drawn).log_softmax(-1))
            num_wrong += reading.text != expected.text
            count = min(len(reading.logprobs), len(expected.logprobs))
            difference = max(difference, float((reading.logprobs[:count] - expected.logprobs[:count]).abs().max()))
        return num_wrong, difference

    def _parts(self, item: Question) -> list[list[int] | in_process.Picture]:
        """The prompt as the server makes it, with the identities that it gives to the pictures."""
        parts: list[list[int] | in_process.Picture] = []
        text: list[int] = []
        pictures = iter(item.pictures)
        for token_id in self._builder.encode(ChatPrompt(msgspec.json.encode(item.template_messages())), [False] * len(item.pictures)):
            if token_id == self._image_token_id:
                picture = next(pictures)
                data = memoryview(picture.data)
                identity = self._inspector.identify(data, self._inspector.plain_header(data) is not None)
                parts += [text, in_process.Picture(identity, np.asarray(picture.open()))]
                text = []
            else:
                text.append(token_id)
        return [*parts, text]


def make_questions() -> list[Question]:
    """Pictures of one size in the same places, so that one question's could be taken for another's; then some of all sizes."""
    rng = np.random.default_rng(7)

    def asking(text: str, answer: str, items: Sequence[Item]) -> Question:
        pictures = tuple(encode(rng, Scene(SIDE, SIDE, (item,), 0.0)) for item in items)
        return Question(0, "", None, (Turn((*range(len(items)), text), answer),), pictures)

    def numbers(*four: str) -> Question:
        items = [Item("number", number, "black", "centre") for number in four]
        return asking("List the numbers in all pictures in order.", ", ".join(four), items)

    shapes = [Item("shape", shape, colour, "centre") for colour, shape in SHAPES]
    return [
        numbers("472", "618", "903", "155"),
        numbers("231", "847", "590", "764"),
        asking("What colour is the shape in picture 2?", "blue", shapes),
        asking("What colour is the shape in picture 2?", "green", shapes[::-1]),
        asking("Which picture shows a heart?", "Picture 4", shapes),
        asking("Which picture shows a heart?", "Picture 1", shapes[::-1]),
        *(question(seed, task) for seed in (1_000_000, 1_000_001) for task in ("number", "where", "describe")),
    ]


@torch.no_grad()
def read_with_transformers(reference: Reference, item: Question) -> Reading:
    """Greedy, alone, in float32."""
    prompt = reference.prompt(item)
    ids = torch.tensor([prompt.ids])
    out = reference.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=torch.eq(ids, reference.image).int(),
        pixel_values=prompt.pixels,
        image_grid_thw=torch.tensor(prompt.grids),
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    text = reference.tokenizer.decode(out.sequences[0, ids.shape[1] :].tolist())
    return Reading(text, torch.cat(out.logits).float().log_softmax(-1))


@pytest.fixture(scope="module")
def checked() -> Iterator[Checked]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Checked()
    torch.set_num_threads(threads)


# ---- the faults --------------------------------------------------------------------------------------------------------------------


def reverse_equals(embeddings: list[torch.Tensor]) -> list[torch.Tensor]:
    """The list in reverse if all are of one size, so that the fault is a wrong answer and not a crash."""
    return embeddings[::-1] if len({embedding.shape for embedding in embeddings}) == 1 else embeddings


def swap_images(patch: pytest.MonkeyPatch) -> None:
    """The images of one pass come back in reverse."""
    encode_images = ImageEncoder.encode

    def swapped(self: ImageEncoder, images: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
        return reverse_equals(encode_images(self, images, grids))

    patch.setattr(ImageEncoder, "encode", swapped)


def swap_slots(patch: pytest.MonkeyPatch) -> None:
    """The pictures of a chunk stand in the prompt in reverse."""
    slices = rows._visual_slices

    def swapped(prefills: Sequence[Chunk], images: Mapping[int, torch.Tensor]) -> tuple[VisualSlice, ...]:
        found = slices(prefills, images)
        embeddings = reverse_equals([item.embedding for item in found])
        return tuple(dataclasses.replace(item, embedding=e) for item, e in zip(found, embeddings, strict=True))

    patch.setattr(rows, "_visual_slices", swapped)


def change_positions(change: Callable[[Positions, int, Sequence[tuple[int, Grid]]], tuple[Positions, int]]) -> Patch:
    """M-RoPE positions and delta of a prompt, changed."""

    def changed(num_tokens: int, spans: Sequence[tuple[int, Grid]]) -> tuple[Positions, int]:
        positions, delta = mrope_positions(num_tokens, spans)
        return change(positions.copy(), delta, spans)

    return lambda patch: patch.setattr(rows, "mrope_positions", changed)


def as_text(positions: Positions, delta: int, spans: Sequence[tuple[int, Grid]]) -> tuple[Positions, int]:
    """Image tokens count up like words."""
    return np.broadcast_to(np.arange(positions.shape[1]), positions.shape).copy(), 0


def transposed(positions: Positions, delta: int, spans: Sequence[tuple[int, Grid]]) -> tuple[Positions, int]:
    """Height and width are exchanged."""
    return positions[[0, 2, 1]], delta


def one_late(positions: Positions, delta: int, spans: Sequence[tuple[int, Grid]]) -> tuple[Positions, int]:
    """The text after the last image begins one position late."""
    start, (t, h, w) = spans[-1]
    positions[:, start + t * h * w :] += 1
    return positions, delta + 1


def answer_one_late(positions: Positions, delta: int, spans: Sequence[tuple[int, Grid]]) -> tuple[Positions, int]:
    """The prompt is right, what is generated after it is one position late."""
    return positions, delta + 1


def no_delta(positions: Positions, delta: int, spans: Sequence[tuple[int, Grid]]) -> tuple[Positions, int]:
    """What is generated is at its index, as if images took one position a token."""
    return positions, 0


def forget_content(patch: pytest.MonkeyPatch) -> None:
    """Pictures of one size share their identity, and so their cache entries."""

    def size(self: Inspector, data: memoryview, stays_encoded: bool) -> bytes:
        width, height = Image.open(io.BytesIO(data)).size
        return f"{height}x{width}".encode().ljust(32, b".")

    patch.setattr(Inspector, "identify", size)


def forget_images(patch: pytest.MonkeyPatch) -> None:
    """The prefix cache tells prompts apart by their token ids alone."""
    patch.setattr(BlockHasher, "_image_parts", lambda self, start, end: {})


def reuse_embeddings(patch: pytest.MonkeyPatch) -> None:
    """The worker answers for a picture with the embedding of the first one of that size."""
    encode_images = ImageEncoder.encode
    stale: dict[torch.Size, torch.Tensor] = {}

    def cached(self: ImageEncoder, images: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
        fresh = encode_images(self, images, grids)
        return [stale.setdefault(image.shape, embedding) for image, embedding in zip(images, fresh, strict=True)]

    patch.setattr(ImageEncoder, "encode", cached)


def shift_image_rows(patch: pytest.MonkeyPatch) -> None:
    """A chunk that begins inside an image goes on one row too early."""
    slices = rows._visual_slices

    def shifted(prefills: Sequence[Chunk], images: Mapping[int, torch.Tensor]) -> tuple[VisualSlice, ...]:
        return tuple(dataclasses.replace(item, offset=max(0, item.offset - 1)) for item in slices(prefills, images))

    patch.setattr(rows, "_visual_slices", shifted)


def change_later_chunks(change: Callable[[rows.Row, Chunk, Any, Any], None]) -> Patch:
    """`change(row, chunk, ids, positions)` edits the inputs of every prefill chunk but a prompt's first."""
    tokens = rows.Rows._tokens

    def changed(self: rows.Rows, prefills: Sequence[Chunk], decodes: Sequence[Chunk]) -> Any:
        ids, positions = tokens(self, prefills, decodes)
        first = 0
        for chunk in prefills:
            end = first + chunk.length
            if chunk.start:
                change(self._row(chunk.row), chunk, ids[first:end], positions[:, first:end])
            first = end
        return ids, positions

    return lambda patch: patch.setattr(rows.Rows, "_tokens", changed)


def earlier_ids(row: rows.Row, chunk: Chunk, ids: Any, positions: Any) -> None:
    ids[:] = row.known_ids[chunk.start - 1 : chunk.start - 1 + chunk.length]


def later_positions(row: rows.Row, chunk: Chunk, ids: Any, positions: Any) -> None:
    positions += 1


def short_context(patch: pytest.MonkeyPatch) -> None:
    """The last page of every sequence is read one token short."""
    layout = rows.Rows._layout

    def shortened(self: rows.Rows, *arguments: Any) -> Any:
        found = layout(self, *arguments)
        return dataclasses.replace(found, kv_lens_cpu=found.kv_lens_cpu - 1)

    patch.setattr(rows.Rows, "_layout", shortened)


@dataclass(frozen=True)
class Fault:
    """What is broken, in steps of which size, and whether an answer changes or only what is behind it."""

    inject: Patch
    chunk: int = WHOLE
    changes_answers: bool = True


FAULTS = {
    "image order: swapped in the encoder": Fault(swap_images),
    "image order: swapped in the prompt": Fault(swap_slots),
    "positions: images count like words": Fault(change_positions(as_text)),
    "positions: no delta after the prompt": Fault(change_positions(no_delta)),
    "positions: height for width": Fault(change_positions(transposed), changes_answers=False),
    "positions: text after an image one late": Fault(change_positions(one_late), changes_answers=False),
    "positions: the answer one late": Fault(change_positions(answer_one_late), changes_answers=False),
    "stale entry: image identity without content": Fault(forget_content),
    "stale entry: prefix identity without images": Fault(forget_images),
    "stale entry: embedding of an earlier picture": Fault(reuse_embeddings),
    "chunk: image rows one early": Fault(shift_image_rows, CUT, changes_answers=False),
    "chunk: ids one early": Fault(change_later_chunks(earlier_ids), CUT),
    "chunk: positions one late": Fault(change_later_chunks(later_positions), CUT, changes_answers=False),
    "chunk: context one short": Fault(short_context, CUT),
}


@pytest.mark.parametrize("chunk", [WHOLE, CUT])
def test_no_fault(checked: Checked, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Red if the engine parts from transformers in an answer or in a probability, whole or cut into small chunks."""
    num_wrong, difference = checked.check(monkeypatch, chunk)
    assert num_wrong == 0 and difference < MAX_DIFFERENCE


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(checked: Checked, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Red if the questions are too weak to see this fault."""
    fault = FAULTS[name]
    fault.inject(monkeypatch)
    num_wrong, difference = checked.check(monkeypatch, fault.chunk)
    assert difference > MIN_DIFFERENCE
    assert num_wrong > 0 or not fault.changes_answers
