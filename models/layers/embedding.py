"""The embedding of token ids, cut over the ranks, and the output head."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from models.layers.checkpoint import CheckpointTensor
from models.layers.linear import Setup


class VocabParallelEmbedding(nn.Module):
    """Each rank holds a range of token ids. Also the output head's matrix, which a tied model shares with the input."""

    def __init__(self, vocab_size: int, hidden_size: int, setup: Setup) -> None:
        super().__init__()
        self.tp = setup.tp
        self.weight = setup.parameter(self.tp.share(vocab_size, "vocab_size"), hidden_size)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Ids (T,) of the whole vocabulary -> (T, D)."""
        if self.tp.size == 1:
            return F.embedding(ids_T, self.weight)
        rows = self.weight.shape[0]
        local_T = ids_T - self.tp.rank * rows
        elsewhere_T = (local_T < 0) | (local_T >= rows)
        hidden_TD = F.embedding(local_T.masked_fill(elsewhere_T, 0), self.weight)
        return self.tp.all_reduce_(hidden_TD.masked_fill_(elsewhere_T[:, None], 0))

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        rows, columns = self.weight.shape
        index = (slice(self.tp.rank * rows, (self.tp.rank + 1) * rows),)
        yield CheckpointTensor(f"{prefix}.weight", (rows * self.tp.size, columns), index, self.weight.data)
