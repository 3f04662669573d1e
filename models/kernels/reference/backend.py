"""Reference backend in plain torch, on a CPU or a GPU."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from models.config.formats import Format
from models.kernels.heads import Heads
from models.kernels.jpeg import JpegDecoder
from models.kernels.ops import KVPool, Ops
from models.kernels.paged import AttentionBackend, MakeFixed
from models.kernels.reference.attention import TorchAttention
from models.kernels.reference.jpeg import PillowDecoder
from models.kernels.reference.ops import TorchOps
from models.kernels.reference.sampling import TorchSampling
from models.kernels.reference.varlen import TorchVarlen
from models.kernels.sampling import SamplingOps
from models.kernels.transfers import Transfers
from models.kernels.varlen import VarlenAttention


class TorchBackend:
    """See `Backend`."""

    name = "torch"
    captures_graphs = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ops: Ops = TorchOps()
        self.transfers = Transfers()

    def runs(self, format: Format) -> bool:
        return True

    def load(self, heads: Heads, vision_head_dim: int) -> None:
        """Do nothing: torch needs no compilation."""

    def attention(self, pools: Sequence[KVPool], num_heads: int) -> AttentionBackend:
        return TorchAttention(pools)

    def fixed_attention(
        self, pools: Sequence[KVPool], num_heads: int, max_rows: int, max_blocks: int, is_fusable: bool = True
    ) -> MakeFixed | None:
        return None

    def varlen_attention(self, num_heads: int, head_dim: int) -> VarlenAttention:
        return TorchVarlen()

    def sampling(self, max_rows: int, vocab_size: int) -> SamplingOps:
        return TorchSampling()

    def exchange(self, group: dist.ProcessGroup) -> None:
        return None

    def jpeg_decoder(self, num_threads: int) -> JpegDecoder:
        return PillowDecoder(num_threads, self.device)
