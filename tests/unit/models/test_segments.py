"""The plan of the vision tower's attention on GPUs; the kernel itself is tested there."""

import numpy as np

from models.layers.segments import plan_tiles


def test_tiles_cover_every_patch_once() -> None:
    """Red if the plan leaves a patch out, names one twice, or a tile reaches into the next segment."""
    lengths = np.asarray([4, 192, 193, 1, 3520])
    tiles = plan_tiles(lengths, 192).tolist()
    covered = [first + row for number, first, length, _ in tiles for row in range(number * 192, min((number + 1) * 192, length))]
    assert covered == list(range(lengths.sum()))
    assert {(first, length) for _, first, length, _ in tiles} == set(zip([0, 4, 196, 389, 390], lengths.tolist(), strict=True))
