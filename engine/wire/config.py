"""Settings of the engine: one typed class, from which `flags.py` derives the command line."""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec

from engine.wire.messages import MAX_PROPOSED

VERSION = "0.3.0.dev0"  # the only place
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MAX_PORT = (1 << 16) - 1
MAX_STEP_TOKENS = 1 << 15  # times the widest matrix, below 1 << 16, offsets fit into int32
UNIX_HOST = "unix:"  # internal: listen on a Unix socket in the run directory
MAY_BE_ZERO = frozenset(  # all other numbers must be at least 1
    {"port", "seed", "shutdown_timeout", "wedge_timeout", "max_images_per_request"}
)

FILES = ("chat_template", "api_key_file")

CHILD_DEFAULTS = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # no fragmentation by image sizes
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",  # unused
    "OMP_WAIT_POLICY": "passive",  # threads that spin at barriers would take cores from other processes
    "TRITON_DEFAULT_FP_FUSION": "1",  # Triton 3.9 warns that its default will change
    "PYNVIMGCODEC_VERBOSITY": "0",  # hides irrelevant errors about nvJPEG2000 and nvTIFF; failed decodes are reported
}
PACKAGE_ROOT = str(Path(__file__).parents[2])


def num_cpus() -> int:
    return len(os.sched_getaffinity(0))


MAX_HEAD_DRAFTS = 3  # draft tokens of a model's head per row
HEAD_GRAPH_TOKENS = 64  # most of a head's pass in a graph: with more the device takes longer than the host


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the engine. Every field is a flag, and its annotation the help text; fields of bytes accept the suffixes K, M and G."""

    block_size: ClassVar[int] = 16  # tokens of one KV block
    snapshot_share: ClassVar[float] = 0.75  # maximum share of the KV pool for snapshots of recurrent states
    grammar_timeout: ClassVar[int] = 5  # seconds of CPU time that compiling a grammar may take
    media_pool_size: ClassVar[int] = max(2, min(16, num_cpus()))  # threads that fetch, decode base64 and hash
    processing_pool_size: ClassVar[int] = max(1, min(16, num_cpus()))  # processes that decode files; threads for baseline JPEGs
    large_at_once: ClassVar[int] = max(1, min(4, num_cpus() // 4))  # videos and large images that are decoded at once
    decode_timeout: ClassVar[int] = 60  # seconds that decoding a video, or an image other than a baseline JPEG, may take
    max_decoder_memory: ClassVar[int] = 4 * GIB  # of each process that decodes them
    max_video_frame_pixels: ClassVar[int] = 1 << 26  # of a frame before resizing
    max_video_file_frames: ClassVar[int] = 500_000
    download_connect_timeout: ClassVar[int] = 5  # seconds to connect, and to wait for the next bytes

    model: Annotated[str, "alias (Qwen3-VL-8B), hub id or folder; 'demo' comes with the project"] = "demo"
    served_model_name: Annotated[str | None, "names of the model in the API, separated by commas or spaces; default: --model"] = None
    chat_template: Annotated[str | None, "file with a Jinja template instead of the checkpoint's"] = None
    default_chat_template_kwargs: Annotated[str | None, "template variables for requests without them, as JSON"] = None
    load_format: Annotated[Literal["auto", "dummy"], "'dummy' fills random weights, for benchmarks"] = "auto"
    dtype: Annotated[Literal["auto", "bfloat16", "float32"], "'auto': bfloat16 on GPUs, float32 on CPUs"] = "auto"
    quantization: Annotated[Literal["auto", "fp8"], "'fp8' rounds the decoder's matrices and their inputs to float8 (lossy)"] = "auto"
    device: Annotated[Literal["auto", "cuda", "cpu"], "'auto' uses GPUs if there are any"] = "auto"
    backend: Annotated[Literal["auto", "hopper", "portable", "torch"], "kernels: 'auto' is the fastest set, 'torch' the reference"] = "auto"
    seed: Annotated[int | None, "seed from which requests without a seed get theirs, in order of arrival; default: random"] = None
    generation_config: Annotated[Literal["auto", "vllm"], "default sampling parameters: the checkpoint's ('auto') or vLLM's"] = "auto"
    tp: Annotated[int, "tensor-parallel workers, one per GPU"] = 1
    dp: Annotated[int, "engines that share an affinity proxy, each with --tp GPUs and a share of CPUs and memory"] = 1
    ep: Annotated[bool, "expert parallelism: give each --tp worker whole experts instead of slices of all"] = False
    symmetric_memory: Annotated[bool, "reduce small steps over the --tp GPUs in symmetric memory where supported, else by NCCL"] = True
    host: Annotated[str, "address to listen on"] = "127.0.0.1"
    port: Annotated[int, "port to listen on; 0 picks a free one"] = 8000
    api_key: Annotated[str | None, "required bearer token; prefer ENGINE_API_KEY, which process lists do not show"] = None
    api_key_file: Annotated[str | None, "file with more bearer tokens, one per line; # begins a comment"] = None
    allowed_hosts: Annotated[str | None, "comma-separated Host names of requests, such as *.example.org; default: any"] = None
    allowed_origins: Annotated[str | None, "comma-separated origins of web pages that may call this server, or *; default: none"] = None
    root_path: Annotated[str, "path prefix that a proxy in front strips, such as /llm"] = ""
    access_log: Annotated[bool, "log one line per request"] = True
    enable_weight_updates: Annotated[bool, "serve routes that replace the weights, for trainers; needs a key"] = False
    otlp_traces_endpoint: Annotated[str | None, "URL of an OpenTelemetry collector that gets a span per request"] = None
    log_level: Annotated[Literal["debug", "info", "warning", "error"], "debug logs every step"] = "info"
    shutdown_timeout: Annotated[int, "seconds that running requests get after SIGTERM; a second signal stops at once"] = 30
    wedge_timeout: Annotated[int, "seconds without progress after which the engine exits; 0: never"] = 120

    max_model_len: Annotated[int | None, "maximum tokens of prompt and output; default: the model's, or what the KV pool holds"] = None
    max_num_seqs: Annotated[int, "maximum number of running requests"] = 128
    max_num_batched_tokens: Annotated[int, "maximum number of tokens per step"] = 8192
    max_num_mixed_tokens: Annotated[int | None, "maximum prefill tokens of a step that also decodes; default: tuned"] = None
    max_num_encoder_tokens: Annotated[int, "maximum image tokens encoded per step; also the largest image accepted"] = 16384
    max_queued_requests: Annotated[int, "maximum number of requests, running and waiting; further ones get 503"] = 1024
    request_timeout: Annotated[int | None, "seconds that a request may take, until its answer is read"] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "fp8", "fp8_e4m3"],
        "type of keys and values in the KV cache; fp8 holds twice as many tokens, with the checkpoint's scales if it has some",
    ] = "auto"
    mamba_ssm_dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], "type of a hybrid's recurrent states; auto is float32, bfloat16 takes half the memory"
    ] = "auto"
    draft: Annotated[
        Literal["off", "lookup", "mtp", "eagle3"], "drafts: 'lookup' searches the text, 'mtp' is the model's head, 'eagle3' --draft-model"
    ] = "off"
    draft_model: Annotated[str | None, "folder or hub id of an EAGLE-3 head for --draft eagle3"] = None
    lora_modules: Annotated[str | None, "LoRA adapters in PEFT's format, name=folder, separated by spaces"] = None
    max_loras: Annotated[int, "maximum number of adapters in GPU memory; requests for further ones wait"] = 4
    max_lora_rank: Annotated[int, "maximum rank of an adapter"] = 64
    lora_root: Annotated[str | None, "serve routes that load adapters from below this folder; needs a key"] = None
    prefix_cache: Annotated[bool, "reuse the KV blocks of finished requests for prompts with the same prefix"] = True
    image_cache_bytes: Annotated[int | None, "budget of the image-embedding cache; default: 4G on GPUs, 256M on CPUs"] = None
    gpu_memory_utilization: Annotated[float, "fraction of each GPU's memory that weights, KV pool and image cache may take"] = 0.9
    gpu_memory: Annotated[int | None, "memory per GPU to plan with; default: the GPU's own, with --plan common sizes"] = None
    kv_cache_memory_bytes: Annotated[int | None, "size of the KV pool; default: the rest of the GPU's share, 512M on CPUs"] = None
    plan: Annotated[bool, "print what fits on GPUs (context, step sizes) and exit; needs no GPU"] = False
    enforce_eager: Annotated[bool, "do not capture CUDA graphs"] = False

    api_arena_bytes: Annotated[int | None, "shared memory for request bodies; default: 1/16 of the host's, at most 1G, on CPUs 64M"] = None
    processor_arena_bytes: Annotated[int | None, "the same for media and token ids; default: 1/8, at most 2G, on CPUs 192M"] = None
    max_body_bytes: Annotated[int, "maximum size of a request body"] = 512 * MIB
    max_connections: Annotated[int, "maximum number of connections; others are closed"] = 4096
    idle_timeout: Annotated[int, "seconds that a connection without a request is kept"] = 75
    max_images_per_request: Annotated[int, "maximum number of images per request"] = 128
    min_pixels: Annotated[int | None, "minimum pixels of a resized image; default: the checkpoint's"] = None
    max_pixels: Annotated[int | None, "maximum pixels of a resized image; default: the checkpoint's"] = None
    max_image_pixels: Annotated[int, "maximum pixels of an image before resizing"] = 179_000_000
    max_video_bytes: Annotated[int, "maximum size of a video file"] = 256 * MIB
    max_video_frames: Annotated[int, "maximum number of frames sampled from a video"] = 2048
    max_download_bytes: Annotated[int, "maximum size of a fetched media item"] = 64 * MIB
    download_timeout: Annotated[int, "seconds for one item in total, redirects included"] = 30
    allowed_local_media_path: Annotated[str | None, "serve file:// images below this folder; default: none"] = None
    allowed_media_domains: Annotated[str | None, "comma-separated hosts that images may be fetched from; default: any public one"] = None
    allow_private_media: Annotated[bool, "also fetch images from addresses that are not globally routable"] = False

    @property
    def num_adapter_slots(self) -> int:
        return self.max_loras if self.lora_modules or self.lora_root else 0

    @property
    def max_drafts(self) -> int:
        """Return the maximum number of draft tokens per row and step."""
        return {"off": 0, "lookup": MAX_PROPOSED}.get(self.draft, MAX_HEAD_DRAFTS)


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command of a child process that runs a module of this project, regardless of the working directory. Its environment must
    be `child_environment` or `server_environment`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(defaults: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return our environment with CHILD_DEFAULTS and `defaults` for variables it lacks, and the path to this project."""
    return {**CHILD_DEFAULTS, **(defaults or {}), **os.environ, **_search_path()}


def _search_path() -> dict[str, str]:
    """Return PYTHONPATH with the folder of these packages first. Empty entries, which mean the working directory, are removed."""
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys([PACKAGE_ROOT, *given]))}


def read_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("ENGINE_")}


def read_api_keys(config: EngineConfig) -> list[str]:
    """Return the keys; without any, the server is open."""
    keys = [] if config.api_key is None else [config.api_key]
    if config.api_key_file is not None:
        with open(config.api_key_file, encoding="utf-8") as file:
            keys += [key for line in file if (key := line.strip()) and not line.startswith("#")]
    return keys


def server_environment(config: EngineConfig, index: int | None = None) -> dict[str, str]:
    """Return the environment of a server with these settings and no others: keys appear in no file and no process list. Engine `index` of
    several gets its `tp` of the visible GPUs."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ENGINE_")} | _search_path()
    defaults = msgspec.structs.asdict(EngineConfig())
    changed = {name: value for name, value in msgspec.structs.asdict(config).items() if value != defaults[name]}
    environment |= {f"ENGINE_{name.upper()}": str(value) for name, value in changed.items()}
    if index is not None:
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = listed.split(",") if listed else list(map(str, range((index + 1) * config.tp)))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[index * config.tp : (index + 1) * config.tp])
    return environment


RAY_DEFAULTS = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",  # bodies and streams go through HAProxy, not through Python
    # A conversation stays on its replica, up to 1.25 times the mean load. Serve inserts this text after `balance `.
    "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "hdr(x-session-id)\n    hash-type consistent\n    hash-balance-factor 125",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",  # for balancers that are slower than HAProxy to notice a stopping replica
    "RAY_AUTH_MODE": "token",  # from the user's ~/.ray/auth_token
    "RAY_USAGE_STATS_ENABLED": "0",
}


def set_ray_defaults() -> None:
    """Set environment variables for Ray; call this before Ray is imported."""
    os.environ.update({**RAY_DEFAULTS, **os.environ})


def is_json_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except msgspec.DecodeError:
        return False


def find_problems(config: EngineConfig) -> Iterator[str]:
    for name, value in msgspec.structs.asdict(config).items():
        flag, least = "--" + name.replace("_", "-"), 0 if name in MAY_BE_ZERO else 1
        if type(value) is int and value < least:  # excludes booleans
            yield f"{flag} must be at least {least}"
        if name == "port" and value > MAX_PORT:
            yield f"{flag} must be at most {MAX_PORT}"
        if name in FILES and value is not None and not os.path.isfile(value):
            yield f"{flag}: there is no file {value}"
    if config.api_key is not None and not config.api_key.strip():
        yield "--api-key must not be empty: leave it out to serve without a key"
    if config.api_key_file is not None and os.path.isfile(config.api_key_file) and not read_api_keys(config):
        yield f"--api-key-file: there is no key in {config.api_key_file}"
    if config.enable_weight_updates and not config.host.startswith(UNIX_HOST) and config.api_key is None and config.api_key_file is None:
        yield "--enable-weight-updates needs --api-key: its routes replace the model"
    if not is_json_object(config.default_chat_template_kwargs or "{}"):
        yield "--default-chat-template-kwargs must be a JSON object"
    if config.dp > 1 and config.port + config.dp > MAX_PORT:
        yield f"--port must be at most {MAX_PORT - config.dp} with --dp {config.dp}: its engines use the ports after it"
    if not 0 < config.gpu_memory_utilization <= 1:
        yield "--gpu-memory-utilization must lie in (0, 1]"
    yield from lora_problems(config)
    if config.draft == "eagle3" and config.draft_model is None and config.load_format != "dummy":
        yield "--draft eagle3 needs --draft-model"
    if config.draft == "off" and config.draft_model is not None:
        yield "--draft-model needs --draft eagle3"
    if config.min_pixels is not None and config.max_pixels is not None and config.min_pixels > config.max_pixels:
        yield "--min-pixels must not exceed --max-pixels"
    if config.max_num_batched_tokens > MAX_STEP_TOKENS:
        yield f"--max-num-batched-tokens must be at most {MAX_STEP_TOKENS}: kernels count the values of a step in 32 bits"
    if config.max_num_seqs > config.max_num_batched_tokens:
        yield "--max-num-seqs must not exceed --max-num-batched-tokens: every running request decodes one token per step"


def lora_problems(config: EngineConfig) -> Iterator[str]:
    if config.lora_root is None:
        return
    if config.api_key is None and config.api_key_file is None:
        yield "--lora-root needs --api-key: its routes change what is served"
    if not os.path.isdir(config.lora_root):
        yield f"--lora-root: there is no folder {config.lora_root}"
    if config.dp > 1:
        yield "--lora-root is for a single engine: with --dp name the adapters in --lora-modules"
