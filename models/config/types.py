"""Typed configuration of a model; `config.huggingface` reads it from a folder. Imports no torch."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from models.cache.spec import CacheSpec, PagedGroup, StateGroup
from models.config.formats import Format, MatrixFormat, final_format
from models.config.registry import Architecture
from models.config.schemes import Rule
from models.kernels.heads import Heads
from models.media.geometry import VisionGeometry

# Kinds of media, by the names in checkpoints: `image_token_id` in config.json, `<|image_pad|>` in the tokenizer.
MediaKind = Literal["image", "video"]
MEDIA_KINDS: tuple[MediaKind, ...] = get_args(MediaKind)


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Experts of every layer instead of one SwiGLU. The router's weights of a token's experts sum to one."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # of one expert
    has_shared: bool = False  # one more expert for every token, with a weight of its own


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Gated DeltaNet of some layers instead of attention, see `layers.delta`. Groups of value heads share a key head."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # per head
    value_dim: int
    kernel_size: int  # size of the convolution over time
    has_bfloat16_state: bool = False  # in the cache; otherwise float32

    @property
    def conv_width(self) -> int:
        """Return the number of convolution channels: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def state_bytes(self, tp: int, dtype_bytes: int) -> int:
        """Return the bytes per layer and row of one rank's heads: the state and the last inputs of the convolution."""
        recurrent = (2 if self.has_bfloat16_state else 4) * self.num_value_heads * self.key_dim * self.value_dim
        return (recurrent + (self.kernel_size - 1) * self.conv_width * dtype_bytes) // tp

    def replay_bytes(self, tp: int, dtype_bytes: int) -> int:
        """Return the bytes to replay a token: inputs before and after the convolution, and gates; rounded up to align rows."""
        return -(-2 * (self.conv_width + self.num_value_heads) // tp * dtype_bytes // 64) * 64


@dataclass(frozen=True, slots=True)
class TextConfig:
    """Configuration of the decoder."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # not hidden_size / num_heads in 32B
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int  # number of rotated values, the first of a head
    mrope_section: tuple[int, int, int]  # rotary pairs that follow time, height, width; sums to rotary_dim / 2
    max_position_embeddings: int
    llama3: tuple[float, ...] = ()  # rotary scaling: factor, low and high frequency factor, original positions; empty: unscaled
    has_qk_norm: bool = True  # RMSNorm of query and key heads
    format: Format = "plain"  # format of the layers' matrices, see `format_of`
    plain_modules: tuple[str, ...] = ()  # unquantized modules: paths or parts of paths
    rules: tuple[Rule, ...] = ()  # formats of modules that differ from `format`
    quantized_to: Format | None = None  # target format of plain matrices after loading, if any
    moe: MoeConfig | None = None
    delta: DeltaConfig | None = None
    delta_layers: frozenset[int] = frozenset()  # its layers; the others have attention with a gated output
    head_path: str = ""  # of the prediction head, one more attention layer (`layers.head`), in the checkpoint; empty: there is none
    eagle3: "Eagle3Config | None" = None  # a head of another checkpoint
    has_float8_cache: bool = False  # keys and values of the layers with attention

    @property
    def has_head(self) -> bool:
        return self.head_path != "" or self.eagle3 is not None

    @property
    def head_input_size(self) -> int:
        """Return the values per token that the head reads from the model."""
        return self.hidden_size * (1 if self.eagle3 is None else len(self.eagle3.taps))

    @property
    def has_fusable_heads(self) -> bool:
        """Return whether new heads are normalised and rotated as a whole, and have no gates: a kernel can make them and attend at once."""
        return self.has_qk_norm and self.rotary_dim == self.head_dim and self.delta is None

    def layer_path(self, layer: int) -> str:
        """Return the path of a layer in the checkpoint; the one after the last is the head's."""
        return f"{self.head_path}.layers.0" if layer == self.num_layers else f"model.language_model.layers.{layer}"

    def format_of(self, parent: str, *names: str) -> MatrixFormat:
        """Return the stored format of these matrices of the module `parent` and the format after loading. ValueError if they differ, since
        they form one product."""
        found = {name: self.stored_format(f"{parent}.{name}") for name in names}
        stored, *others = set(found.values())
        if others:
            listed = ", ".join(f"{name}: {format}" for name, format in found.items())
            raise ValueError(f"quantization_config must give {', '.join(names)} of {parent} the same format, got {listed}")
        return MatrixFormat(stored, self.quantized_to if self.format == "plain" and self.quantized_to is not None else final_format(stored))

    def stored_format(self, path: str) -> Format:
        """Return the format in which checkpoints store a module's matrix."""
        if (format := self.ruled_format(path)) is not None:
            return format
        return "plain" if any(f".{part}." in f".{self.own_path(path)}." for part in self.plain_modules) else self.format

    def ruled_format(self, path: str) -> Format | None:
        """Return the format of the first rule for a module, if there is one. Rules may use the names of any version of transformers."""
        path = self.own_path(path)
        short = path.removeprefix("model.").removeprefix("language_model.")
        names = {path, short, f"model.{short}", f"language_model.{short}", f"language_model.model.{short}", f"model.language_model.{short}"}
        return next((rule.format for rule in self.rules if any(re.fullmatch(rule.pattern, name) for name in names)), None)

    def own_path(self, path: str) -> str:
        """Return the checkpoint's path of a module."""
        layer = re.search(r"\blayers\.(\d+)\.", path)
        is_delta = layer and not path.startswith(f"{self.head_path}.") and int(layer[1]) in self.delta_layers
        return path.replace(".self_attn.", ".linear_attn.") if is_delta else path

    def ordinal(self, layer: int) -> int:
        """Return the index of a layer among those of its kind."""
        num_delta = sum(other < layer for other in self.delta_layers)
        return num_delta if layer in self.delta_layers else layer - num_delta

    def heads(self, tp: int) -> Heads:
        """Return the heads of each of `tp` ranks; at least one KV head each."""
        return Heads(self.num_heads // tp, max(1, self.num_kv_heads // tp), self.head_dim, self.rotary_dim)

    def cache_spec(self, tp: int, dtype_bytes: int) -> CacheSpec:
        """Return the cache specification of each of `tp` ranks."""
        num_paged = self.num_layers - len(self.delta_layers) + self.has_head
        paged = PagedGroup(num_paged, self.heads(tp).num_kv, self.head_dim, 1 if self.has_float8_cache else dtype_bytes)
        if self.delta is None:
            return CacheSpec(paged)
        sizes = self.delta.state_bytes(tp, dtype_bytes), self.delta.replay_bytes(tp, dtype_bytes)
        return CacheSpec(paged, (StateGroup(len(self.delta_layers), *sizes),))


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """EAGLE-3 head, see `layers.eagle3`."""

    taps: tuple[int, ...]  # layers of the model whose inputs it reads
    layer: TextConfig  # configuration of its layer; `vocab_size` is that of the draft vocabulary
    norm_before_residual: bool  # the norm of the hidden state precedes the residual stream


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Configuration of the vision tower."""

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    out_hidden_size: int
    num_position_embeddings: int  # a square grid, 48 x 48 in every published size
    deepstack_indexes: tuple[int, ...]  # blocks whose outputs are level 0, 1, ...; level i is added after decoder layer i
    rope_theta: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults of generation_config.json for parameters that a request omits. `top_k` 0 means off."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Configuration of a checkpoint."""

    text: TextConfig
    vision: VisionConfig | None  # None: a text model
    architecture: Architecture
    geometry: VisionGeometry
    sampling: SamplingDefaults
    dtype: str  # dtype of the stored weights: "bfloat16", "float16" or "float32"
    tie_word_embeddings: bool
    placeholder_ids: dict[MediaKind, int]  # of the kinds of media that the model supports
    vision_start_token_id: int
    vision_end_token_id: int
    eos_token_ids: tuple[int, ...]

    @property
    def vision_head_dim(self) -> int:
        """Return the tower's head size; 0 without a tower."""
        return 0 if self.vision is None else self.vision.head_dim

    @property
    def num_visual_levels(self) -> int:
        """Return the embeddings per visual token: the main one and one per DeepStack level."""
        return 1 if self.vision is None else 1 + len(self.vision.deepstack_indexes)
