"""The reference backend: plain torch, on a CPU or a GPU."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from models.attention.paged import AttentionBackend, MakeFixed
from models.attention.varlen import VarlenAttention
from models.backends.heads import Heads
from models.backends.jpeg import JpegDecoder
from models.backends.ops import KVPool, Ops
from models.backends.torch.attention import TorchAttention
from models.backends.torch.jpeg import PillowDecoder
from models.backends.torch.ops import TorchOps
from models.backends.torch.sampling import TorchSampling
from models.backends.torch.tuned import SPLIT_COSTS, STEP_SIZES
from models.backends.torch.varlen import TorchVarlen
from models.sampling import SamplingOps
from models.transfers import Transfers


class TorchBackend:
    """See `Backend`."""

    captures_graphs = False
    has_float8 = True
    step_sizes = STEP_SIZES
    split_costs = SPLIT_COSTS

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ops: Ops = TorchOps()
        self.transfers = Transfers()

    def load(self, heads: Heads, vision_head_dim: int) -> None:
        """There is nothing to compile."""

    def attention(self, pools: Sequence[KVPool], num_heads: int) -> AttentionBackend:
        return TorchAttention(pools)

    def fixed_attention(
        self, pools: Sequence[KVPool], num_heads: int, max_prefill_rows: int, max_decode_rows: int, max_blocks: int, has_norms: bool = True
    ) -> MakeFixed | None:
        return None

    def varlen_attention(self, num_heads: int, head_dim: int) -> VarlenAttention:
        return TorchVarlen()

    def sampling(self, max_rows: int, vocab_size: int) -> SamplingOps:
        return TorchSampling()

    def exchange(self, group: dist.ProcessGroup) -> None:
        return None

    def jpeg_decoder(self, num_threads: int, name: str) -> JpegDecoder:
        if name == "nvimgcodec":
            raise ValueError("--jpeg-decoder nvimgcodec needs --backend hopper or portable")
        return PillowDecoder(num_threads, self.device)
