"""Measurements of the engine: times of a request, gauges and totals. Part of the messages."""

from typing import Annotated

import msgspec


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
    video_frames: int = 0  # that are seen


class EngineStats(msgspec.Struct, frozen=True):
    """Gauges and totals of the scheduler, but for what says otherwise. The texts are those of the metrics."""

    max_model_len: Annotated[int, "tokens that a prompt and its answer may have, cut to the KV pool"] = 0
    num_running: Annotated[int, "requests that run"] = 0
    num_waiting: Annotated[int, "requests that wait for their first step, or again after a preemption"] = 0
    num_blocks: Annotated[int, "KV blocks of the pool"] = 0
    num_free_blocks: Annotated[int, "KV blocks that no request holds: free or only cached"] = 0
    num_pinned_images: Annotated[int, "images whose embeddings must stay, as a request has yet to compute their tokens"] = 0
    image_cache_bytes: Annotated[int, "memory that embeddings in the image cache take"] = 0
    image_cache_budget: Annotated[int, "most bytes of the image cache"] = 0
    steps: Annotated[int, "batches that the decoder was launched for: prefill, decoding or both"] = 0
    prompt_tokens: Annotated[int, "tokens of prompts, cached ones included"] = 0
    cached_prompt_tokens: Annotated[int, "tokens of prompts that the prefix cache had"] = 0
    computed_tokens: Annotated[int, "tokens that went through the decoder"] = 0
    generated_tokens: Annotated[int, "tokens that were sampled for answers"] = 0
    images_encoded: Annotated[int, "images that went through the vision tower"] = 0
    images_hit: Annotated[int, "images whose embeddings the image cache had"] = 0
    images_skipped: Annotated[int, "images of which every token came from the prefix cache"] = 0
    images_evicted: Annotated[int, "embeddings that made room for others in the image cache"] = 0
    images_decoded: Annotated[int, "image files that are no plain JPEGs, decoded by the processor"] = 0
    preemptions: Annotated[int, "requests that lost their KV blocks to others"] = 0
    drafts: Annotated[int, "rows that were verified with drafts"] = 0
    draft_tokens: Annotated[int, "draft tokens that were verified"] = 0
    accepted_draft_tokens: Annotated[int, "draft tokens that are in answers"] = 0
    accepted_by_position: list[int] = []  # of these: first, second ... draft of a row
