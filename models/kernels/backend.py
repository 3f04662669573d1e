"""What a backend offers to models and workers."""

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
from models.kernels.step_sizes import StepSizes
from models.kernels.transfers import Transfers
from models.kernels.varlen import VarlenAttention
from models.parallel.group import Exchange
from models.vision.shares import SplitCosts


class Backend(Protocol):
    """All that depends on the kind of device. `torch` is the reference."""

    name: str
    device: torch.device
    ops: Ops
    transfers: Transfers
    step_sizes: StepSizes
    split_costs: SplitCosts  # of an image that several ranks encode
    captures_graphs: bool  # whether what runs here may be recorded in CUDA graphs

    def runs(self, format: Format) -> bool:
        """Whether this device has products with matrices of the format."""

    def load(self, heads: Heads, vision_head_dim: int) -> None:
        """Compiles what a model of these heads needs; `vision_head_dim` is 0 without a tower. RuntimeError if a compiler fails."""

    def attention(self, pools: Sequence[KVPool], num_heads: int) -> AttentionBackend:
        """For steps of any mix; `num_heads` are this rank's query heads. ValueError for unknown shapes."""

    def fixed_attention(
        self, pools: Sequence[KVPool], num_heads: int, max_prefill_rows: int, max_decode_rows: int, max_blocks: int, has_norms: bool = True
    ) -> MakeFixed | None:
        """By (prompt tokens, decode rows, rows of the prompt tokens), for CUDA graphs on one stream; None if the backend captures none.
        `max_blocks` bounds the pages of one row; `has_norms`: of new heads."""

    def varlen_attention(self, num_heads: int, head_dim: int) -> VarlenAttention:
        """For the vision tower."""

    def sampling(self, max_rows: int, vocab_size: int) -> SamplingOps:
        """For steps of up to so many rows."""

    def exchange(self, group: dist.ProcessGroup) -> Exchange | None:
        """For GPUs that map each other's memory: all ranks make one at the same time. None if the backend has no kernels."""

    def jpeg_decoder(self, num_threads: int, name: str) -> JpegDecoder:
        """`name` as `--jpeg-decoder`."""
