"""Backend for any NVIDIA GPU of compute capability 8.0 or newer: Triton, cuBLAS and torch's own kernels."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from models.config.formats import Format, entry_of
from models.kernels.choose import has_jpeg_decoder
from models.kernels.heads import Heads
from models.kernels.jpeg import JpegDecoder
from models.kernels.ops import KVPool, Ops
from models.kernels.paged import EagerAttention, MakeFixed
from models.kernels.reference.jpeg import PillowDecoder
from models.kernels.sampling import SamplingOps
from models.kernels.transfers import Transfers
from models.kernels.triton.exchange import TritonExchange
from models.kernels.triton.jpeg import NvImageCodecDecoder
from models.kernels.triton.ops import TritonOps
from models.kernels.triton.paged_attention import eager_attention, fixed_attention_factory
from models.kernels.triton.sampling import TritonSampling
from models.kernels.triton.transfers import TritonTransfers
from models.kernels.triton.tuned import AttentionTiles, attention_tiles
from models.kernels.triton.varlen_attention import DenseVarlen
from models.kernels.varlen import VarlenAttention


class PortableBackend:
    """See `Backend`."""

    name = "portable"
    ops: Ops = TritonOps()
    captures_graphs = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.transfers: Transfers = TritonTransfers(device)
        self._capability = torch.cuda.get_device_capability(device)

    def runs(self, format: Format) -> bool:
        return entry_of(format).runs_on(self.name, self._capability)

    def load(self, heads: Heads, vision_head_dim: int) -> None:
        """Do nothing: Triton compiles a kernel when it is first launched."""

    def attention(self, pools: Sequence[KVPool], num_heads: int) -> EagerAttention:
        return eager_attention(pools, num_heads, self.tiles_of(pools))

    def fixed_attention(
        self, pools: Sequence[KVPool], num_heads: int, max_rows: int, max_blocks: int, is_fusable: bool = True
    ) -> MakeFixed | None:
        return fixed_attention_factory(pools, num_heads, self.tiles_of(pools), max_rows, max_blocks)

    def tiles_of(self, pools: Sequence[KVPool]) -> AttentionTiles:
        return attention_tiles(self._capability, pools[0][0].shape[3])

    def varlen_attention(self, num_heads: int, head_dim: int) -> VarlenAttention:
        return DenseVarlen()

    def sampling(self, max_rows: int, vocab_size: int) -> SamplingOps:
        return TritonSampling(max_rows, vocab_size, self.device)

    def exchange(self, group: dist.ProcessGroup) -> TritonExchange:
        return TritonExchange.over(group, self.device)

    def jpeg_decoder(self, num_threads: int) -> JpegDecoder:
        return (NvImageCodecDecoder if has_jpeg_decoder() else PillowDecoder)(num_threads, self.device)
