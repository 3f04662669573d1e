"""Pictures that the demo model can read."""

from pathlib import Path

import numpy as np

from models.demo.questions import encode
from models.demo.scenes import Item, Scene


def drawn(folder: Path) -> list[Path]:
    rng = np.random.default_rng(3)
    scenes = [
        Scene(200, 120, (Item("number", "472", "blue", "centre"),), 0.2),
        Scene(160, 160, (Item("shape", "star", "red", "centre"),), 0.2),
    ]
    paths = []
    for i, scene in enumerate(scenes):
        picture = encode(rng, scene)
        paths.append(folder / f"{i}.{picture.mime.removeprefix('image/')}")
        paths[-1].write_bytes(picture.data)
    return paths
