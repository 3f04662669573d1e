"""What the engine measures of itself: a request's way in times, and gauges and totals. Part of the messages; for metrics and benchmarks."""

import msgspec


class Stages(msgspec.Struct):
    """When a request passed each boundary of its critical path; 0.0 until it has."""

    received: float = 0.0  # last byte of the body
    submitted: float = 0.0  # handed to the scheduler by the processor: media hashed, prompt built
    admitted: float = 0.0  # first named in a plan
    launched: float = 0.0  # first chunk launched by the worker
    prefilled: float = 0.0  # last chunk done on the device
    first_token: float = 0.0  # first token received by the scheduler
    sent: float = 0.0  # first text handed to the socket
    decode_ms: float = 0.0  # overlapped work in milliseconds: the host's, reading and decoding images;
    encode_ms: float = 0.0  # the device's, preprocessing and vision tower,
    forward_ms: float = 0.0  # and decoder, of the steps that this request's prefill took part in
    images_encoded: int = 0  # for this request; its other images came from a cache


class EngineStats(msgspec.Struct, frozen=True):
    """Gauges and running totals of the engine, for `/metrics` and `/health`. The scheduler's, but for what says otherwise."""

    max_model_len: int = 0  # tokens of a request, answer included: what was asked for, cut to the KV pool
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0  # free or only cached
    num_pinned_images: int = 0
    image_cache_bytes: int = 0
    image_cache_budget: int = 0
    image_host_cache_bytes: int = 0  # of each worker
    image_host_cache_budget: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    images_encoded: int = 0
    images_hit: int = 0
    images_skipped: int = 0  # every token came from the prefix cache
    images_evicted: int = 0
    images_restored: int = 0  # from host memory; not hits
    images_decoded: int = 0  # by the processor, which writes it here on the way: files that are no plain JPEGs
    preemptions: int = 0
