"""Measurements of the engine: times of a request, gauges and totals. Part of the messages."""

from typing import Annotated, NamedTuple, get_args, get_origin, get_type_hints

import msgspec


class Total(NamedTuple):
    """A counter: the metric's text, and vLLM's name of it after `vllm:` (otherwise `engine_` and the field's name)."""

    text: str
    vllm: str = ""


class Gauge(Total):
    """A current value."""


class Stages(msgspec.Struct):
    """Times when a request passed each boundary; 0.0 until then."""

    received: float = 0.0  # last byte of the body
    submitted: float = 0.0  # to the scheduler: media hashed, prompt built
    admitted: float = 0.0  # first named in a plan
    launched: float = 0.0  # first chunk launched by the worker
    prefilled: float = 0.0  # last chunk done on the device
    first_token: float = 0.0  # first token received by the scheduler
    sent: float = 0.0  # first text handed to the socket
    decode_ms: float = 0.0  # of the host in steps of this request's prefill: reading and decoding images;
    encode_ms: float = 0.0  # of the device: preprocessing and vision tower,
    forward_ms: float = 0.0  # and decoder
    images_encoded: int = 0  # and frame pairs, for this request, not from a cache
    weight_version: str = ""  # that computed the first token


class TokenDetails(msgspec.Struct, array_like=True):
    """Draft tokens of an output or of an answer."""

    num_drafts: int = 0  # draft tokens that were verified
    num_accepted: int = 0  # accepted ones, which are the first tokens of an output

    def add(self, other: "TokenDetails") -> None:
        self.num_drafts += other.num_drafts
        self.num_accepted += other.num_accepted

    def note(self, output: "TokenDetails", index: int) -> None:
        """Count token `index` of an output with these details."""
        self.num_drafts += output.num_drafts if index == 0 else 0
        self.num_accepted += index < output.num_accepted

    def as_json(self) -> dict[str, int]:
        """Return members of OpenAI's usage."""
        if not self.num_drafts:
            return {}
        return {"accepted_prediction_tokens": self.num_accepted, "rejected_prediction_tokens": self.num_drafts - self.num_accepted}


class EngineStats(msgspec.Struct):
    """Statistics of the scheduler. Each annotated field is a metric."""

    max_model_len: Annotated[int, Gauge("maximum tokens of a prompt and its output, limited by the KV pool")] = 0
    num_running: Annotated[int, Gauge("running requests", "num_requests_running")] = 0
    num_waiting: Annotated[int, Gauge("requests that wait for their first step or after a preemption", "num_requests_waiting")] = 0
    num_blocks: Annotated[int, Gauge("KV blocks in the pool")] = 0
    num_free_blocks: Annotated[int, Gauge("KV blocks not held by a request: free or only cached")] = 0
    num_pinned_images: Annotated[int, Gauge("images pinned in the cache until their tokens are computed")] = 0
    image_cache_bytes: Annotated[int, Gauge("bytes of embeddings in the image cache")] = 0
    image_cache_budget: Annotated[int, Gauge("capacity of the image cache in bytes")] = 0
    steps: Annotated[int, Total("batches run by the decoder: prefill, decoding or both")] = 0
    prompt_tokens: Annotated[int, Total("prompt tokens, including cached ones", "prompt_tokens")] = 0
    cached_prompt_tokens: Annotated[int, Total("prompt tokens found in the prefix cache", "prefix_cache_hits")] = 0
    computed_tokens: Annotated[int, Total("tokens computed by the decoder")] = 0
    generated_tokens: Annotated[int, Total("sampled tokens", "generation_tokens")] = 0
    images_encoded: Annotated[int, Total("images encoded by the vision tower")] = 0
    images_hit: Annotated[int, Total("images found in the image cache")] = 0
    images_skipped: Annotated[int, Total("images not needed because all their tokens were in the prefix cache")] = 0
    images_evicted: Annotated[int, Total("embeddings evicted from the image cache")] = 0
    images_decoded: Annotated[int, Total("image files other than baseline JPEGs, decoded by the processor")] = 0
    preemptions: Annotated[int, Total("preemptions: requests that lost their KV blocks to others", "num_preemptions")] = 0
    drafts: Annotated[int, Total("rows verified with draft tokens", "spec_decode_num_drafts")] = 0
    draft_tokens: Annotated[int, Total("verified draft tokens", "spec_decode_num_draft_tokens")] = 0
    accepted_draft_tokens: Annotated[int, Total("accepted draft tokens", "spec_decode_num_accepted_tokens")] = 0

    def count_drafts(self, counts: TokenDetails) -> None:
        self.drafts += 1
        self.draft_tokens += counts.num_drafts
        self.accepted_draft_tokens += counts.num_accepted


_HINTS = get_type_hints(EngineStats, include_extras=True)
METRICS: dict[str, Total] = {name: get_args(hint)[1] for name, hint in _HINTS.items() if get_origin(hint) is Annotated}
