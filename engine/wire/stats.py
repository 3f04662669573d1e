"""Measurements of the engine: times of a request, gauges and totals. Part of the messages."""

from typing import Annotated, get_args, get_origin, get_type_hints

import msgspec

from engine.wire.details import DetailTotals
from engine.wire.metric import Gauge, Info, Total


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
    counts: dict[str, int] = {}  # of its media, by name: shown with the times


class EngineStats(DetailTotals):
    """Statistics of the scheduler. Each annotated field is a metric; a list has a value per position."""

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
    infos: list[Info] = msgspec.field(default_factory=list)  # metrics with names and labels of their own


_HINTS = get_type_hints(EngineStats, include_extras=True)
METRICS: dict[str, Total] = {name: get_args(hint)[1] for name, hint in _HINTS.items() if get_origin(hint) is Annotated}
