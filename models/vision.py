"""The vision tower of Qwen3-VL: patches in, main and DeepStack embeddings out. Built and called by `models.qwen3_vl`.

The tower is whole on every rank. Images of one call share every GEMM; those of one patch grid share one dense attention call.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from models.config import VisionConfig
from models.geometry import Grid
from models.layers.ops import Ops
from models.layers.parallel import Linear, empty_parameter
from models.layers.slots import Slot
from models.preprocess import PIXEL_SCALE
from models.vision_tables import GridTables, Group, PositionGrid, TableCache, grid_tables

LAYER_NORM_EPS = 1e-6


class PatchEmbed(nn.Module):
    """The Conv3d of the checkpoint as a GEMM. A still image is two equal frames, so their kernels are summed and one frame is used."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._kernel = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        frame = config.in_channels * config.patch_size**2
        self.weight = empty_parameter(config.temporal_patch_size, config.hidden_size, frame, dtype=dtype, device=device)
        self.bias = empty_parameter(config.hidden_size, dtype=dtype, device=device)

    def forward(self, patches_PX: torch.Tensor) -> torch.Tensor:
        """(P, C * patch ** 2) pixels - 128 -> (P, D), still to be scaled by 1 / 127.5 and to be added `offset`."""
        return F.linear(patches_PX, self.weight.sum(0))

    def offset(self) -> torch.Tensor:
        """(D,) float32: the bias, and what is left of the normalisation ((x - 128) + 0.5) / 127.5."""
        return self.bias.float() + self.weight.float().sum((0, 2)) * (0.5 / PIXEL_SCALE)

    def checkpoint_slots(self, prefix: str) -> Iterator[Slot]:
        channels, frames, height, width = self._kernel
        conv = self.weight.data.view(frames, -1, channels, height, width).permute(1, 2, 0, 3, 4)
        yield Slot(f"{prefix}.proj.weight", tuple(conv.shape), (slice(None),), conv)
        yield Slot(f"{prefix}.proj.bias", tuple(self.bias.shape), (slice(None),), self.bias.data)


class LayerNorm(nn.Module):
    """Over the last dimension."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype, device=device)
        self.bias = empty_parameter(size, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, LAYER_NORM_EPS)


class VisionAttention(nn.Module):
    """Full attention inside each image."""

    def __init__(self, config: VisionConfig, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.ops = ops
        self.num_heads = config.num_heads
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, dtype, device)
        self.proj = Linear(config.hidden_size, config.hidden_size, dtype, device)

    def forward(self, x_PD: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
        """x_PD holds the patches of all groups one after the other."""
        qkv_P3HK = self.qkv(x_PD).view(x_PD.shape[0], 3, self.num_heads, -1)
        outs = [self._attend(qkv, group) for qkv, group in zip(qkv_P3HK.split([g.num_patches for g in groups]), groups, strict=True)]
        attended_PD: torch.Tensor = self.proj(outs[0] if len(outs) == 1 else torch.cat(outs))
        return attended_PD

    def _attend(self, qkv_P3HK: torch.Tensor, group: Group) -> torch.Tensor:
        qkv_BP3HK = qkv_P3HK.unflatten(0, (group.num_images, -1))
        self.ops.rotate_vision_(qkv_BP3HK, group.tables.cos_sin_PK)
        q_BHPK, k_BHPK, v_BHPK = qkv_BP3HK.permute(2, 0, 3, 1, 4).unbind(0)
        return self.ops.attend_dense(q_BHPK, k_BHPK, v_BHPK).transpose(1, 2).reshape(len(qkv_P3HK), -1)


class VisionMLP(nn.Module):
    """fc2(gelu_tanh(fc1(x)))."""

    def __init__(self, config: VisionConfig, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.ops = ops
        self.linear_fc1 = Linear(config.hidden_size, config.intermediate_size, dtype, device)
        self.linear_fc2 = Linear(config.intermediate_size, config.hidden_size, dtype, device)

    def forward(self, x_PD: torch.Tensor) -> torch.Tensor:
        out_PD: torch.Tensor = self.linear_fc2(self.ops.linear_gelu(x_PD, self.linear_fc1.weight, self.linear_fc1.bias))
        return out_PD


class VisionBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: VisionConfig, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.norm1 = LayerNorm(config.hidden_size, dtype, device)
        self.norm2 = LayerNorm(config.hidden_size, dtype, device)
        self.attn = VisionAttention(config, ops, dtype, device)
        self.mlp = VisionMLP(config, ops, dtype, device)

    def forward(self, x_PD: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
        x_PD = x_PD + self.attn(self.norm1(x_PD), groups)
        return x_PD.add_(self.mlp(self.norm2(x_PD)))


class PatchMerger(nn.Module):
    """Joins the patches of a merge block into one token of the decoder. The main merger normalises each patch, the others the joint."""

    def __init__(self, config: VisionConfig, norm_after_join: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.norm_after_join = norm_after_join
        joined = config.hidden_size * config.merge_size**2
        self.joined_size = joined
        self.norm = LayerNorm(joined if norm_after_join else config.hidden_size, dtype, device)
        self.linear_fc1 = Linear(joined, joined, dtype, device)
        self.linear_fc2 = Linear(joined, config.out_hidden_size, dtype, device)

    def forward(self, x_PD: torch.Tensor) -> torch.Tensor:
        """(P, vision hidden) -> (P / merge ** 2, decoder hidden)."""
        joined = x_PD.view(-1, self.joined_size)
        normed = self.norm(joined) if self.norm_after_join else self.norm(x_PD).view(-1, self.joined_size)
        token_ND: torch.Tensor = self.linear_fc2(F.gelu(self.linear_fc1(normed)))  # the exact GELU, unlike the blocks
        return token_ND


class VisionTower(nn.Module):
    """All blocks, the main merger and one merger per DeepStack level."""

    def __init__(self, config: VisionConfig, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config, dtype, device)
        self.pos_embed = PositionGrid(config.num_position_embeddings, config.hidden_size, dtype, device)
        self.blocks = nn.ModuleList(VisionBlock(config, ops, dtype, device) for _ in range(config.depth))
        self.merger = PatchMerger(config, norm_after_join=False, dtype=dtype, device=device)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, norm_after_join=True, dtype=dtype, device=device) for _ in config.deepstack_indexes
        )
        self._tables = TableCache(self._make_tables)

    def _make_tables(self, grid: Grid) -> GridTables:
        return grid_tables(grid, self.config, self.pos_embed, self.patch_embed.offset())

    def forward(self, patches_PX: torch.Tensor, grids: Sequence[tuple[Grid, int]]) -> list[torch.Tensor]:
        """Patches as `models.preprocess` writes them -> 1 + L tensors (P / merge ** 2, D): the main embedding, then the DeepStack levels.

        `grids` are (patch grid, number of images of it) in the order of the patches; the images of one grid follow each other.
        """
        groups = [Group(self._tables.get(grid), count) for grid, count in grids]
        x_PD = self.patch_embed(patches_PX)
        for part_PD, group in zip(x_PD.split([g.num_patches for g in groups]), groups, strict=True):
            images_BPD = part_PD.unflatten(0, (group.num_images, -1))
            torch.add(group.tables.position_PD, images_BPD, alpha=1 / PIXEL_SCALE, out=images_BPD)
        levels: list[torch.Tensor] = []
        for i, block in enumerate(self.blocks):
            x_PD = block(x_PD, groups)
            if i in self.config.deepstack_indexes:
                levels.append(self.deepstack_merger_list[len(levels)](x_PD))
        return [self.merger(x_PD), *levels]
