"""Questions about scenes in plain English, with their answers. Used by `questions` (clients, tests) and by the training data; no torch.

Every function looks at scenes alone. Pictures are counted from 1 over the whole conversation, as a user would.
"""

from collections.abc import Sequence

import numpy as np

from models.demo.scenes import Item, Kind, Scene, pick

Asked = tuple[str, str]  # the question and its one right answer

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
PICTURE_WORDS = ("picture", "picture", "picture", "image", "image", "photo")

NUMBER = (
    "What number is in {ref}?", "What is the number in {ref}?", "Read the number in {ref}.", "Which number does {ref} show?",
    "What number does {ref} show?", "Tell me the number in {ref}.", "Please read the number in {ref}.", "What number can you see in {ref}?",
    "Which number is in {ref}?", "Can you read the number in {ref}?", "what number is in {ref}", "Number in {ref}?",
)  # fmt: skip
WORD = (
    "What word is in {ref}?", "What is the word in {ref}?", "Read the word in {ref}.", "Which word does {ref} show?",
    "What does {ref} say?", "Tell me the word in {ref}.", "What is written in {ref}?", "What word can you see in {ref}?",
    "Please read the word in {ref}.", "Can you read the word in {ref}?",
)  # fmt: skip
COLOUR = (
    "What {colour} is the {kind} in {ref}?", "Which {colour} is the {kind} in {ref}?", "Name the {colour} of the {kind} in {ref}.",
    "What is the {colour} of the {kind} in {ref}?", "Tell me the {colour} of the {kind} in {ref}.",
    "In {ref}, what {colour} is the {kind}?", "what {colour} is the {kind} in {ref}",
)  # fmt: skip
SHAPE = (
    "What shape is in {ref}?", "What is the shape in {ref}?", "Name the shape in {ref}.", "Which shape does {ref} show?",
    "What shape does {ref} show?", "Tell me the shape in {ref}.", "Which shape is in {ref}?", "What shape can you see in {ref}?",
    "what shape is in {ref}",
)  # fmt: skip
WHERE = (
    "Where is the {shape} in {ref}?", "Where in {ref} is the {shape}?", "In which part of {ref} is the {shape}?",
    "Tell me where the {shape} is in {ref}.",
)  # fmt: skip
LIST = (
    "List the numbers in all {pictures} in order.", "List the numbers in all the {pictures} in order.",
    "Read the number in each {picture}.", "Read all the numbers in order.", "What numbers are in the {pictures}, in order?",
    "Which numbers do the {pictures} show, in order?",
    "List all the numbers.", "Read the numbers in the {pictures}, first to last.", "What are the numbers in the {pictures}?",
    "List the numbers in order.", "Please list the numbers you see.",
)  # fmt: skip
WHICH = (
    "Which {picture} shows {thing}?", "Which {picture} has {thing}?", "In which {picture} is {thing}?", "Which {picture} contains {thing}?",
    "Find {thing}.", "Where do you see {thing}?", "Tell me which {picture} shows {thing}.", "which {picture} shows {thing}",
)  # fmt: skip
COUNT = (
    "How many {pictures} are there?", "How many {pictures} did I send?", "How many {pictures} do you see?", "Count the {pictures}.",
    "How many {pictures} have I sent you?", "how many {pictures}", "How many {pictures} are there in total?", "How many {pictures}?",
)  # fmt: skip
DESCRIBE = (
    "Describe {ref}.", "What is in {ref}?", "What do you see in {ref}?", "What can you see in {ref}?", "What does {ref} show?",
    "Please describe {ref}.", "Tell me what you see in {ref}.", "What's in {ref}?",
)  # fmt: skip


def refer(rng: np.random.Generator, k: int, count: int) -> str:
    """Return a phrase that names picture `k` of `count`."""
    noun = pick(rng, PICTURE_WORDS)
    if count == 1 and rng.random() < 0.8:
        return f"{pick(rng, ('the', 'the', 'this'))} {noun}"
    if k == count and count > 1 and rng.random() < 0.12:
        return f"the last {noun}"
    roll = rng.random()
    if roll < 0.55:
        return f"{noun} {k}"
    return f"the {ORDINALS[k - 1]} {noun}" if roll < 0.9 else f"{noun} number {k}"


def ask_item(rng: np.random.Generator, scenes: Sequence[Scene], kind: Kind) -> Asked | None:
    """Ask for the number, the word or the shape of one of the pictures that have one."""
    having = [k for k, scene in enumerate(scenes) if scene.find(kind)]
    if not having:
        return None
    k = pick(rng, tuple(having))
    item = scenes[k].find(kind)
    assert item is not None
    text = pick(rng, {"number": NUMBER, "word": WORD, "shape": SHAPE}[kind]).format(ref=refer(rng, k + 1, len(scenes)))
    return text, item.text


def ask_colour(rng: np.random.Generator, scenes: Sequence[Scene]) -> Asked:
    """Ask for the colour of one item of one picture."""
    k = int(rng.integers(len(scenes)))
    item = pick(rng, scenes[k].items)
    kind = item.text if item.kind == "shape" and rng.random() < 0.3 else item.kind
    spelled = "color" if rng.random() < 0.3 else "colour"
    return pick(rng, COLOUR).format(colour=spelled, kind=kind, ref=refer(rng, k + 1, len(scenes))), item.colour


def ask_where(rng: np.random.Generator, scenes: Sequence[Scene]) -> Asked | None:
    """Ask for the part of the picture in which its only shape lies."""
    having = [k for k, scene in enumerate(scenes) if len(scene.items) == 1 and scene.items[0].kind == "shape"]
    if not having:
        return None
    k = pick(rng, tuple(having))
    item = scenes[k].items[0]
    name = item.text if rng.random() < 0.5 else "shape"
    return pick(rng, WHERE).format(shape=name, ref=refer(rng, k + 1, len(scenes))), item.place


def ask_list(rng: np.random.Generator, scenes: Sequence[Scene]) -> Asked | None:
    """Ask for the numbers of all pictures in order. Return None unless each picture has one."""
    numbers = [item.text for scene in scenes if (item := scene.find("number"))]
    if len(numbers) < len(scenes) or len(scenes) < 2:
        return None
    return with_noun(rng, LIST), ", ".join(numbers)


def ask_which(rng: np.random.Generator, scenes: Sequence[Scene]) -> Asked | None:
    """Ask for the only picture that shows a random thing. Return None if every chosen thing is in several pictures."""
    if len(scenes) < 2:
        return None
    for _ in range(4):
        k = int(rng.integers(len(scenes)))
        thing, fits = _thing(rng, pick(rng, scenes[k].items))
        if [any(fits(item) for item in scene.items) for scene in scenes].count(True) == 1:
            return with_noun(rng, WHICH, thing=thing), f"Picture {k + 1}"
    return None


def ask_count(rng: np.random.Generator, scenes: Sequence[Scene]) -> Asked:
    """Ask for the number of pictures in the conversation so far."""
    return with_noun(rng, COUNT), str(len(scenes))


def ask_describe(rng: np.random.Generator, scenes: Sequence[Scene]) -> Asked:
    """Ask for a description of one picture."""
    k = int(rng.integers(len(scenes)))
    return pick(rng, DESCRIBE).format(ref=refer(rng, k + 1, len(scenes))), describe(scenes[k])


def ask_missing(rng: np.random.Generator, scenes: Sequence[Scene]) -> Asked | None:
    """Ask about a picture that was not sent, or a thing that the picture does not show."""
    kinds: tuple[Kind, ...] = ("number", "word", "shape")
    k, kind = int(rng.integers(8)), pick(rng, kinds)
    templates = {"number": NUMBER, "word": WORD, "shape": SHAPE}[kind]
    if k >= len(scenes):
        noun = pick(rng, PICTURE_WORDS)
        name = f"{noun} {k + 1}" if rng.random() < 0.6 else f"the {ORDINALS[k]} {noun}"
        sent = {0: "no picture", 1: "only one picture"}.get(len(scenes), f"only {len(scenes)} pictures")
        return pick(rng, templates).format(ref=name), f"I see {sent}."
    scene = scenes[k]
    if scene.find(kind) or (kind == "word" and scene.text):
        return None
    return pick(rng, templates).format(ref=refer(rng, k + 1, len(scenes))), f"I see no {kind} there."


def describe(scene: Scene) -> str:
    """Return a phrase with all items, shapes first, in the form that the model is trained on."""
    items = sorted(scene.items, key=lambda item: item.kind != "shape")
    phrase = " and ".join(str(item) for item in items)
    return phrase[0].upper() + phrase[1:] + "."


def with_noun(rng: np.random.Generator, templates: tuple[str, ...], thing: str = "") -> str:
    noun = pick(rng, PICTURE_WORDS)
    return pick(rng, templates).format(picture=noun, pictures=noun + "s", thing=thing)


class _Fits:
    """Test of whether an item has this kind, text and colour; None matches any."""

    def __init__(self, kind: Kind, text: str | None, colour: str | None) -> None:
        self.kind, self.text, self.colour = kind, text, colour

    def __call__(self, item: Item) -> bool:
        return item.kind == self.kind and self.text in (None, item.text) and self.colour in (None, item.colour)


def _thing(rng: np.random.Generator, item: Item) -> tuple[str, _Fits]:
    """Return a phrase that names an item, and a test of whether another item matches this phrase."""
    if item.kind != "shape":
        return f"the {item.kind} {item.text}", _Fits(item.kind, item.text, None)
    article = "an" if item.colour == "orange" else "a"
    roll = rng.random()
    if roll < 0.4:
        return f"{pick(rng, ('a', 'the'))} {item.text}", _Fits("shape", item.text, None)
    if roll < 0.8:
        return f"{pick(rng, (article, 'the'))} {item.colour} {item.text}", _Fits("shape", item.text, item.colour)
    return f"{pick(rng, (article, 'the'))} {item.colour} shape", _Fits("shape", None, item.colour)
