"""What the engine measures of itself: times of a request, gauges and totals. Part of the messages."""

import msgspec


class Stages(msgspec.Struct):
    """When a request passed each boundary; 0.0 until it has."""

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
    video_frames: int = 0  # that are seen


class EngineStats(msgspec.Struct, frozen=True):
    """Gauges and totals of the scheduler, but for what says otherwise."""

    max_model_len: int = 0  # cut to the KV pool
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
    images_decoded: int = 0  # by the processor: files that are no plain JPEGs
    preemptions: int = 0
    drafts: int = 0  # rows that were verified with drafts
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0  # that are in answers
    accepted_by_position: list[int] = []  # of these: first, second ... draft of a row
