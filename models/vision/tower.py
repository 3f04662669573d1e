"""Vision tower of Qwen3-VL, from patches to main and DeepStack embeddings; whole on every rank. Images of one call share every launch.

The residual stream holds products without biases. The running sum of the biases ("offset") is added where the stream is read, so that each
GEMM accumulates into the stream.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import nn

from models.checkpoint.names import CheckpointTensor
from models.config.types import VisionConfig
from models.kernels.stream import Residual
from models.kernels.varlen import VarlenAttention
from models.layers.linear import Linear, Setup
from models.layers.repeats import Repeats
from models.layers.rotary import inverse_frequencies
from models.media.geometry import Grid
from models.vision.preprocess import PIXEL_SCALE
from models.vision.tables import MAX_CACHED_PATCHES, GridTables, PositionGrid, TableCache, Tables, grid_tables
from models.vision.ulysses import UlyssesAttention

LAYER_NORM_EPS = 1e-6


class PatchEmbed(nn.Module):
    """Conv3d of the checkpoint as one GEMM per frame (F). An image has equal frames, so their kernels are summed."""

    def __init__(self, config: VisionConfig, setup: Setup) -> None:
        super().__init__()
        self._kernel = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        frame = config.in_channels * config.patch_size**2
        self.weight = setup.parameter(config.temporal_patch_size, config.hidden_size, frame)
        self.bias = setup.parameter(config.hidden_size)

    @cached_property
    def _frame_weight(self) -> torch.Tensor:
        """Return (D, C * patch ** 2), summed at the first call."""
        return self.weight.sum(0)

    def finish(self) -> None:
        """Compute the sum again, in place; call after the weights have changed."""
        if "_frame_weight" in vars(self):
            torch.sum(self.weight, 0, out=self._frame_weight)

    def add_(self, patches_FPX: torch.Tensor, x_PD: torch.Tensor) -> None:
        """x += the embedding of patches of pixels - 128, without `offset`. A single frame represents equal frames."""
        weights = self.weight if len(patches_FPX) > 1 else self._frame_weight[None]
        for patches_PX, weight in zip(patches_FPX, weights, strict=True):
            x_PD.addmm_(patches_PX, weight.t(), alpha=1 / PIXEL_SCALE)

    def offset(self) -> torch.Tensor:
        """Return (D,) float32: the bias and the constant part of the normalisation ((x - 128) + 0.5) / 127.5."""
        return self.bias.float() + self.weight.float().sum((0, 2)) * (0.5 / PIXEL_SCALE)

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        channels, frames, height, width = self._kernel
        conv = self.weight.data.view(frames, -1, channels, height, width).permute(1, 2, 0, 3, 4)
        yield CheckpointTensor(f"{prefix}.proj.weight", tuple(conv.shape), (slice(None),), conv)
        yield CheckpointTensor(f"{prefix}.proj.bias", tuple(self.bias.shape), (slice(None),), self.bias.data)


class LayerNorm(nn.Module):
    """Layer norm over the last of two dimensions of a stream plus its offset."""

    def __init__(self, size: int, setup: Setup) -> None:
        super().__init__()
        self.ops = setup.ops
        self.weight = setup.parameter(size)
        self.bias = setup.parameter(size)

    def forward(self, x: torch.Tensor, offset_D: torch.Tensor) -> torch.Tensor:
        return self.ops.layer_norm(x, offset_D, self.weight, self.bias, LAYER_NORM_EPS)


class KeyValueQuery(Linear):
    """Projections in the order of `VarlenAttention`; the checkpoint has queries first."""

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        for name, target in (("weight", self.weight.data), ("bias", self.bias.data)):
            size = len(target) // 3
            yield CheckpointTensor(f"{prefix}.{name}", tuple(target.shape), (slice(size, None),), target[: 2 * size])
            yield CheckpointTensor(f"{prefix}.{name}", tuple(target.shape), (slice(size),), target[2 * size :])


class ResidualLinear(Linear):
    def add_(self, input_PX: torch.Tensor, x_PD: torch.Tensor) -> None:
        """x += input @ weight.T; the bias is part of the offset."""
        x_PD.addmm_(input_PX, self.matrix().t())


class VisionAttention(nn.Module):
    """Full attention inside each image."""

    def __init__(self, config: VisionConfig, attention: VarlenAttention, setup: Setup) -> None:
        super().__init__()
        self.attention = attention
        self.num_heads = config.num_heads
        self.qkv = KeyValueQuery(config.hidden_size, 3 * config.hidden_size, setup)
        self.proj = ResidualLinear(config.hidden_size, config.hidden_size, setup)

    def add_(self, normed_PD: torch.Tensor, cos_sin_PK: torch.Tensor, x_PD: torch.Tensor) -> None:
        kvq_P3HK = self.qkv(normed_PD).view(len(normed_PD), 3, self.num_heads, -1)
        self.proj.add_(self.attention.run(kvq_P3HK, cos_sin_PK), x_PD)


class VisionMLP(nn.Module):
    """fc2(gelu_tanh(fc1(x)))."""

    def __init__(self, config: VisionConfig, setup: Setup) -> None:
        super().__init__()
        self.ops = setup.ops
        self.linear_fc1 = Linear(config.hidden_size, config.intermediate_size, setup)
        self.linear_fc2 = ResidualLinear(config.intermediate_size, config.hidden_size, setup)

    def add_(self, normed_PD: torch.Tensor, x_PD: torch.Tensor) -> None:
        self.linear_fc2.add_(self.ops.linear_gelu(normed_PD, self.linear_fc1.matrix(), self.linear_fc1.bias), x_PD)


class VisionBlock(nn.Module):
    def __init__(self, config: VisionConfig, attention: VarlenAttention, setup: Setup) -> None:
        super().__init__()
        self.norm1 = LayerNorm(config.hidden_size, setup)
        self.norm2 = LayerNorm(config.hidden_size, setup)
        self.attn = VisionAttention(config, attention, setup)
        self.mlp = VisionMLP(config, setup)

    def add_(self, x_PD: torch.Tensor, cos_sin_PK: torch.Tensor, offsets_2D: torch.Tensor) -> None:
        """x += the block's output; `offsets_2D` are those of the stream before the attention and before the MLP."""
        self.attn.add_(self.norm1(x_PD, offsets_2D[0]), cos_sin_PK, x_PD)
        self.mlp.add_(self.norm2(x_PD, offsets_2D[1]), x_PD)


class PatchMerger(nn.Module):
    """Merge the patches of a block into one token. `norm_after_join`: normalise their concatenation instead of each patch."""

    def __init__(self, config: VisionConfig, norm_after_join: bool, setup: Setup) -> None:
        super().__init__()
        self.joined_size = config.hidden_size * config.merge_size**2
        self.norm_size = self.joined_size if norm_after_join else config.hidden_size
        self.norm = LayerNorm(self.norm_size, setup)
        self.linear_fc1 = Linear(self.joined_size, self.joined_size, setup)
        self.linear_fc2 = Linear(self.joined_size, config.out_hidden_size, setup)

    def forward(self, x_PD: torch.Tensor, offset_D: torch.Tensor, out_ND: torch.Tensor) -> None:
        """Map the stream (P, vision hidden) to `out_ND` (N, decoder hidden)."""
        normed = self.norm(x_PD.view(-1, self.norm_size), offset_D).view(-1, self.joined_size)
        hidden = F.gelu(self.linear_fc1(normed))  # the exact GELU, unlike the blocks
        torch.addmm(self.linear_fc2.bias, hidden, self.linear_fc2.matrix().t(), out=out_ND)


class VisionTower(nn.Module):
    """All blocks, the main merger and one merger per DeepStack level."""

    def __init__(self, config: VisionConfig, attention: VarlenAttention, setup: Setup) -> None:
        super().__init__()
        self.config = config
        self.attention = attention
        self.patch_embed = PatchEmbed(config, setup)
        self.pos_embed = PositionGrid(config.num_position_embeddings, config.hidden_size, setup)
        self._blocks = [VisionBlock(config, attention, setup) for _ in range(config.depth)]
        self.blocks = nn.ModuleList(self._blocks)  # typed alias of the module list
        self._repeats = Repeats(self._blocks)
        self.merger = PatchMerger(config, norm_after_join=False, setup=setup)
        mergers = (PatchMerger(config, norm_after_join=True, setup=setup) for _ in config.deepstack_indexes)
        self.deepstack_merger_list = nn.ModuleList(mergers)
        self._inv_freq = inverse_frequencies(config.rope_theta, config.head_dim // 2).to(setup.place.device)
        self._tables = TableCache(self._make_tables)

    def _make_tables(self, grid: Grid) -> GridTables:
        return grid_tables(grid, self.config.merge_size, self.pos_embed, self.patch_embed.offset(), self._inv_freq)

    @cached_property
    def _offsets(self) -> torch.Tensor:
        """Return (2 * depth + 1, D) float32: the stream's offset before each attention and MLP and at the end."""
        return self._sum_biases()

    def _sum_biases(self) -> torch.Tensor:
        biases = torch.stack([bias for block in self._blocks for bias in (block.attn.proj.bias, block.mlp.linear_fc2.bias)])
        return F.pad(biases.float().cumsum(0), (0, 0, 1, 0))

    def finish(self) -> None:
        """Recompute in place what is derived from weights; call after they have changed."""
        self.patch_embed.finish()
        if "_offsets" in vars(self):
            self._offsets.copy_(self._sum_biases())
        self._tables.refresh()

    def forward(self, patches_FPX: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """Map patches of images or frame pairs to (1 + L, N, D): the main embedding, then the DeepStack levels."""
        self.plan(grids)
        return self.compute(patches_FPX, self.tables(grids))

    def part(self, patches_FPX: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """Return the embeddings of this rank's tokens only. Collective: all ranks pass all patches."""
        assert isinstance(self.attention, UlyssesAttention)
        own, tables = self.attention.plan_parts([t * h * w for t, h, w in grids]), self.tables(grids)
        return self.compute(patches_FPX[:, own], Tables([torch.cat(tables.position_PD)[own]], tables.cos_sin_PK), is_whole=False)

    def plan(self, grids: Sequence[Grid]) -> None:
        """Do the host work for `compute`; not part of a captured graph."""
        self.attention.plan([t * h * w for t, h, w in grids])

    def tables(self, grids: Sequence[Grid]) -> Tables:
        tables = [self._tables.get(grid) for grid in grids]
        return Tables([table.position_PD for table in tables], torch.cat([table.cos_sin_PK for table in tables]))

    def max_table_bytes(self) -> int:
        return MAX_CACHED_PATCHES * (self.config.hidden_size * self.merger.norm.weight.itemsize + 4 * self.config.head_dim)

    def patch_bytes(self) -> int:
        """Return the bytes of a patch's widest activations and of its part of the result."""
        widest = 5 * self.config.hidden_size + 2 * self.config.intermediate_size
        levels = (1 + len(self.config.deepstack_indexes)) * self.config.out_hidden_size // self.config.merge_size**2
        return (widest + levels) * self.merger.norm.weight.itemsize

    def empty_patches(self, grids: Sequence[Grid], num_frames: int) -> torch.Tensor:
        """Return an empty (F, P, C * patch ** 2) for images of these grids."""
        width = self.config.in_channels * self.config.patch_size**2
        return self.merger.norm.weight.new_empty((num_frames, sum(t * h * w for t, h, w in grids), width))

    def compute(self, patches_FPX: torch.Tensor, tables: Tables, is_whole: bool = True) -> torch.Tensor:
        """Run `forward` as planned, or `part` if not `is_whole`. Device work only."""
        cos_sin_PK = tables.cos_sin_PK
        x_PD = torch.cat(tables.position_PD)
        self.patch_embed.add_(patches_FPX, x_PD)
        num_tokens = len(x_PD) // self.config.merge_size**2
        levels = x_PD.new_empty((1 + len(self.deepstack_merger_list), num_tokens, self.config.out_hidden_size))
        residual = Residual(x_PD)
        run = self._repeats.start(residual, lambda i: [self._offsets[2 * i : 2 * i + 2]], is_whole)
        for i, block in enumerate(self._blocks):
            run(i, residual, partial(block.add_, x_PD, cos_sin_PK, self._offsets[2 * i : 2 * i + 2]))
            if i in self.config.deepstack_indexes:
                level = self.config.deepstack_indexes.index(i)
                self.deepstack_merger_list[level](x_PD, self._offsets[2 * i + 2], levels[1 + level])
        self.merger(x_PD, self._offsets[-1], levels[0])
        return levels
