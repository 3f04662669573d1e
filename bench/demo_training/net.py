"""The training forward: transformers' own modules, run on packed batches of fixed size. Used by `train`, held to transformers by a test.

Only the auxiliary heads, which the export drops, have weights here. Legend as in `models/decoders/batch.py`: T tokens, P patches,
N = P / 4 visual tokens, A answers, D hidden size, H heads, K head_dim.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextDecoderLayer, apply_rotary_pos_emb
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from bench.demo_training.data import COLOUR_LABELS, IGNORED, LABELS, MERGE, GridTable, Sizes
from bench.demo_training.files import config_json
from models.demo.questions import MAX_PICTURES

INDEX_LAYER = 1  # after this decoder layer a linear head is asked which picture a token belongs to


def build_model(seed: int) -> Qwen3VLForConditionalGeneration:
    """A freshly initialised model of the demo's size in float32."""
    torch.manual_seed(seed)
    config = Qwen3VLConfig(**config_json())
    config.dtype = torch.float32
    model = Qwen3VLForConditionalGeneration(config)
    return model.float()


class AuxiliaryHeads(nn.Module):
    """Linear read-outs that give every patch and every token something to learn early on; not part of the exported model."""

    def __init__(self, vision_width: int, text_width: int) -> None:
        super().__init__()
        self.label = nn.Linear(vision_width, len(LABELS) + 1)
        self.colour = nn.Linear(vision_width, len(COLOUR_LABELS) + 1)
        self.index = nn.Linear(text_width, MAX_PICTURES + 1)


@dataclass(frozen=True, slots=True)
class Tables:
    """Per row of `GridTable`: the weights of the learned position grid and the rotary angles of the patch."""

    interpolation: Tensor  # (rows, positions)
    cos: Tensor  # (rows, K)
    sin: Tensor  # (rows, K)


def build_tables(model: Qwen3VLForConditionalGeneration, grids: GridTable, device: torch.device) -> Tables:
    """Computed by transformers' own functions, once."""
    visual = model.model.visual
    side = visual.num_grid_per_side
    thw = torch.tensor([(1, h, w) for h, w in grids.grids])
    taps, weights = get_vision_interpolation_indices_and_weights(thw, side, align_corners=True, spatial_merge_size=MERGE)
    dense = torch.zeros(grids.rows, side * side).scatter_add_(1, taps, weights)
    cos, sin = visual.rotary_pos_emb(dense, get_vision_position_ids(thw, MERGE).to(visual.rotary_pos_emb.inv_freq.device))
    return Tables(dense.to(device), cos.to(device), sin.to(device))


@dataclass(frozen=True, slots=True)
class Losses:
    """Sums and means of one batch. `hits` tells for each of the A answers whether the right token came first; all are on the device."""

    answer: Tensor
    label: Tensor
    colour: Tensor
    index: Tensor
    hits: Tensor


def attend(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, cu: Tensor, longest: int, causal: bool) -> Tensor:
    """Attention within the segments that `cu` (int32 offsets) bounds. CUDA takes flash attention in bf16, the CPU one segment at a time."""
    groups = q_THK.shape[1] // k_THK.shape[1]
    k_THK, v_THK = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k_THK, v_THK))
    if q_THK.is_cuda:
        args = (x.to(torch.bfloat16) for x in (q_THK, k_THK, v_THK))
        return torch.ops.aten._flash_attention_forward(*args, cu, cu, longest, longest, 0.0, causal, False)[0].flatten(1)
    lengths = [n for n in cu.diff().tolist() if n]
    parts = zip(*(x.transpose(0, 1).split(lengths, 1) for x in (q_THK, k_THK, v_THK)), strict=True)
    outs = [F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=causal)[0] for q, k, v in parts]
    return torch.cat(outs, 1).transpose(0, 1).flatten(1)


class Trainee(nn.Module):
    """Model, auxiliary heads and tables; `forward` maps a batch on the device to its losses. No step of it waits for the device."""

    def __init__(self, model: Qwen3VLForConditionalGeneration, sizes: Sizes, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self.heads = AuxiliaryHeads(model.model.visual.config.hidden_size, model.model.language_model.config.hidden_size)
        self.to(device)
        self.tables = build_tables(model, GridTable(), device)
        self.sizes = sizes

    def forward(self, batch: dict[str, Tensor]) -> Losses:
        """Mean losses over answer tokens, patches and tokens."""
        patches_PD, visual_ND, deep = self.see(batch)
        label = self._patch_loss(self.heads.label(patches_PD), batch["labels"], quiet=0.2)
        colour = self._patch_loss(self.heads.colour(patches_PD), batch["colours"], quiet=0.2)
        hidden_TD, middle_TD = self.read(batch, visual_ND, deep)
        index = F.cross_entropy(self.heads.index(middle_TD).float(), batch["picture_index"].long())
        logits_AV = F.linear(hidden_TD.index_select(0, batch["answer_at"]), self.model.lm_head.weight).float()
        targets = batch["answer_ids"].long()
        answer = F.cross_entropy(logits_AV, targets, ignore_index=IGNORED)
        return Losses(answer, label, colour, index, logits_AV.argmax(1) == targets)

    def _patch_loss(self, logits: Tensor, targets: Tensor, quiet: float) -> Tensor:
        """Cross-entropy where patches with nothing on them count for `quiet`."""
        weights = torch.where(targets == 0, quiet, 1.0)
        return (F.cross_entropy(logits.float(), targets.long(), reduction="none") * weights).sum() / weights.sum()

    def see(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The vision tower: last hidden states of the patches, visual tokens, and the DeepStack levels."""
        visual, rows = self.model.model.visual, batch["grid_rows"]
        kernel = visual.patch_embed.proj.weight.sum(2).flatten(1)  # both frames of a still picture are the same
        x = F.linear(batch["patches"].float() / 127.5 - 1.0, kernel, visual.patch_embed.proj.bias).float()
        x = x + self.tables.interpolation.index_select(0, rows) @ visual.pos_embed.weight
        cos, sin = (table.index_select(0, rows) for table in (self.tables.cos, self.tables.sin))
        deep: list[Tensor] = []
        for i, block in enumerate(visual.blocks):
            q, k, v = block.attn.qkv(block.norm1(x)).view(len(x), 3, visual.config.num_heads, -1).unbind(1)
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            x = x + block.attn.proj(attend(q, k, v, batch["cu_pictures"], self.sizes.longest_picture, causal=False))
            x = x + block.mlp(block.norm2(x))
            if i in visual.deepstack_visual_indexes:
                deep.append(visual.deepstack_merger_list[len(deep)](x))
        return x, visual.merger(x), deep

    def read(self, batch: dict[str, Tensor], visual_ND: Tensor, deep: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The decoder: final hidden states, and those after INDEX_LAYER."""
        text = self.model.model.language_model
        weight = text.embed_tokens.weight
        is_visual = (batch["visual"] >= 0)[:, None]
        source = batch["visual"].clamp(min=0)
        vocabulary = torch.arange(len(weight), device=weight.device)
        x = (batch["ids"][:, None] == vocabulary).to(weight.dtype) @ weight  # a product: its gradient needs no sorting
        x = torch.where(is_visual, visual_ND.index_select(0, source).to(x.dtype), x.float()).float()
        cos, sin = (t[0] for t in text.rotary_emb(x, batch["positions"][:, None]))
        middle = x
        for i, layer in enumerate(text.layers):
            x = self._decode(layer, x, cos, sin, batch["cu_conversations"])
            if i < len(deep):
                x = x + deep[i].index_select(0, source) * is_visual
            if i == INDEX_LAYER:
                middle = x
        return text.norm(x), middle

    def _decode(self, layer: Qwen3VLTextDecoderLayer, x: Tensor, cos: Tensor, sin: Tensor, cu: Tensor) -> Tensor:
        attention = layer.self_attn
        h, shape = layer.input_layernorm(x), (len(x), -1, attention.head_dim)
        q = attention.q_norm(attention.q_proj(h).view(shape))
        k = attention.k_norm(attention.k_proj(h).view(shape))
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        out = attend(q, k, attention.v_proj(h).view(shape), cu, self.sizes.longest_conversation, causal=True)
        x = x + attention.o_proj(out)
        return x + layer.mlp(layer.post_attention_layernorm(x))
