"""Lower bounds of times and upper bounds of rates: operations and bytes of a model, divided by what a GPU reaches.

Operations are those of matrix products and attention. A decoding step reads every weight that its tokens need once (of experts the expected
number of distinct ones for uniform routing), all keys and values of its rows, and reads and writes their recurrent states.
"""

from dataclasses import dataclass

from models.scaffold import SHAPES, Shape

FLOPS = 790e12  # per second, of a bfloat16 matrix product on an H100 or H200 in a short burst; twice as many in float8
BYTES = {"h200": 4.3e12, "h100": 3.35e12}  # per second: a device copy on an H200, the data sheet's figure of an H100
FORMATS = {"fp8": (1.0, 0.5), "w4a16": (0.53, 1.0)}  # bytes per value with scales; time of an operation, of bfloat16's
PATCH, MERGE = 16, 2
PATCHES = 44 * 80  # of a 720p image
TEMPLATE_TOKENS, IMAGE_MARKS = 12, 2


@dataclass(frozen=True, slots=True)
class Model:
    """A published size in one format on `num_gpus` GPUs."""

    shape: Shape
    value_bytes: float = 2.0
    op_share: float = 1.0
    num_gpus: int = 1
    bytes_per_s: float = BYTES["h200"]

    @classmethod
    def of(cls, name: str, num_gpus: int = 1, gpu: str = "h200") -> "Model":
        """Return the model of a results file, such as 3.5-35B-A3B-fp8. KeyError if its size is not published."""
        size = max((each for each in SHAPES if f"{name}-".startswith(f"{each}-")), key=len)
        format = next((FORMATS[part] for part in name.removeprefix(size).split("-") if part in FORMATS), (2.0, 1.0))
        return cls(SHAPES[size], *format, num_gpus, BYTES[gpu])

    def tower_s(self, num_patches: int) -> float:
        """Return the time of the vision tower for one image or frame pair."""
        shape = self.shape
        width, inner, joined = shape.vision_hidden, shape.vision_intermediate, shape.vision_hidden * MERGE**2
        block = 2 * num_patches * (4 * width**2 + 2 * width * inner) + 4 * num_patches**2 * width
        mergers = 2 * (num_patches // MERGE**2) * (joined**2 + joined * shape.hidden) * (1 + len(shape.deepstack))
        return (shape.vision_depth * block + mergers + 2 * num_patches * width * 3 * PATCH**2 * 2) / FLOPS / self.num_gpus

    def prefill_s(self, num_tokens: int, num_logits: int = 1) -> float:
        """Return the time of the decoder for a prompt, of whose last layer only the last token is needed."""
        products = 2 * num_tokens * self._values_of_layers(self._active_experts) * (1 - 1 / self.shape.layers)
        attention = 2 * self._num_attention_layers * self.shape.heads * self.shape.head_dim * num_tokens**2
        ops = products * self.op_share + attention + 2 * num_logits * self.shape.hidden * self.shape.vocab_size
        return max(ops / FLOPS, self._weight_bytes(num_tokens) / self.bytes_per_s) / self.num_gpus

    def step_s(self, rows: int, context: float) -> float:
        """Return the time of a decoding step of `rows` rows with `context` cached tokens each."""
        shape, delta = self.shape, self.shape.delta
        cached = rows * context * self._num_attention_layers * 2 * shape.kv_heads * shape.head_dim * 2
        states = 0 if delta is None else rows * (shape.layers - self._num_attention_layers) * 2 * 4 * delta.value_heads * delta.dim**2
        return (self._weight_bytes(rows) + cached + states) / self.bytes_per_s / self.num_gpus

    @property
    def _num_attention_layers(self) -> int:
        return self.shape.layers // (4 if self.shape.delta is not None else 1)

    @property
    def _active_experts(self) -> float:
        return 0 if self.shape.experts is None else self.shape.experts.per_token

    def _weight_bytes(self, num_tokens: int) -> float:
        experts = self.shape.experts
        distinct = 0 if experts is None else experts.count * (1 - (1 - experts.per_token / experts.count) ** num_tokens)
        return self._values_of_layers(distinct) * self.value_bytes + self.shape.hidden * self.shape.vocab_size * 2

    def _values_of_layers(self, num_experts: float) -> float:
        """Return the number of weights of all layers with this number of experts each."""
        shape, experts, delta = self.shape, self.shape.experts, self.shape.delta
        attended, cached = shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim
        mixers = self._num_attention_layers * shape.hidden * ((2 if delta is None else 3) * attended + cached)
        if delta is not None:  # queries and keys, values, gate, output
            mixers += (shape.layers - self._num_attention_layers) * shape.hidden * delta.dim * (2 * delta.key_heads + 3 * delta.value_heads)
        if experts is None:
            return mixers + shape.layers * 3 * shape.hidden * shape.intermediate
        width = 3 * (num_experts * experts.intermediate + experts.shared) + experts.count
        return mixers + shape.layers * shape.hidden * width


def first_token_ms(model: Model, num_images: int, num_text: int = 256) -> float:
    """Return the bound of the time to first token with 720p images."""
    return 1e3 * (num_images * model.tower_s(PATCHES) + model.prefill_s(prompt_tokens(num_images, num_text)))


def prompt_tokens(num_images: int, num_text: int) -> int:
    return num_images * (PATCHES // MERGE**2 + IMAGE_MARKS) + num_text + TEMPLATE_TOKENS


def requests_per_s(model: Model, clients: int, num_images: int, num_text: int, num_output: int) -> float:
    """Return the bound of a load: the time of a request is that of its operations, or of its share of the decoding steps' bytes."""
    num_tokens = prompt_tokens(num_images, num_text)
    compute = num_images * model.tower_s(PATCHES) + model.prefill_s(num_tokens + num_output, num_output)
    return 1 / max(compute, num_output * model.step_s(clients, num_tokens + num_output / 2) / clients)


def bound_of(model: Model, run: str) -> float:
    """Return the bound of the published figure of a run of `bench row`: ms per token, requests or tokens per second."""
    if run == "one":
        return 1e3 * model.step_s(1, prompt_tokens(0, 1024) + 128)
    clients, num_images, num_output = {"text": (64, 0, 256), "image": (32, 1, 128), "images4": (16, 4, 64)}[run]
    return requests_per_s(model, clients, num_images, 256, num_output) * (num_output if run == "text" else 1)


def checked(name: str, value: float, bound: float, is_rate: bool) -> float:
    """Return the value. ValueError if it is better than its bound, which is an error of measurement."""
    if value > bound if is_rate else value < bound:
        raise ValueError(f"{name}: {value:.4g} is better than its bound, {bound:.4g}: an error of measurement, not a result")
    return value
