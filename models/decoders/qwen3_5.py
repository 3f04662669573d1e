"""Qwen3.5, 3.6 and 3.8: the tower of Qwen3-VL without DeepStack, and a decoder in which most layers have Gated DeltaNet instead of
attention. The attention layers have gated outputs and rotate a quarter of each head. Norms are stored as differences from 1, except the
norm inside DeltaNet."""

from models.config.types import TextConfig
from models.decoders.qwen3_vl import Qwen3VL
from models.layers.decoder import DecoderLayer, SelfAttention
from models.layers.delta import GatedDeltaNet
from models.layers.linear import Setup


class Qwen35(Qwen3VL):
    """See `LanguageModel`."""

    norm_offset = 1.0

    @staticmethod
    def make_layer(layer: int, config: TextConfig, setup: Setup) -> DecoderLayer:
        if layer in config.delta_layers:
            return DecoderLayer(layer, GatedDeltaNet(layer, config, setup), config, setup)
        return DecoderLayer(layer, SelfAttention(layer, config, setup, is_gated=True), config, setup)
