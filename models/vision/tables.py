"""Position embeddings and rotary rows of a patch grid, cached per grid."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from models.layers.linear import Setup
from models.layers.rotary import vision_rows
from models.media.geometry import Grid

MAX_CACHED_PATCHES = 1 << 17  # about 300 MB at 8B; twice the largest image


@dataclass(frozen=True, slots=True)
class GridTables:
    """Per patch of one image, in merge-block order."""

    position_PD: torch.Tensor  # position embedding plus the patch embedding's offset, in the model's dtype
    cos_sin_PK: torch.Tensor  # float32 rotary rows


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables of all images of an encode."""

    position_PD: list[torch.Tensor]
    cos_sin_PK: torch.Tensor


class PositionGrid(nn.Module):
    """Learned square grid of embeddings, interpolated bilinearly to an image with aligned corners."""

    def __init__(self, num_positions: int, hidden_size: int, setup: Setup) -> None:
        super().__init__()
        self.weight = setup.parameter(num_positions, hidden_size)

    def interpolate(self, rows: int, columns: int) -> torch.Tensor:
        """Return (rows, columns, D) float32; formula of transformers' `get_vision_interpolation_indices_and_weights`."""
        side = round(len(self.weight) ** 0.5)
        stretched = _stretch(self.weight.float().view(side, side, -1), rows)
        return _stretch(stretched.transpose(0, 1), columns).transpose(0, 1)


def _stretch(grid: torch.Tensor, size: int) -> torch.Tensor:
    """Interpolate the first dimension linearly to `size` points, with fixed first and last points."""
    last = len(grid) - 1
    point = torch.arange(size, dtype=torch.float32, device=grid.device) * last / max(size - 1, 1)
    lower = point.floor()
    upper_weight = (point - lower)[:, None, None]
    lower_index = lower.long()
    return grid[lower_index] * (1 - upper_weight) + grid[(lower_index + 1).clamp(max=last)] * upper_weight


def grid_tables(grid: Grid, merge: int, positions: PositionGrid, offset_D: torch.Tensor, inv_freq: torch.Tensor) -> GridTables:
    """Return the tables of a grid. `offset_D` is added to every position embedding."""
    _, rows, columns = grid
    position_PD = _merge_block_order(positions.interpolate(rows, columns), merge) + offset_D
    device = offset_D.device
    row_P = _merge_block_order(torch.arange(rows, device=device)[:, None].expand(rows, columns), merge)
    column_P = _merge_block_order(torch.arange(columns, device=device).expand(rows, columns), merge)
    return GridTables(position_PD.to(positions.weight.dtype), vision_rows(row_P, column_P, inv_freq))


def _merge_block_order(image: torch.Tensor, merge: int) -> torch.Tensor:
    """Reorder (h, w, ...) from raster order to (h * w, ...) in merge blocks, the order of `Ops.resample_to_patches_`."""
    blocks = image.unflatten(1, (-1, merge)).unflatten(0, (-1, merge))  # Y, i, X, j
    return blocks.transpose(1, 2).flatten(0, 3)


class TableCache:
    """LRU cache of tables with at most `MAX_CACHED_PATCHES` patches in total, or a single larger grid."""

    def __init__(self, make: Callable[[Grid], GridTables]) -> None:
        self._make = make
        self._tables: OrderedDict[Grid, GridTables] = OrderedDict()
        self._num_patches = 0

    def get(self, grid: Grid) -> GridTables:
        if grid in self._tables:
            self._tables.move_to_end(grid)
            return self._tables[grid]
        tables = self._make(grid)
        self._tables[grid] = tables
        self._num_patches += len(tables.position_PD)
        while self._num_patches > MAX_CACHED_PATCHES and len(self._tables) > 1:
            _, evicted = self._tables.popitem(last=False)
            self._num_patches -= len(evicted.position_PD)
        return tables

    def refresh(self) -> None:
        """Compute the position embeddings again, in place."""
        for grid, tables in self._tables.items():
            tables.position_PD.copy_(self._make(grid).position_PD)
