"""Prediction head of a model: one more layer, which predicts the token after the next one (multi-token prediction).

    next token's embedding ── norm ─┐
                                    ├─ fc ──▶ attention, MLP ── norm ──▶ the model's logits: the token after it
    final hidden state ────── norm ─┘                             └────▶ replaces the hidden state for the following token

The names are those of the published checkpoints, `mtp.*`; embedding and logits are the model's. The layer has its own keys and values,
after those of the model's layers, and the rotary position of the hidden state's token.
"""

import torch
from torch import nn

from models.config.formats import PLAIN
from models.config.types import TextConfig
from models.kernels.stream import Residual
from models.layers.decoder import LayerContext, MakeLayer, RMSNorm
from models.layers.linear import FusedColumnParallelLinear, Part, Setup


class PredictionHead(nn.Module):
    """The head's module. `fc` and the norms are replicated on every rank."""

    def __init__(self, config: TextConfig, setup: Setup, make_layer: MakeLayer) -> None:
        super().__init__()
        self.ops, width = setup.ops, config.hidden_size
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (RMSNorm(width, config.rms_norm_eps, setup) for _ in range(3))
        self.fc = FusedColumnParallelLinear(2 * width, [Part("fc", width, 0, width)], PLAIN, setup)
        self._layers = [make_layer(config.num_layers, config, setup)]
        self.layers = nn.ModuleList(self._layers)  # typed alias of the module list

    def forward(self, embedded_TD: torch.Tensor, hidden_TD: torch.Tensor, context: LayerContext, wanted_S: torch.Tensor) -> torch.Tensor:
        """Return (S, D) of the wanted tokens. Keys and values of all tokens are stored."""
        embedded, hidden = self.pre_fc_norm_embedding(Residual(embedded_TD)), self.pre_fc_norm_hidden(Residual(hidden_TD))
        joined_TX = torch.cat((self.ops.norm(embedded), self.ops.norm(hidden)), dim=1)
        residual = Residual(self.fc.weight.product(joined_TX, context.row_class))
        if len(wanted_S) == 0:
            self._layers[0].store(residual, context)
            return hidden_TD[:0]
        self._layers[0](residual, context, wanted_S if len(wanted_S) < len(hidden_TD) else None)
        return self.ops.norm(self.norm(residual))
