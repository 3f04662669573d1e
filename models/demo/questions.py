"""Generated questions with their answers, as chat messages. Used by `bench/accuracy.py`, by tests and by the evaluation; no torch.

`question(seed, task)` depends on its arguments alone. Training draws from another stream (`feed.TRAINING_STREAM`): every seed is held out.
"""

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from models.demo import ask, smalltalk
from models.demo.render import draw
from models.demo.scenes import Kind, Scene, pick, random_scene

HELD_OUT_STREAM = 1
MAX_PICTURES = 8

Part = str | int  # a text, or the index of a picture in the conversation
Message = dict[str, object]


@dataclass(frozen=True, slots=True)
class Turn:
    """Parts that the user sends, in order, and the expected answer."""

    parts: tuple[Part, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class Picture:
    """Encoded picture: PNG or JPEG bytes, and the scene they show."""

    data: bytes
    mime: str
    scene: Scene

    def open(self) -> Image.Image:
        """Return the pixels as a client decodes them."""
        return Image.open(io.BytesIO(self.data)).convert("RGB")

    def url(self) -> str:
        """Return a `data:` URI for the `image_url` part of a request."""
        return f"data:{self.mime};base64,{base64.b64encode(self.data).decode()}"


@dataclass(frozen=True, slots=True)
class Question:
    """Conversation that ends with a question; a reply is right if it equals `answer` exactly."""

    seed: int
    task: str
    system: str | None
    turns: tuple[Turn, ...]
    pictures: tuple[Picture, ...]

    @property
    def answer(self) -> str:
        """Return the right answer to the last turn."""
        return self.turns[-1].answer

    def messages(self) -> list[Message]:
        """Return the `messages` of a request to an OpenAI-compatible API, with pictures as `data:` URIs."""
        return self._messages(lambda k: {"type": "image_url", "image_url": {"url": self.pictures[k].url()}})

    def template_messages(self) -> list[Message]:
        """Return messages for a chat template, in which pictures are parts of type `image` without content."""
        return self._messages(lambda k: {"type": "image"})

    def _messages(self, picture_part: Callable[[int], dict[str, object]]) -> list[Message]:
        messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            content = [{"type": "text", "text": part} if isinstance(part, str) else picture_part(part) for part in turn.parts]
            messages += [{"role": "user", "content": content}, {"role": "assistant", "content": turn.answer}]
        return messages[:-1]


@dataclass(frozen=True, slots=True)
class Task:
    """Functions that make the pictures and the question of a task; `pictures` bounds their number."""

    pictures: tuple[int, int]
    ask: Callable[[np.random.Generator, Sequence[Scene]], ask.Asked | None]
    kind: Kind | None = None  # every picture holds one of these
    digits: int | None = None


TASKS: dict[str, Task] = {
    "number": Task((1, MAX_PICTURES), lambda rng, scenes: ask.ask_item(rng, scenes, "number"), "number", 3),
    "list": Task((4, 4), ask.ask_list, "number"),
    "colour": Task((1, MAX_PICTURES), ask.ask_colour),
    "shape": Task((1, MAX_PICTURES), lambda rng, scenes: ask.ask_item(rng, scenes, "shape"), "shape"),
    "which": Task((2, MAX_PICTURES), ask.ask_which),
    "count": Task((1, MAX_PICTURES), ask.ask_count),
    "word": Task((1, MAX_PICTURES), lambda rng, scenes: ask.ask_item(rng, scenes, "word"), "word"),
    "where": Task((1, MAX_PICTURES), ask.ask_where),
    "describe": Task((1, MAX_PICTURES), ask.ask_describe),
    "missing": Task((1, MAX_PICTURES), ask.ask_missing),
    "count_to": Task((0, 0), lambda rng, scenes: smalltalk.ask_count_to(rng)),
    "talk": Task((0, 0), lambda rng, scenes: smalltalk.ask_talk(rng)),
}


def question(seed: int, task: str) -> Question:
    """Return the question of this seed. Raises ValueError for an unknown task."""
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; there are {', '.join(TASKS)}")
    rng = np.random.default_rng((HELD_OUT_STREAM, seed, list(TASKS).index(task)))
    spec = TASKS[task]
    while True:
        count = int(rng.integers(spec.pictures[0], spec.pictures[1] + 1))
        scenes = [random_scene(rng, 1.0, spec.kind, spec.digits) for _ in range(count)]
        asked = spec.ask(rng, scenes)
        if asked is not None:
            break
    pictures = tuple(encode(rng, scene) for scene in scenes)
    system = pick(rng, smalltalk.SYSTEMS) if rng.random() < 0.2 else None
    turns = split_turns(rng, len(scenes), asked) if count else (Turn((asked[0],), asked[1]),)
    return Question(seed, task, system, turns, pictures)


def questions(seed: int, tasks: Sequence[str] = tuple(TASKS)) -> Iterator[Question]:
    """Yield questions without end, with the tasks in turn. Equal seeds give equal streams."""
    index = 0
    while True:
        yield question(seed * 1_000_003 + index // len(tasks), tasks[index % len(tasks)])
        index += 1


def split_turns(rng: np.random.Generator, count: int, asked: ask.Asked) -> tuple[Turn, ...]:
    """Put all pictures into one turn or, sometimes, some into an earlier turn that asks for their number."""
    if count < 2 or rng.random() < 0.75:
        return (Turn(arrange(rng, range(count), asked[0]), asked[1]),)
    first = int(rng.integers(1, count))
    opening, number = ask.with_noun(rng, ask.COUNT), str(first)
    return Turn(arrange(rng, range(first), opening), number), Turn(arrange(rng, range(first, count), asked[0]), asked[1])


def arrange(rng: np.random.Generator, pictures: Sequence[int], text: str) -> tuple[Part, ...]:
    """Put pictures before the text, as most clients do, or sometimes after it or with words in between."""
    roll = rng.random()
    if roll < 0.75 or not pictures:
        return (*pictures, text)
    if roll < 0.9:
        return (text, *pictures)
    opening = pick(rng, ("Here is a picture.", "Look at this:", "Have a look.", "Here you go.", "Some pictures for you:", "And this:"))
    cut = int(rng.integers(0, len(pictures)))
    return (*pictures[:cut], opening, *pictures[cut:], text)


def encode(rng: np.random.Generator, scene: Scene) -> Picture:
    """Draw a scene and encode it: PNG, or JPEG of a quality that depends on the scene's mess."""
    image, buffer = draw(scene, rng).image, io.BytesIO()
    if rng.random() < 0.5:
        image.save(buffer, "PNG", compress_level=1)
        return Picture(buffer.getvalue(), "image/png", scene)
    image.save(buffer, "JPEG", quality=jpeg_quality(rng, scene))
    return Picture(buffer.getvalue(), "image/jpeg", scene)


def jpeg_quality(rng: np.random.Generator, scene: Scene) -> int:
    """Return a JPEG quality between 50 (messy scene) and 95."""
    return int(rng.integers(95 - int(45 * scene.mess), 96))
