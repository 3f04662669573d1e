"""Decoder: embedding, layers, DeepStack, final norm."""

from functools import partial

import torch
from torch import nn

from models.config.types import ModelConfig
from models.decoders.batch import ForwardBatch
from models.kernels.paged import AttentionBackend, FusedAttention
from models.kernels.stream import Residual, RowClass
from models.layers.decoder import LayerContext, MakeLayer, RMSNorm
from models.layers.linear import Setup, VocabParallelEmbedding
from models.layers.repeats import Repeats
from models.layers.rotary import MRope


class TextModel(nn.Module):
    """Map token ids and image embeddings to the final hidden states of the requested tokens."""

    def __init__(self, config: ModelConfig, setup: Setup, make_layer: MakeLayer) -> None:
        super().__init__()
        text = config.text
        self.ops = setup.ops
        self._has_experts = text.moe is not None
        self.num_deepstack_levels = config.num_visual_levels - 1
        self._taps = text.eagle3.taps if text.eagle3 is not None else ()
        assert text.num_layers > self.num_deepstack_levels, "DeepStack follows a layer whose tokens are all computed"
        self.rope = MRope(text, setup.ops, setup.place.device)
        self.embed_tokens = VocabParallelEmbedding(text.vocab_size, text.hidden_size, setup)
        self._layers = [make_layer(i, text, setup) for i in range(text.num_layers)]
        self.layers = nn.ModuleList(self._layers)  # typed alias of the module list
        self._repeats = Repeats(self._layers)
        self.norm = RMSNorm(text.hidden_size, text.rms_norm_eps, setup)

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """Return the (S, D) normalised hidden states of `batch.logits_indices`. Only these tokens continue after the last layer's keys
        are stored."""
        hidden_TD = self.embed_tokens(batch.input_ids_T)
        for item in batch.visual:
            hidden_TD[item.tokens] = item.level(0)
        residual = Residual(hidden_TD)
        slots_T = batch.attention.slot_mapping_T
        valid_T = None if batch.padding_slot is None or not self._has_experts else slots_T != batch.padding_slot
        fused = attention if isinstance(attention, FusedAttention) else None
        states = batch.states[0] if batch.states else None
        rows = batch.row_class or RowClass.of(len(hidden_TD)), batch.row_class or RowClass.of(len(batch.logits_indices))
        context = LayerContext(attention, fused, *rows, self.rope.rows(batch.positions_3T), slots_T, valid_T, states, batch.rows)
        *layers, last = self._layers
        is_possible = self.embed_tokens.tp.sums_by_kernels(*hidden_TD.shape)
        run = self._repeats.start(residual, lambda i: self._layers[i].self_attn.cached(context), is_possible)
        for i, layer in enumerate(layers):
            self._tap(i, residual, batch.hidden_TX)
            run(i, residual, partial(layer, residual, context))
            for item in batch.visual if i < self.num_deepstack_levels else ():
                residual.sum_TD[item.tokens] += item.level(1 + i)
        wanted_S = batch.logits_indices
        self._tap(len(layers), residual, batch.hidden_TX)
        if batch.hidden_TX is not None and not self._taps:
            last(residual, context)
            return batch.hidden_TX.copy_(self.ops.norm(self.norm(residual)))[wanted_S]
        if len(wanted_S) == 0:
            last.store(residual, context)
            return hidden_TD[:0]
        last(residual, context, wanted_S if len(wanted_S) < len(hidden_TD) else None)
        return self.ops.norm(self.norm(residual))

    def _tap(self, layer: int, residual: Residual, hidden_TX: torch.Tensor | None) -> None:
        """Copy the input of a layer that the EAGLE-3 head reads."""
        width = residual.sum_TD.shape[1]
        for i, tap in enumerate(self._taps):
            if hidden_TX is not None and tap == layer:
                own_TD = hidden_TX[:, i * width : (i + 1) * width].copy_(residual.sum_TD)
                if residual.parts_STD is not None:
                    own_TD += residual.parts_STD.sum(0)
