"""A made-up hybrid: layers [state, state, state, attention] x 2 between the embedding and the head of the tiny Qwen3-VL."""

from pathlib import Path

import torch

from models.attention.paged import AttentionBackend
from models.backends.ops import Residual
from models.batch import ForwardBatch
from models.cache import CacheSpec, PagedGroup, StateGroup
from models.layers.decoder import LayerContext
from models.qwen3_vl import Qwen3VL
from tests.unit.worker.in_process import load_model

NUM_FEATURES = 8
PATTERN = "sssasssa"


class HybridModel(Qwen3VL):
    """A state is a running sum with decay of some features of a layer's input. Attention is the tiny model's first layers."""

    @property
    def cache_spec(self) -> CacheSpec:
        text = self.config.text
        paged = PagedGroup(PATTERN.count("a"), text.num_kv_heads, text.head_dim, 4)
        return CacheSpec(paged, (StateGroup(PATTERN.count("s"), 4 * NUM_FEATURES, 4 * NUM_FEATURES),))

    def __call__(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        decoder = self.language_model
        hidden_TD = decoder.embed_tokens(batch.input_ids_T)
        for item in batch.visual:
            hidden_TD[item.tokens] = item.level(0)
        residual = Residual(hidden_TD)
        context = LayerContext(attention, None, decoder.rope.rows(batch.positions_3T), batch.attention.slot_mapping_T, None)
        ordinals = {"s": 0, "a": 0}
        for kind in PATTERN:
            if kind == "a":
                decoder._layers[ordinals[kind]](residual, context)
            else:
                x_TD = self.ops.norm(decoder.norm(residual))  # takes up what the layer before has left to add
                residual.sum_TD.add_(self._mixed(x_TD, batch, ordinals[kind]))
            ordinals[kind] += 1
        return self.ops.norm(decoder.norm(residual))[batch.logits_indices]

    def _mixed(self, x_TD: torch.Tensor, batch: ForwardBatch, ordinal: int) -> torch.Tensor:
        """What state layer `ordinal` adds, by sums over each row's tokens: on the device alone, as a graph has it."""
        weights = torch.Generator().manual_seed(ordinal)
        read_DF = torch.randn(x_TD.shape[1], NUM_FEATURES, generator=weights) / x_TD.shape[1] ** 0.5
        write_FD = torch.randn(NUM_FEATURES, x_TD.shape[1], generator=weights)
        decay_F = torch.linspace(0.5, 0.99, NUM_FEATURES)
        rows = batch.rows
        assert rows is not None
        starts_R1, (sources_R, firsts_R) = rows.starts_R1, rows.origins
        token_T = torch.arange(len(x_TD))
        row_T = torch.searchsorted(starts_R1[1:].contiguous(), token_T, right=True).clamp(max=len(rows.rows_R) - 1)
        first_T = firsts_R[row_T]
        is_before_TT = (first_T[:, None] == first_T) & (token_T[:, None] >= token_T)
        powers_TTF = decay_F ** (token_T[:, None] - token_T).clamp(min=0)[..., None]
        state_RXF = batch.states[0].layer(ordinal).view(torch.float32).unflatten(1, (-1, NUM_FEATURES))
        old_RF, drafts_RDF, num_again_R = state_RXF[sources_R, 0], state_RXF[sources_R, 1:], batch.states[0].num_accepted[sources_R]
        for i in range(drafts_RDF.shape[1]):
            old_RF = torch.where((i < num_again_R)[:, None], decay_F * old_RF + drafts_RDF[:, i], old_RF)
        inputs_TF = x_TD @ read_DF
        sums_TF = ((is_before_TT[..., None] * powers_TTF) * inputs_TF).sum(1)
        sums_TF += decay_F ** (token_T - first_T + 1)[:, None] * old_RF[row_T]
        is_empty_R1 = (starts_R1[1:] == starts_R1[:-1])[:, None]
        is_prompt_R = torch.arange(len(sources_R)) < rows.num_prefill_rows
        last_R = torch.where(is_prompt_R, starts_R1[1:].long() - 1, starts_R1[:-1].long()).clamp(0, len(x_TD) - 1)
        draft_RD = last_R[:, None] + 1 + torch.arange(drafts_RDF.shape[1])
        new_RXF = torch.cat((sums_TF[last_R, None], inputs_TF[draft_RD.clamp(max=len(x_TD) - 1)]), dim=1)
        state_RXF[rows.rows_R] = torch.where(is_empty_R1[..., None], state_RXF[rows.rows_R], new_RXF)
        return torch.tanh(sums_TF) @ write_FD / 4


def load_hybrid(folder: Path) -> HybridModel:
    """The tiny checkpoint in `folder` as a hybrid."""
    model = load_model(folder)
    model.__class__ = HybridModel
    assert isinstance(model, HybridModel)
    return model
