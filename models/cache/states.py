"""Recurrent states of rows on the device, and their snapshots in blocks of the KV pool."""

from collections.abc import Sequence

import numpy as np
import torch

from models.cache.spec import SPARE_ROWS, StateGroup
from models.kernels.ops import KVPool
from models.kernels.transfers import to_device

WORD = torch.int32  # unit of copies, of which every state has a whole number: indexed copies go element by element


class RowStates:
    """States of one group: (layers, permanent rows + 1 + SPARE_ROWS, bytes) uint8.

    A layer reads `layer(i)` at the step's rows as the states before their first tokens and writes the states after their last ones. If two
    chunks of a prompt follow each other in a step, the state between them is written to a spare row.

    For a decode row it writes the state after the first token and, after `layer_bytes`, the inputs of each further token, which the
    step verifies. The next step replays the accepted ones, so that a rejected token never enters a state.
    """

    def __init__(self, group: StateGroup, num_rows: int, device: torch.device, num_verified: int = 0) -> None:
        layer_bytes = group.layer_bytes + num_verified * group.replay_bytes
        num_all = num_rows + 1 + SPARE_ROWS
        self.values = torch.zeros((group.num_layers, num_all, layer_bytes), dtype=torch.uint8, device=device)
        self.kept = self.values[:, :, : group.layer_bytes].view(WORD)
        self.num_accepted = torch.zeros(num_all, dtype=torch.int64, device=device)  # further tokens of each row's last step
        self.num_verified = num_verified

    def accept(self, rows_S: torch.Tensor, num_accepted_S: torch.Tensor | None) -> None:
        """Record the numbers of accepted further tokens after a step that sampled for these rows; None if it had none."""
        if self.num_verified and num_accepted_S is None:
            self.num_accepted.index_fill_(0, rows_S, 0)
        elif num_accepted_S is not None:
            self.num_accepted[rows_S] = num_accepted_S

    def layer(self, ordinal: int) -> torch.Tensor:
        """Return (rows + 1 + SPARE_ROWS, bytes) of the group's layer, to be updated in place."""
        return self.values[ordinal]


class Snapshots:
    """Copies of rows' states in blocks of the KV pool.

    A block is cleared after a snapshot before it holds values again, because attention multiplies values after a row's end by 0.
    """

    def __init__(self, pools: Sequence[KVPool], states: Sequence[RowStates]) -> None:
        self._states = states
        self._pages = [pages.flatten(1).view(WORD) for pool in pools for pages in pool]  # each (blocks, words)
        self._row_words = sum(group.kept[:, 0].numel() for group in states)
        self._dirty: set[int] = set()

    def save(self, row: int, blocks: Sequence[int]) -> None:
        """Copy the row's current states into these blocks."""
        index = self._index(blocks)
        content = torch.cat([group.kept[:, row].flatten() for group in self._states])
        widths = [pages.shape[1] for pages in self._pages]
        content = torch.nn.functional.pad(content, (0, len(blocks) * sum(widths) - self._row_words)).view(len(blocks), -1)
        for pages, part in zip(self._pages, content.split(widths, dim=1), strict=True):
            pages[index] = part
        self._dirty.update(blocks)

    def load(self, row: int, blocks: Sequence[int]) -> None:
        """Restore the row's states from these blocks; without blocks, reset them to the start of a sequence."""
        for group in self._states:
            group.num_accepted[row].zero_()
            if not blocks:
                group.kept[:, row].zero_()
        if not blocks:
            return
        index = self._index(blocks)
        content = torch.cat([pages[index] for pages in self._pages], dim=1).flatten()[: self._row_words]
        sizes = [group.kept[:, row].numel() for group in self._states]
        for group, part in zip(self._states, content.split(sizes), strict=True):
            group.kept[:, row] = part.view(len(group.kept), -1)

    def clear(self, blocks: Sequence[int]) -> None:
        """Clear these blocks, which hold tokens from now on."""
        dirty = [block for block in blocks if block in self._dirty]
        if dirty:
            index = self._index(dirty)
            for pages in self._pages:
                pages.index_fill_(0, index, 0)  # assigning a number would wait for the device
            self._dirty.difference_update(dirty)

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return to_device(np.asarray(blocks, dtype=np.int64), self._pages[0].device)
