"""Numbers of parameters and activations of a model, for the memory plan (`engine/plan.py`) and the worker's choice of step sizes."""

from models.config.types import DeltaConfig, TextConfig, VisionConfig


def layer_parameters(text: TextConfig) -> int:
    """Parameters of a layer's matrices that a token is multiplied by, without a router's: the mean over the layers."""
    moe = text.moe
    return _matrices(text, text.intermediate_size if moe is None else (moe.num_experts_per_tok + moe.has_shared) * moe.intermediate_size)


def stored_layer_parameters(text: TextConfig) -> int:
    """The same, with every expert's."""
    moe = text.moe
    return _matrices(text, text.intermediate_size if moe is None else (moe.num_experts + moe.has_shared) * moe.intermediate_size)


def _matrices(text: TextConfig, inner: int) -> int:
    num_queries = text.num_heads if text.delta is None else text.num_heads * 3 / 2  # with the gate
    attention = int(2 * (num_queries + text.num_kv_heads) * text.head_dim)
    num_delta = len(text.delta_layers)
    mixers = (text.num_layers - num_delta) * attention + (0 if text.delta is None else num_delta * _delta_width(text.delta))
    return text.hidden_size * (mixers // text.num_layers + 3 * inner)


def _delta_width(delta: DeltaConfig) -> int:
    """Parameters of Gated DeltaNet's matrices for each value of the hidden size."""
    return delta.conv_width + 2 * delta.num_value_heads * (delta.value_dim + 1)


def delta_step_values(delta: DeltaConfig) -> int:
    """Activations of a layer and token: inputs before and after the convolution, changes and outputs of chunks of 64."""
    width = delta.num_value_heads * delta.value_dim
    return 2 * delta.conv_width + 5 * width + 64 * delta.num_value_heads


def vision_parameters(vision: VisionConfig) -> int:
    """Parameters of the tower, without norms and biases."""
    width, merged = vision.hidden_size, vision.hidden_size * vision.merge_size**2
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    block = 4 * width**2 + 2 * width * vision.intermediate_size
    mergers = (1 + len(vision.deepstack_indexes)) * (merged**2 + merged * vision.out_hidden_size)
    return patch * width + vision.num_position_embeddings * width + vision.depth * block + mergers
