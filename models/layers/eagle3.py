"""EAGLE-3 head (arXiv 2503.01840): a layer of another checkpoint that predicts the token after the next one.

    next token's embedding ──────────────────────── norm ─┐
                                                          ├─▶ attention, MLP ──▶ replaces the hidden state for the following token
    inputs of three layers ── fc ──▶ hidden state ─ norm ─┘           └─ norm ──▶ logits of the draft vocabulary

Queries, keys and values read both halves. The layer has its own keys and values, after those of the model's layers, with as many heads.
"""

from collections.abc import Iterator, Set

import torch
from torch import nn

from models.checkpoint.names import CheckpointPart, CheckpointTensor, module_tensors
from models.config.formats import PLAIN
from models.config.types import Eagle3Config
from models.kernels.stream import Residual
from models.layers.decoder import DecoderLayer, LayerContext, RMSNorm, SelfAttention
from models.layers.linear import FusedColumnParallelLinear, Part, Setup, VocabParallelEmbedding


class Eagle3Layer(DecoderLayer):
    self_attn: SelfAttention

    def __init__(self, config: Eagle3Config, setup: Setup) -> None:
        text, layer = config.layer, config.layer.num_layers
        super().__init__(layer, SelfAttention(layer, text, setup, input_size=2 * text.hidden_size), text, setup)
        self.hidden_norm = RMSNorm(text.hidden_size, text.rms_norm_eps, setup)


class Eagle3Head(nn.Module):
    """The head's module. `fc` and the norms are whole on every rank; `embed_tokens` is None if it is the model's."""

    def __init__(self, config: Eagle3Config, vocab_size: int, setup: Setup) -> None:
        super().__init__()
        text = config.layer
        self.config, self.ops, self._setup, self._vocab_size, width = config, setup.ops, setup, vocab_size, text.hidden_size
        self.fc = FusedColumnParallelLinear(len(config.taps) * width, [Part("fc", width, 0, width)], PLAIN, setup)
        self._layers = [Eagle3Layer(config, setup)]
        self.layers = nn.ModuleList(self._layers)  # typed alias of the module list
        self.norm = RMSNorm(width, text.rms_norm_eps, setup)
        self.lm_head = VocabParallelEmbedding(text.vocab_size, width, setup)
        self.embed_tokens: VocabParallelEmbedding | None = None
        self.d2t = torch.zeros(text.vocab_size, dtype=torch.int64, device=setup.place.device)  # what is added to a draft token's id

    def tensors(self, names: Set[str]) -> Iterator[CheckpointPart]:
        """See `LanguageModel.head_tensors`. A head without `d2t` has the model's vocabulary."""
        if "eagle3.embed_tokens.weight" in names:
            self.embed_tokens = VocabParallelEmbedding(self._vocab_size, self.config.layer.hidden_size, self._setup)
        yield from module_tensors(self, "eagle3")
        if "eagle3.d2t" in names or len(self.d2t) != self._vocab_size:
            yield CheckpointTensor("eagle3.d2t", (len(self.d2t),), (slice(None),), self.d2t)

    def forward(self, embedded_TD: torch.Tensor, hidden_TX: torch.Tensor, context: LayerContext, wanted_S: torch.Tensor) -> torch.Tensor:
        """Return (S, D) of the wanted tokens, not normalised, from the inputs (T, 3 * D) of the model's layers or results (T, D) of this
        method, and store keys and values of all tokens."""
        if hidden_TX.shape[1] != embedded_TD.shape[1]:
            hidden_TX = self.fc.weight.product(hidden_TX, context.row_class)
        (layer,) = self._layers
        normed_TD = self.ops.norm(layer.hidden_norm(Residual(hidden_TX)))
        joined_TX = torch.cat((self.ops.norm(layer.input_layernorm(Residual(embedded_TD))), normed_TD), dim=1)
        if len(wanted_S) == 0:
            layer.self_attn.store(joined_TX, context)
            return embedded_TD[:0]
        residual = Residual(normed_TD if self.config.norm_before_residual else hidden_TX)
        layer.run(residual, joined_TX, context, wanted_S if len(wanted_S) < len(embedded_TD) else None)
        if residual.parts_STD is not None:
            self.ops.norm(self.norm(residual))  # adds them
        return residual.sum_TD

    def normed(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Return the input of the output matrix."""
        return self.ops.norm(self.norm(Residual(hidden_SD)))

    def model_ids(self, ids_S: torch.Tensor) -> torch.Tensor:
        return ids_S + self.d2t[ids_S]

    def check_ids(self) -> None:
        """ValueError if a draft token is not in the model's vocabulary."""
        ids_V = self.model_ids(torch.arange(len(self.d2t), device=self.d2t.device))
        if not 0 <= int(ids_V.min()) <= int(ids_V.max()) < self._vocab_size:
            raise ValueError("tensor d2t of the EAGLE-3 head names tokens outside the vocabulary")
