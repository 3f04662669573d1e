"""Interface of a backend for models and workers."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from models.config.formats import Format
from models.kernels.heads import Heads
from models.kernels.jpeg import JpegDecoder
from models.kernels.ops import KVPool, Ops
from models.kernels.paged import AttentionBackend, MakeFixed
from models.kernels.sampling import SamplingOps
from models.kernels.transfers import Transfers
from models.kernels.varlen import VarlenAttention
from models.parallel.group import Exchange


class Backend(Protocol):
    """Device-dependent parts of models. `torch` is the reference."""

    name: str
    device: torch.device
    ops: Ops
    transfers: Transfers
    captures_graphs: bool  # whether CUDA graphs can be captured

    def runs(self, format: Format) -> bool:
        """Return whether this device supports products with matrices of the format."""

    def load(self, heads: Heads, vision_head_dim: int) -> None:
        """Compile the CUDA kernels for these heads; `vision_head_dim` is 0 without a tower. RuntimeError if the compiler fails."""

    def attention(self, pools: Sequence[KVPool], num_heads: int) -> AttentionBackend:
        """Return attention for any mix of rows; `num_heads` are this rank's query heads. ValueError for unknown shapes."""

    def fixed_attention(
        self, pools: Sequence[KVPool], num_heads: int, max_rows: int, max_blocks: int, is_fusable: bool = True
    ) -> MakeFixed | None:
        """Return a factory by the number of decode rows, of one token each or fewer of several, for CUDA graphs on one stream; None
        without graphs. `max_blocks` bounds the pages of one row; `is_fusable`: see `TextConfig.has_fusable_heads`."""

    def varlen_attention(self, num_heads: int, head_dim: int) -> VarlenAttention:
        """Return the attention of the vision tower."""

    def sampling(self, max_rows: int, vocab_size: int) -> SamplingOps:
        """Return sampling for steps of up to so many rows."""

    def exchange(self, group: dist.ProcessGroup) -> Exchange | None:
        """Return an exchange for GPUs that map each other's memory, or None without kernels. Collective."""

    def jpeg_decoder(self, num_threads: int) -> JpegDecoder:
        """Return nvImageCodec on a GPU, if it is installed, else Pillow in so many threads."""
