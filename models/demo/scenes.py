"""Contents of a demo picture: items with a kind, a text, a colour and a place. Used by `render` and `ask`.

A scene is everything that a question may be about, so an answer is looked up here and never read off the pixels.
"""

from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

Kind = Literal["number", "word", "shape"]
T = TypeVar("T")

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 30, 35),
    "green": (30, 150, 50),
    "blue": (30, 70, 215),
    "yellow": (250, 222, 30),
    "orange": (250, 135, 15),
    "purple": (135, 40, 175),
    "pink": (250, 130, 185),
    "brown": (115, 68, 30),
    "black": (15, 15, 15),
    "white": (245, 245, 245),
}
SHAPES = ("circle", "square", "triangle", "star", "heart", "cross", "diamond", "ring")
WORDS = (
    "apple", "bread", "bridge", "castle", "cat", "chair", "cloud", "coffee", "dog", "door", "engine", "fish", "flower", "forest", "garden",
    "horse", "house", "island", "jacket", "kite", "lamp", "lemon", "lion", "market", "moon", "mountain", "music", "ocean", "paper",
    "pencil", "piano", "queen", "rabbit", "river", "rocket", "school", "ship", "silver", "snow", "spoon", "summer", "table", "tiger",
    "train", "violin", "water", "window", "winter", "zebra",
)  # fmt: skip
PLACES = ("top left", "top", "top right", "left", "centre", "right", "bottom left", "bottom", "bottom right")

MIN_SIDE, MAX_SIDE = 64, 768
MAX_ASPECT = 4.0
# In smaller pictures people could not read the text either: every letter gets about eight pixels.
MIN_WIDTH_OF_WORDS = 96
MIN_SIDE_OF_TWO = 128


@dataclass(frozen=True, slots=True)
class Item:
    """Item of a picture. `text` is the number, the word or the name of the shape; `place` is one of PLACES."""

    kind: Kind
    text: str
    colour: str
    place: str

    def __str__(self) -> str:
        if self.kind == "shape":
            return f"a {self.colour} {self.text}" if self.colour != "orange" else f"an {self.colour} {self.text}"
        return f"the {self.kind} {self.text} in {self.colour}"


@dataclass(frozen=True, slots=True)
class Scene:
    """One or two items of different kinds on a canvas of `width` x `height` pixels. `mess` in [0, 1] is clutter and noise."""

    width: int
    height: int
    items: tuple[Item, ...]
    mess: float

    def find(self, kind: Kind) -> Item | None:
        """Return the item of this kind, if the scene has one."""
        return next((item for item in self.items if item.kind == kind), None)

    @property
    def text(self) -> Item | None:
        """Return the number or word."""
        return self.find("number") or self.find("word")


def random_scene(rng: np.random.Generator, level: float = 1.0, must: Kind | None = None, digits: int | None = None) -> Scene:
    """Return a scene of difficulty `level` in [0, 1] that holds an item of kind `must`, if one is named, and numbers of `digits` digits."""
    width, height = _canvas(rng, level)
    kinds = _kinds(rng, level, must, max(width, height))
    width = max(width, MIN_WIDTH_OF_WORDS) if "word" in kinds else width
    mess = 0.0 if rng.random() > level else float(rng.random())
    texts = {"number": random_number(rng, digits), "word": pick(rng, WORDS), "shape": pick(rng, SHAPES)}
    places = _places(rng, kinds, width, height)
    items = tuple(Item(kind, texts[kind], pick(rng, tuple(COLOURS)), place) for kind, place in zip(kinds, places, strict=True))
    return Scene(width, height, items, mess)


def random_number(rng: np.random.Generator, digits: int | None = None) -> str:
    """Return a number without leading zeros, of `digits` digits or of one to four, mostly three."""
    length = digits or int(rng.choice((1, 2, 3, 4), p=(0.1, 0.2, 0.55, 0.15)))
    low = 0 if length == 1 else 10 ** (length - 1)
    return str(int(rng.integers(low, 10**length)))


def pick(rng: np.random.Generator, options: tuple[T, ...]) -> T:
    """Return one of the equally likely options with its own type (`rng.choice` would return a numpy scalar)."""
    return options[int(rng.integers(len(options)))]


def _canvas(rng: np.random.Generator, level: float) -> tuple[int, int]:
    """Return the size of a picture, mostly small; the ratio of the sides is at most MAX_ASPECT."""
    largest = MAX_SIDE if rng.random() < 0.05 * level else 128 + int(176 * level)
    smallest = MIN_SIDE if rng.random() < level else 96
    long = float(np.exp(rng.uniform(np.log(smallest), np.log(largest))))
    ratio = float(np.exp(rng.triangular(0, 0, np.log(MAX_ASPECT)) * level))
    short = max(MIN_SIDE, long / ratio)
    long, short = round(long), round(min(long, short))
    return (long, short) if rng.random() < 0.6 else (short, long)


def _kinds(rng: np.random.Generator, level: float, must: Kind | None, long: int) -> tuple[Kind, ...]:
    kinds: tuple[Kind, ...] = ("number", "number", "word", "shape")
    first: Kind = pick(rng, kinds) if must is None else must
    if rng.random() > 0.35 * level or long < MIN_SIDE_OF_TWO:
        return (first,)
    texts: tuple[Kind, ...] = ("number", "number", "word")
    second: Kind = pick(rng, texts) if first == "shape" else "shape"
    return (first, second) if rng.random() < 0.5 else (second, first)


def _places(rng: np.random.Generator, kinds: tuple[Kind, ...], width: int, height: int) -> tuple[str, ...]:
    """Return the places: two items are next to or above each other, a single shape is anywhere, a single text in the centre."""
    if len(kinds) == 2:
        return ("left", "right") if width >= height else ("top", "bottom")
    if kinds[0] == "shape" and rng.random() < 0.7:
        return (pick(rng, PLACES),)
    return ("centre",)
