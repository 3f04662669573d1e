"""Every message between the processes that serve: typed, msgpack, pointers instead of pixels. What they tell the launcher is in `ipc`.

| edge                   | message                              | carries                                                                  |
|------------------------|--------------------------------------|--------------------------------------------------------------------------|
| api -> processor       | Payload, Submit, Abort, Forget       | a request's small JSON; its media as regions of the api arena or URLs    |
| processor -> api       | Events                               | text, terminal events, bodies of the api arena that may be reused        |
| processor -> scheduler | EngineRequest, Pixels, Abort, Forget | prompt ids as a region, image spans with their bytes as regions          |
| scheduler -> processor | EngineOutputs                        | token ids, terminal events, regions that may be reused, images to decode |
| processor -> rank 0    | Prefetch, LoadGrammar                | what a plan may name, as a region: it may be begun with                  |
| rank 0 -> processor    | GrammarLoaded                        | a large grammar may be planned with                                      |
| scheduler -> worker    | StepPlan                             | diffs and pointers: the same bytes to every rank                         |
| worker -> scheduler    | WorkerReady, StepResult, Beat        | sizes at start; sampled ids and failed images of a step; signs of life   |

All times are `time.monotonic()` seconds: one clock for all processes of a host.
"""

from typing import Literal

import msgspec

from engine.params import (
    ChatPrompt,
    Grammar,
    Logprob,
    OutputOptions,
    PromptLogprobs,
    SamplingParams,
    TextPrompt,
    TokenLogprobs,
    TokenPrompt,
)
from engine.stats import EngineStats, Stages
from models.step_sizes import StepSizes

API_ARENA = 0
PROCESSOR_ARENA = 1

MAX_EARLY_TOKENS = 2048  # of an image that is encoded before a plan asks for it: 1080p
DEPTH = 2  # steps that a worker has launched and not answered: one runs, one waits behind it. What it keeps for steps is for so many

FinishReason = Literal["stop", "length"]


class Region(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`length` bytes at `offset` of a shared-memory arena."""

    arena: int
    offset: int
    length: int


class ErrorInfo(msgspec.Struct, frozen=True):
    """An OpenAI error object with its HTTP status. `message` is shown to the client: no path, address or traceback."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None


TIMED_OUT = ErrorInfo(504, "The request took longer than its timeout.", "server_error", code="timeout")

# ---- api <-> processor -------------------------------------------------------------------------------------------------------------


class MediaRef(msgspec.Struct, frozen=True):
    """One image of a request: base64 text in the api arena, as it stood in the JSON string (escapes included), a URL to fetch, or the one
    that came under this `name`, which only this client can say. `min_pixels` and `max_pixels` bound its area; None: as the checkpoint."""

    payload: Region | None = None
    url: str | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    name: bytes | None = None
    cap: int | None = None  # most pixels, whatever the others say


class Payload(msgspec.Struct, tag=True, frozen=True):
    """An image in a body that still arrives, as in a MediaRef: it may be read already. A Submit follows, or an Abort with its body."""

    rid: int
    payload: Region


class Submit(msgspec.Struct, tag=True):
    """A validated request."""

    rid: int
    prompt: ChatPrompt | TextPrompt | TokenPrompt
    media: list[MediaRef]
    params: SamplingParams
    output: OutputOptions
    stages: Stages
    body: int | None = None  # offset of the body's allocation in the api arena, released with `Events.released_bodies`
    cache_salt: str = ""
    n: int = 1  # answers, each with its own events
    priority: int = 0
    is_counted_only: bool = False  # one event with `prompt_ids` and the echo is the answer; the scheduler hears of nothing
    grammar: Grammar | None = None
    grammar_field: str = ""  # of the client's request, for errors
    client: bytes = b""  # tells clients apart, by key and address
    prompt_field: str = "messages"  # the same
    deadline: float | None = None  # when nobody waits for an answer any more
    pooled_words: list[str] | None = None  # their first tokens are `SamplingParams.pooled_ids`; the prompt is framed by the tokenizer


class Abort(msgspec.Struct, tag=True, frozen=True):
    """The client went away, or a stop string was found: the sender wants no further output. The receiver still releases."""

    rid: int
    body: int | None = None  # of a request that ends before its Submit although a Payload named it: as in Submit
    index: int | None = None  # of the answer that is meant; None: all


class Forget(msgspec.Struct, tag=True, frozen=True):
    """Requests that follow find no beginning in the prefix cache and, if `images`, no embedding: what runs goes on."""

    images: bool


class CallDelta(msgspec.Struct, frozen=True, array_like=True):
    """A piece of tool call `index`: its first one has the name, all have a piece of the arguments' JSON."""

    index: int
    arguments: str
    name: str | None = None


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something for the client of `rid`. Exactly one event of an answer has a `finish_reason`; it is its last. An `error` ends all."""

    rid: int
    text: str = ""
    num_tokens: int = 0  # generated tokens so far
    is_reasoning: bool = False  # the text, and all the tokens so far, are thoughts
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    stages: Stages | None = None  # with the first token
    calls: list[CallDelta] = []
    stop_reason: int | str | None = None  # the stop token or stop string of the request that ended it
    logprobs: list[Logprob] = []  # of the tokens that this event is about, if they were asked for
    pooled: bytes = b""  # float32, of a request that wants that instead of text
    prompt_ids: list[int] = []  # of a request that was only counted: with every image's placeholders
    index: int = 0  # of the answer


class Events(msgspec.Struct, frozen=True):
    events: list[Event]
    released_bodies: list[int] = []
    stats: EngineStats | None = None
    heartbeat: float = 0.0  # when the engine last made progress, or was idle; /health compares it with now


# ---- processor <-> scheduler -------------------------------------------------------------------------------------------------------


class ImageSource(msgspec.Struct, frozen=True, array_like=True):
    """The bytes of one image: a baseline JPEG as it came, or uint8 RGB (height, width, 3). Sizes are after `orientation` (EXIF 1-8). "file"
    is any other format, known to be good: workers cannot read it, the processor makes "rgb" of it if the scheduler wants pixels."""

    encoding: Literal["rgb", "jpeg", "file"]
    region: Region
    height: int
    width: int
    orientation: int = 1
    ticket: int = 0  # of the Prefetch that announced it to rank 0, if there was one


class ImageSpan(msgspec.Struct, frozen=True, array_like=True):
    """Prompt tokens `start : start + length` are the placeholders of one image. `hash` covers its bytes and all processing parameters."""

    hash: bytes
    start: int
    length: int
    grid: tuple[int, int, int]  # (t, h, w) in patches
    source: ImageSource

    @property
    def end(self) -> int:
        return self.start + self.length


class CompiledGrammar(msgspec.Struct, frozen=True, array_like=True):
    """A grammar that rank 0 can read, in the processor arena. It holds behind the token `after`, if that is given (the end of thoughts)."""

    region: Region
    after: int | None = None


class EngineRequest(msgspec.Struct, tag=True, frozen=True):
    """A request in the engine's terms. `prompt` is int32 token ids in the processor arena. It gets `n` answers, of which each is drawn with
    a seed of its own, `params.seed` + index, and has one last output. Requests of a lower `priority` come first, in the order of their
    arrival. After `deadline`, if there is one, nobody waits for the answers any more."""

    rid: int
    prompt: Region
    images: list[ImageSpan]
    params: SamplingParams
    stages: Stages
    cache_salt: str = ""
    n: int = 1
    priority: int = 0
    deadline: float | None = None
    grammar: CompiledGrammar | None = None


class WantedPixels(msgspec.Struct, frozen=True, array_like=True):
    """Image `index` of the request is a file and must be encoded. Answered by a Pixels, unless the request has ended meanwhile."""

    rid: int
    index: int


class Pixels(msgspec.Struct, tag=True, frozen=True):
    """The answer to a WantedPixels: where the image's RGB is now, among the request's regions; or the error with which the request ends."""

    rid: int
    index: int
    source: ImageSource | None = None
    error: ErrorInfo | None = None


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of answer `index` of a request; with `finish_reason` or `error` it is this answer's last output."""

    rid: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    num_cached_tokens: int = 0
    stages: Stages | None = None  # with the first token
    logprobs: list[TokenLogprobs] = []  # of token_ids, if they were asked for
    prompt_logprobs: PromptLogprobs | None = None  # with the first token, if they were asked for and the prompt has more than one
    index: int = 0
    pooled: bytes = b""  # float32, see `SamplingParams.pooled_ids`


class EngineOutputs(msgspec.Struct, tag=True, frozen=True):
    """What one step (or a reject) means for requests. `released`: requests whose regions of the processor arena may be reused."""

    outputs: list[RequestOutput]
    released: list[int]
    stats: EngineStats | None = None
    heartbeat: float = 0.0
    wanted: list[WantedPixels] = []


class Prefetch(msgspec.Struct, tag=True, frozen=True):
    """From the processor: encode this plain JPEG now: a plan may name its ticket. If its request ends before, its region is reused. `grid`,
    of at most MAX_EARLY_TOKENS, is what the plan will probably say, too."""

    source: ImageSource
    grid: tuple[int, int, int]


class LoadGrammar(msgspec.Struct, tag=True, frozen=True):
    """From the processor: read this compiled grammar beside the steps, which would have to wait for it. Answered by a GrammarLoaded."""

    region: Region
    ticket: int


class GrammarLoaded(msgspec.Struct, tag=True, frozen=True):
    """The answer to the LoadGrammar with this ticket."""

    ticket: int


# ---- scheduler <-> worker ----------------------------------------------------------------------------------------------------------


class Admit(msgspec.Struct, frozen=True, array_like=True):
    """Row `row` now belongs to this request: prompt ids by pointer, tokens generated before a preemption inline. `blocks` have its
    beginning and `snapshot` the states behind that; both are empty if it is computed from its first token on."""

    row: int
    prompt: Region
    output_ids: list[int]
    spans: list[tuple[int, int, int, int]]  # images as (start, t, h, w), grid in patches: for M-RoPE positions
    blocks: list[int]
    params: SamplingParams
    grammar: CompiledGrammar | None = None
    snapshot: list[int] = []


class VisualRef(msgspec.Struct, frozen=True, array_like=True):
    """Tokens `start : start + length` of the sequence are tokens `offset : offset + length` of image `image_id`."""

    image_id: int
    start: int
    length: int
    offset: int


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Compute tokens `start : start + length` of row `row`; if `sample`, draw its next token. `blocks` are appended to the row's table. The
    last of these tokens are guessed: `drafts` follow the last known or drawn one. The result has, for such a row, the drafts that the model
    would have drawn, and one token more. Behind the last token the row's states go into the blocks of `snapshot`."""

    row: int
    start: int
    length: int
    sample: bool
    blocks: list[int]
    visual: list[VisualRef]
    drafts: tuple[int, ...] = ()
    snapshot: list[int] = []


class Encode(msgspec.Struct, frozen=True, array_like=True):
    image_id: int
    source: ImageSource
    grid: tuple[int, int, int]


class Save(msgspec.Struct, frozen=True, array_like=True):
    """Copy an embedding, which is evicted in the same plan, to this offset of the worker's host memory."""

    image_id: int
    host_offset: int


class Restore(msgspec.Struct, frozen=True, array_like=True):
    """An embedding of `num_tokens` image tokens comes back under a new id, from where an earlier save or one of the same plan put it."""

    image_id: int
    host_offset: int
    num_tokens: int


class StepPlan(msgspec.Struct, tag=True, frozen=True):
    """One step, executed in this order: save, evict, admit, restore, encode, forward, snapshot, sample. Prefill chunks come before
    decode chunks, which are those of one sampled token without an image."""

    step: int
    saves: list[Save]
    evict: list[int]
    admits: list[Admit]
    restores: list[Restore]
    encodes: list[Encode]
    chunks: list[Chunk]


class WorkerReady(msgspec.Struct, tag=True, frozen=True):
    rank: int
    num_blocks: int
    image_cache_bytes: int
    bytes_per_image_token: int
    step_sizes: StepSizes  # that pay on its device
    snapshot_blocks: int = 0  # that hold a snapshot of a row's states; 0: the model has none


class StepResult(msgspec.Struct, tag=True, frozen=True):
    """`token_ids` (rank 0 only) are in the order of the plan's sampled chunks, so many of each as `num_tokens` says; if that is empty,
    one of each. `failed_images` are those this rank could not decode."""

    rank: int
    step: int
    token_ids: list[int]
    failed_images: list[int]
    launched: float
    done: float
    decode_ms: float = 0.0
    encode_ms: float = 0.0
    forward_ms: float = 0.0
    num_tokens: list[int] = []
    logprobs: list[TokenLogprobs | None] = []  # in the order of the token ids; empty if no row wants any
    prompt_logprobs: dict[int, PromptLogprobs] = {}  # by the index of their chunk
    pooled: dict[int, bytes] = {}  # the same
    starved_images: tuple[int, ...] = ()  # for which this rank had no memory: they are zeros, as failed ones
    out_of_memory: bool = False  # the step was given up: it has no token ids, and its images are zeros
    slow_draws: tuple[int, ...] = ()  # indices of sampled chunks whose grammars held all others up: they were followed no further


Activity = Literal["idle", "step", "images", "compiling"]  # "images": a step that has to read some; "compiling": one that makes a kernel


class Beat(msgspec.Struct, tag=True, frozen=True):
    """A worker lives; what its main thread does, and since when. Comes every second, whatever that is, unless the worker is stopped."""

    rank: int
    activity: Activity
    since: float


ToProcessor = Payload | Submit | Abort | Forget | EngineOutputs | GrammarLoaded
ToScheduler = EngineRequest | Pixels | Abort | Forget | WorkerReady | StepResult | Beat
ToWorker = StepPlan | Prefetch | LoadGrammar
