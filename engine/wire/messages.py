"""Every message between the processes that serve: typed, msgpack, pointers instead of pixels.

| edge                   | messages                             |
|------------------------|--------------------------------------|
| api -> processor       | Payload, Submit, Abort, Forget       |
| processor -> api       | Events                               |
| processor -> scheduler | EngineRequest, Pixels, Abort, Forget |
| scheduler -> processor | EngineOutputs                        |
| processor -> rank 0    | Prefetch                             |
| scheduler -> worker    | StepPlan, the same bytes to all      |
| worker -> scheduler    | WorkerReady, StepResult              |

Other messages of annexes are in their own files. All times are `time.monotonic()` seconds: one clock for all processes of a host.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from engine.wire.adapters import AdapterRead, AdapterRef, LoadAdapter, ReadAdapter, image_key
from engine.wire.grammar import CompiledGrammar, Grammar
from engine.wire.media import MediaRef, Region, VideoRef
from engine.wire.params import ChatPrompt, Logprob, OutputOptions, SamplingParams, TextPrompt, TokenLogprobs, TokenPrompt
from engine.wire.reports import Report, ShownReport
from engine.wire.stats import EngineStats, Stages, TokenDetails
from engine.wire.step_sizes import StepSizes
from engine.wire.updates import Order, OrderResult

API_ARENA = 0
PROCESSOR_ARENA = 1

MAX_EARLY_TOKENS = 2048  # size limit of an image encoded before a plan requests it: 1080p
MAX_PROPOSED = 7  # tokens per chunk
ON_DEVICE = -1  # proposed token that only workers know, who proposed it after the row's last token
AnyRef = MediaRef | VideoRef  # reference to a medium of any kind
DEPTH = 2  # steps launched by a worker without a result yet: one runs, one waits

FinishReason = Literal["stop", "length", "abort"]


class ErrorInfo(msgspec.Struct, frozen=True):
    """OpenAI error object with its HTTP status. Clients see `message`: no path, address or traceback."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

    @property
    def type(self) -> str:
        """Return OpenAI's `type` of an error with this status."""
        kinds = {401: "authentication_error", 404: "not_found_error"}
        return kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")


TIMED_OUT = ErrorInfo(504, "The request took longer than its timeout.", code="timeout")

# api <-> processor


class Payload(msgspec.Struct, tag=True, frozen=True):
    """An image in a body that is still arriving; it may already be read. A Submit follows, or an Abort with its body."""

    rid: int
    payload: Region


class Submit(msgspec.Struct, tag=True):
    rid: int
    prompt: ChatPrompt | TextPrompt | TokenPrompt
    media: list[AnyRef]
    params: SamplingParams
    output: OutputOptions
    stages: Stages
    body: int | None = None  # offset of the body in the api arena, until `Events.released_bodies`
    cache_salt: str = ""
    n: int = 1  # answers, each with its own events
    is_counted_only: bool = False  # the only event has `prompt_ids` and the echo
    grammar: Grammar | None = None
    num_prompts: int = 1  # of the client's request
    grammar_field: str = ""  # field of the client's request, for errors
    prompt_field: str = "messages"  # field of the client's request, for errors
    deadline: float | None = None  # time after which no client waits for an answer
    pooled_words: list[str] | None = None  # their first tokens are `SamplingParams.pooled_ids`; the tokenizer frames the prompt
    adapter: AdapterRef | None = None


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Cancel further output. The receiver still releases resources."""

    rid: int
    body: int | None = None  # as in Submit, of a request that ends after a Payload and before its Submit
    index: int | None = None  # index of the answer; None: all


class Forget(msgspec.Struct, tag=True, frozen=True):
    """Empty the prefix cache and, if `images`, the embeddings; running requests continue."""

    images: bool


class CallDelta(msgspec.Struct, frozen=True, array_like=True):
    """A piece of tool call `index` and of its arguments' JSON; the first has the name."""

    index: int
    arguments: str
    name: str | None = None


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """Event for the client of `rid`. The last event of an answer has a `finish_reason`. An `error` ends all answers."""

    rid: int
    text: str = ""
    num_tokens: int = 0  # generated tokens so far
    is_reasoning: bool = False  # also all tokens so far
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    stages: Stages | None = None  # with the first token
    calls: list[CallDelta] = []
    stop_reason: int | str | None = None  # the stop token or stop string that ended it
    logprobs: list[Logprob] = []  # of this event's tokens
    report: ShownReport | None = None  # with the first event: numbers instead of text, or the prompt's scores
    prompt_ids: list[int] = []  # with the first token if requested, or of a counted request; images are placeholders
    token_ids: list[int] = []  # of this event, if requested
    index: int = 0  # index of the answer
    details: TokenDetails | None = None  # of the whole answer, in its last event


class Events(msgspec.Struct, frozen=True):
    events: list[Event]
    released_bodies: list[int] = []
    stats: EngineStats | None = None
    heartbeat: float = 0.0  # when the engine last made progress or was idle


# processor <-> scheduler


class ImageSource(msgspec.Struct, frozen=True, array_like=True):
    """Location of the bytes of one item: a baseline JPEG, or uint8 RGB (num_frames, height, width, 3). Sizes are after `orientation` (EXIF
    1-8). "file" is any other format, which workers cannot read: the processor converts it to "rgb" if the scheduler requests the pixels."""

    encoding: Literal["rgb", "jpeg", "file"]
    region: Region
    height: int
    width: int
    orientation: int = 1
    ticket: int = 0  # of its Prefetch, if there was one
    num_frames: int = 1  # 2: a frame pair, consecutive and already resized to its grid


class ImageSpan(msgspec.Struct, frozen=True, array_like=True):
    """Placeholders `start : start + length` of one image or frame pair. `hash` covers its bytes and all processing parameters."""

    hash: bytes
    start: int
    length: int
    grid: tuple[int, int, int]  # (t, h, w) in patches
    source: ImageSource

    @property
    def end(self) -> int:
        return self.start + self.length


def for_adapter(span: ImageSpan, adapter: AdapterRef | None) -> ImageSpan:
    """Return the span of a request with this adapter. If the adapter changes embeddings, the image has another key and no early
    embedding."""
    if adapter is None or not adapter.has_tower:
        return span
    return msgspec.structs.replace(span, hash=image_key(span.hash, adapter), source=msgspec.structs.replace(span.source, ticket=0))


class EngineRequest(msgspec.Struct, tag=True, frozen=True):
    """Request to the engine. `prompt` is int32 token ids in the processor arena. Answer i of `n` has the seed `params.seed` + i. No client
    waits after `deadline`."""

    rid: int
    prompt: Region
    images: list[ImageSpan]
    params: SamplingParams
    stages: Stages
    cache_salt: str = ""
    n: int = 1
    deadline: float | None = None
    grammar: CompiledGrammar | None = None
    adapter: AdapterRef | None = None

    @classmethod
    def of(
        cls, submit: Submit, prompt: Region, images: list[ImageSpan], params: SamplingParams, grammar: CompiledGrammar | None
    ) -> "EngineRequest":
        spans = [for_adapter(span, submit.adapter) for span in images]
        return cls(
            rid=submit.rid, prompt=prompt, images=spans, params=params, stages=submit.stages, cache_salt=submit.cache_salt, n=submit.n,
            deadline=submit.deadline, grammar=grammar, adapter=submit.adapter,
        )  # fmt: skip

    @property
    def namespace(self) -> tuple[str, bytes]:
        return self.cache_salt, b"" if self.adapter is None else b"%d" % self.adapter.number


class WantedPixels(msgspec.Struct, frozen=True, array_like=True):
    """Request for the pixels of images that are files, by index. Answered by a Pixels, unless the request has ended."""

    rid: int
    indexes: list[int]


class Pixels(msgspec.Struct, tag=True, frozen=True):
    """The answer to a WantedPixels: the images as RGB, by index, or the error that ends the request."""

    rid: int
    sources: dict[int, ImageSource] = {}
    error: ErrorInfo | None = None


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of answer `index`; with `finish_reason` or `error` its last output."""

    rid: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    num_cached_tokens: int = 0
    stages: Stages | None = None  # with the first token
    logprobs: list[TokenLogprobs] = []  # of token_ids
    report: Report | None = None  # with the first token
    index: int = 0
    details: TokenDetails | None = None  # of these tokens


class EngineOutputs(msgspec.Struct, tag=True, frozen=True):
    """`released`: requests whose regions of the processor arena may be reused."""

    outputs: list[RequestOutput]
    released: list[int]
    stats: EngineStats | None = None
    heartbeat: float = 0.0
    wanted: list[WantedPixels] = []


class Prefetch(msgspec.Struct, tag=True, frozen=True):
    """Encode this baseline JPEG now: a plan may name its ticket. If its request ends before, its region is reused. The plan's grid will
    probably be `grid`, of at most MAX_EARLY_TOKENS."""

    source: ImageSource
    grid: tuple[int, int, int]


# scheduler <-> worker


class Admit(msgspec.Struct, frozen=True, array_like=True):
    """Assignment of row `row` to a request. `output_ids` were generated before a preemption. `blocks` have its prefix, `snapshot` the
    states after it; both may be empty."""

    row: int
    prompt: Region
    output_ids: list[int]
    spans: list[tuple[int, int, int, int]]  # images as (start, t, h, w), grid in patches
    blocks: list[int]
    params: SamplingParams
    grammar: CompiledGrammar | None = None
    snapshot: list[int] = []
    slot: int = -1  # its adapter's slot; -1: none

    @classmethod
    def of(
        cls, wire: EngineRequest, row: int, output_ids: list[int], blocks: list[int], params: SamplingParams, snapshot: list[int], slot: int
    ) -> "Admit":
        return cls(row, wire.prompt, output_ids, [(s.start, *s.grid) for s in wire.images], blocks, params, wire.grammar, snapshot, slot)


class VisualRef(msgspec.Struct, frozen=True, array_like=True):
    """Tokens `start : start + length` of the sequence are tokens `offset : offset + length` of image `image_id`."""

    image_id: int
    start: int
    length: int
    offset: int


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Compute tokens `start : start + length` of row `row`; if `sample`, sample the next one. `blocks` are appended to the row's table. All
    tokens but the first may be `proposed`; the result has those that the model would have sampled, and one more token. After the last
    token the row's states are written to the blocks of `snapshot`."""

    row: int
    start: int
    length: int
    sample: bool
    blocks: list[int]
    visual: list[VisualRef]
    proposed: tuple[int, ...] = ()
    snapshot: list[int] = []

    @property
    def num_samples(self) -> int:
        return self.sample and 1 + len(self.proposed)

    @property
    def is_decode(self) -> bool:
        """True if the chunk holds the row's last token and proposed ones."""
        return self.sample and self.length == 1 + len(self.proposed) and not self.visual


class Encode(msgspec.Struct, frozen=True, array_like=True):
    image_id: int
    source: ImageSource
    grid: tuple[int, int, int]
    slot: int = -1  # slot of the adapter for the tower; -1: none


class StepPlan(msgspec.Struct, tag=True, frozen=True):
    """Plan of one step, executed in this order: load adapters, evict, admit, encode, forward, snapshot, sample, propose. Decode chunks
    come last. A row with proposed tokens in flight is not planned."""

    step: int
    evict: list[int]
    admits: list[Admit]
    encodes: list[Encode]
    chunks: list[Chunk]
    num_proposed: int = 0  # tokens that workers propose after each sampled chunk
    loads: Sequence[LoadAdapter] = ()


class WorkerReady(msgspec.Struct, tag=True, frozen=True):
    rank: int
    num_blocks: int
    image_cache_bytes: int
    bytes_per_image_token: int
    step_sizes: StepSizes  # efficient sizes on its device
    snapshot_blocks: int = 0  # blocks per snapshot of a row's states; 0: the model has none


class StepResult(msgspec.Struct, tag=True, frozen=True):
    """Result of a step. `token_ids` (rank 0 only) are in the order of the plan's sampled chunks, `num_tokens` of each, or one.
    `failed_images` could not be decoded. It `is_late` if the device began it before its launch ended."""

    rank: int
    step: int
    token_ids: list[int]
    failed_images: list[int]
    launched: float
    done: float
    decode_ms: float = 0.0
    encode_ms: float = 0.0
    forward_ms: float = 0.0
    is_late: bool = False
    num_tokens: list[int] = []
    logprobs: list[TokenLogprobs | None] = []  # by token id; empty if no row requests any
    reports: dict[int, Report] = {}  # by chunk
    out_of_memory: bool = False  # the step has no token ids, and its images are zeros
    failed_samples: dict[int, ErrorInfo] = {}  # sampled chunks whose requests end with an error
    proposed: list[list[int]] = []  # tokens that workers had proposed before each sampled chunk


ToProcessor = Payload | Submit | Abort | Forget | EngineOutputs
ToScheduler = EngineRequest | Pixels | Abort | Forget | WorkerReady | StepResult | AdapterRead | Order | OrderResult
ToWorker = StepPlan | ReadAdapter | Prefetch | Order
