"""Draw scenes: backgrounds, clutter, shapes, text in several fonts, noise. Used by `questions` and by the training data; no torch.

A drawing depends on the scene, the generator's state and Pillow's version alone: the fonts are in this folder.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from models.demo.scenes import COLOURS, Item, Scene
from models.media.geometry import VisionGeometry

# The model's preprocessing: a token is 32 x 32 pixels, a picture takes 4 to 144 of them.
IMAGE_GEOMETRY = VisionGeometry(patch_size=16, merge_size=2, temporal_patch_size=2, min_pixels=64 * 64, max_pixels=384 * 384)

FONTS = tuple(sorted((Path(__file__).parent / "fonts").glob("*.ttf")))
DEFAULT_FONT = len(FONTS)  # Pillow's own comes after the files
MIN_CONTRAST = 120.0  # between the colours of an item and its background, Euclidean in RGB
MIN_LUMA = 35.0  # and in brightness, so that text can be read
MIN_TEXT = 15.0  # height of a line of text after the model's resize, in pixels

RGB = tuple[int, int, int]
MASK_SIDE = 128


@dataclass(frozen=True, slots=True)
class Mark:
    """Location of a character or shape: centre and size in pixels, its name ("7", "star") and the name of its colour."""

    x: float
    y: float
    width: float
    height: float
    label: str
    colour: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """Drawn scene, and marks for a training objective."""

    image: Image.Image
    marks: tuple[Mark, ...]


def draw(scene: Scene, rng: np.random.Generator) -> Drawing:
    """Return the scene as an RGB image of its width and height."""
    colours = [_jitter(rng, COLOURS[item.colour], 12) for item in scene.items]
    ground = _ground_colour(rng, colours)
    image = _background(rng, scene, ground)
    _clutter(image, rng, scene.mess, ground)
    marks: list[Mark] = []
    for item, colour in zip(scene.items, colours, strict=True):
        marks += _place_item(image, rng, scene, item, colour)
    return Drawing(_add_noise(image, rng, scene.mess), tuple(marks))


def _jitter(rng: np.random.Generator, colour: RGB, amount: int) -> RGB:
    red, green, blue = np.clip(np.array(colour) + rng.integers(-amount, amount + 1, 3), 0, 255).tolist()
    return red, green, blue


def _ground_colour(rng: np.random.Generator, colours: list[RGB]) -> RGB:
    """Return a background colour that contrasts with the colours of all items."""
    for _ in range(100):
        ground: RGB = tuple(rng.integers(0, 256, 3).tolist()) if rng.random() < 0.7 else _jitter(rng, (235, 235, 235), 20)
        if all(math.dist(ground, colour) >= MIN_CONTRAST and abs(_luma(ground) - _luma(colour)) >= MIN_LUMA for colour in colours):
            return ground
    return (128, 128, 128)


def _luma(colour: RGB) -> float:
    return 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]


def _background(rng: np.random.Generator, scene: Scene, ground: RGB) -> Image.Image:
    """Return a plain background, a gradient, or stripes, whose contrast grows with the mess."""
    size = (scene.width, scene.height)
    if scene.mess < 0.15 or rng.random() < 0.3:
        return Image.new("RGB", size, ground)
    other = _jitter(rng, ground, 10 + int(22 * scene.mess))
    if rng.random() < 0.5:
        ramp = Image.linear_gradient("L").rotate(int(rng.integers(4)) * 90).resize(size, Image.Resampling.BILINEAR)
    else:
        ramp = Image.new("L", size, 0)
        pen, step = ImageDraw.Draw(ramp), int(rng.integers(6, 40))
        slope = int(rng.integers(-60, 61))
        for x in range(-60, scene.width + 60, step):
            pen.line((x, 0, x + slope, scene.height), fill=255, width=max(1, step // 3))
    return Image.composite(Image.new("RGB", size, other), Image.new("RGB", size, ground), ramp)


def _clutter(image: Image.Image, rng: np.random.Generator, mess: float, ground: RGB) -> None:
    """Draw thin lines, dots and arcs in colours near the background's, which cannot be mistaken for shapes or digits."""
    pen, (width, height) = ImageDraw.Draw(image), image.size
    for _ in range(int(rng.integers(0, 1 + int(10 * mess)))):
        colour = _jitter(rng, ground, 60)
        x, y, dx, dy = (rng.random(4) * (width, height, width / 2, height / 2)).tolist()
        kind = rng.integers(3)
        if kind == 0:
            pen.line((x, y, x + dx - width / 4, y + dy - height / 4), fill=colour, width=1 + int(rng.integers(2)))
        elif kind == 1:
            pen.ellipse((x, y, x + 3, y + 3), fill=colour)
        else:
            pen.arc((x, y, x + dx + 1, y + dy + 1), int(rng.integers(360)), int(rng.integers(360)), fill=colour)


def _place_item(image: Image.Image, rng: np.random.Generator, scene: Scene, item: Item, colour: RGB) -> list[Mark]:
    """Paste one item into its part of the canvas."""
    left, top, width, height = _cell(scene, item, float(rng.uniform(1 / 3, 0.95)))
    if item.kind == "shape":
        side = float(rng.uniform(0.6, 0.95)) * min(width, height)
        mask, marks = _shape_mask(rng, item, max(side, 18.0))
    else:
        mask, marks = _text_mask(rng, item, width * 0.94, height * 0.94, _scale(scene))
    share_x, share_y = rng.random(2)
    x, y = round(left + (width - mask.width) * share_x), round(top + (height - mask.height) * share_y)
    image.paste(colour, (x, y), mask)
    return [Mark(mark.x + x, mark.y + y, mark.width, mark.height, mark.label, mark.colour) for mark in marks]


def _scale(scene: Scene) -> float:
    """Return the factor by which the model's preprocessing shrinks the picture (1 for small ones)."""
    return min(1.0, math.sqrt(IMAGE_GEOMETRY.max_pixels / (scene.width * scene.height)))


def _cell(scene: Scene, item: Item, central: float) -> tuple[float, float, float, float]:
    """Return (left, top, width, height) of the item's part of the canvas: a half next to another item, a ninth for a shape at a named place
    (the share `central` of both sides for one in the centre), all of it for a single text."""
    width, height = float(scene.width), float(scene.height)
    if len(scene.items) == 2:
        if item.place in ("left", "right"):
            return (0.0 if item.place == "left" else width / 2), 0.0, width / 2, height
        return 0.0, (0.0 if item.place == "top" else height / 2), width, height / 2
    if item.kind != "shape":
        return 0.0, 0.0, width, height
    if item.place == "centre":
        room = 0.6 * central * min(width, height)  # the least side of the shape: its centre stays in the middle third
        wide, high = (min(side * central, 0.25 * side + room) for side in (width, height))
        return (width - wide) / 2, (height - high) / 2, wide, high
    column = 0 if "left" in item.place else 2 if "right" in item.place else 1
    row = 0 if "top" in item.place else 2 if "bottom" in item.place else 1
    return column * width / 3, row * height / 3, width / 3, height / 3


@lru_cache(maxsize=4096)
def _font(face: int, size: int) -> ImageFont.FreeTypeFont:
    if face == DEFAULT_FONT:
        return ImageFont.load_default(size)  # type: ignore[return-value]
    return ImageFont.truetype(str(FONTS[face]), size)


def _text_mask(rng: np.random.Generator, item: Item, width: float, height: float, scale: float) -> tuple[Image.Image, list[Mark]]:
    """Return the text in a random font and size, sometimes rotated a little; marks are relative to the mask."""
    face = int(rng.integers(DEFAULT_FONT + 1))
    text = item.text.upper() if item.kind == "word" and rng.random() < 0.3 else item.text
    unit = _font(face, 64).getlength(text) / 64
    largest = min(width / unit, height / 1.05)
    smallest = min(largest, MIN_TEXT / scale)
    size = max(8, int(np.exp(rng.uniform(np.log(smallest), np.log(largest)))))
    angle = float(rng.uniform(-12, 12)) if rng.random() < 0.3 else 0.0
    if angle:  # rotated text needs more space
        size = max(8, int(size * min(1.0, largest * unit / (size * unit + 0.2 * size), height / (size * (1 + 0.21 * unit)))))
    size = size if size < 40 else size // 4 * 4
    mask, marks = _line(face, size, text, item.colour)
    return _turned(mask, marks, angle) if angle else (mask, marks)


def _line(face: int, size: int, text: str, colour: str) -> tuple[Image.Image, list[Mark]]:
    """Return a line of text as the smallest mask that holds it."""
    font = _font(face, size)
    x0, y0, x1, y1 = (int(v) for v in font.getbbox(text))
    mask = Image.new("L", (x1 - x0 + 1, y1 - y0 + 1), 0)
    ImageDraw.Draw(mask).text((-x0, -y0), text, fill=255, font=font)
    edges = [font.getlength(text[:i]) - x0 for i in range(len(text) + 1)]
    marks = [
        Mark((edges[i] + edges[i + 1]) / 2, mask.height / 2, edges[i + 1] - edges[i], mask.height, char.lower(), colour)
        for i, char in enumerate(text)
    ]
    return mask, marks


def _turned(mask: Image.Image, marks: list[Mark], angle: float) -> tuple[Image.Image, list[Mark]]:
    """Return mask and marks rotated counterclockwise by `angle` degrees."""
    turned = mask.rotate(angle, Image.Resampling.BICUBIC, expand=True)
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    moved = []
    for mark in marks:
        dx, dy = mark.x - mask.width / 2, mark.y - mask.height / 2
        x, y = cos * dx + sin * dy + turned.width / 2, -sin * dx + cos * dy + turned.height / 2
        moved.append(Mark(x, y, mark.width, mark.height, mark.label, mark.colour))
    return turned, moved


def _shape_mask(rng: np.random.Generator, item: Item, side: float) -> tuple[Image.Image, list[Mark]]:
    """Return the shape as a square mask of about `side` pixels, rotated by up to 15 degrees."""
    pixels = max(8, round(side))
    mask = _turned_shape(item.text, int(rng.integers(-5, 6)) * 3).resize((pixels, pixels), Image.Resampling.BILINEAR)
    return mask, [Mark(pixels / 2, pixels / 2, pixels * 0.8, pixels * 0.8, item.text, item.colour)]


@lru_cache(maxsize=256)
def _turned_shape(name: str, angle: int) -> Image.Image:
    return _shape(name).rotate(angle, Image.Resampling.BICUBIC)


def _shape(name: str) -> Image.Image:
    """Return the upright shape on a square of MASK_SIDE pixels with a margin for rotation."""
    side = MASK_SIDE
    mask = Image.new("L", (side * 2, side * 2), 0)
    pen = ImageDraw.Draw(mask)
    low, high = side * 0.2, side * 1.8
    if name in ("circle", "ring"):
        pen.ellipse((low, low, high, high), fill=255)
        if name == "ring":
            pen.ellipse((side * 0.6, side * 0.6, side * 1.4, side * 1.4), fill=0)
    elif name == "heart":
        pen.ellipse((low, side * 0.25, side * 1.06, side * 1.11), fill=255)
        pen.ellipse((side * 0.94, side * 0.25, high, side * 1.11), fill=255)
        pen.polygon([(side * 0.28, side * 0.91), (side * 1.72, side * 0.91), (side, side * 1.85)], fill=255)
    elif name == "cross":
        pen.rectangle((side * 0.75, low, side * 1.25, high), fill=255)
        pen.rectangle((low, side * 0.75, high, side * 1.25), fill=255)
    else:
        pen.polygon([(side * (1 + x), side * (1 + y)) for x, y in _corners(name)], fill=255)
    return mask.resize((side, side), Image.Resampling.BOX)


def _corners(name: str) -> list[tuple[float, float]]:
    """Return corners around the origin, within the unit circle."""
    count, radii, start = {
        "square": (4, (0.92,), 45.0),
        "triangle": (3, (0.9,), -90.0),
        "diamond": (4, (0.88, 0.55), -90.0),
        "star": (10, (0.92, 0.37), -90.0),
    }[name]
    angles = [math.radians(start + 360 * i / count) for i in range(count)]
    return [(radii[i % len(radii)] * math.cos(a), radii[i % len(radii)] * math.sin(a)) for i, a in enumerate(angles)]


@lru_cache(maxsize=1)
def _grain() -> np.ndarray:
    """Return Gaussian noise of standard deviation 1, sampled once: pictures use windows of it."""
    return np.random.default_rng(0).standard_normal((1024, 1024, 3)).astype(np.float32)


def _add_noise(image: Image.Image, rng: np.random.Generator, mess: float) -> Image.Image:
    if mess < 0.3 or rng.random() < 0.4:
        return image
    x, y = rng.integers(0, 1024 - max(image.size) + 1, 2)
    noise = _grain()[y : y + image.height, x : x + image.width] * np.float32(14 * mess * rng.random())
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))
