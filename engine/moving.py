"""Flags of vLLM and SGLang and what they are here. `flags.py` accepts them; docs/generate.py makes two tables of them."""

import json
from typing import Any, Literal, NamedTuple

Server = Literal["vLLM", "SGLang"]
BOTH: tuple[Server, ...] = ("vLLM", "SGLang")
VLLM: tuple[Server, ...] = ("vLLM",)
SGLANG: tuple[Server, ...] = ("SGLang",)


class SameFlag(NamedTuple):
    """Another name of one of our fields; a switch that means its opposite gives `const`."""

    field: str
    names: tuple[str, ...]
    servers: tuple[Server, ...]
    differs: str = ""
    const: bool | None = None


class OtherFlag(NamedTuple):
    """Has no effect, which is said, or is refused. `values` are those of no effect: None is any, () that it takes none. One that is
    refused takes whatever follows it."""

    names: tuple[str, ...]
    servers: tuple[Server, ...]
    text: str
    values: tuple[str, ...] | None = ()
    is_refused: bool = False


def true(name: str, servers: tuple[Server, ...], text: str, *values: str) -> OtherFlag:
    """Already so, for these values."""
    return OtherFlag(tuple(name.split()), servers, text, values)


def harmless(name: str, servers: tuple[Server, ...], text: str) -> OtherFlag:
    """Whatever its value, no answer changes."""
    return OtherFlag(tuple(name.split()), servers, text, None)


def refused(name: str, servers: tuple[Server, ...], text: str) -> OtherFlag:
    return OtherFlag(tuple(name.split()), servers, text, is_refused=True)


SAME = (
    SameFlag("model", ("--model-path",), SGLANG),
    SameFlag("tp", ("--tensor-parallel-size", "-tp"), BOTH),
    SameFlag("tp", ("--tp-size",), SGLANG),
    SameFlag("dp", ("--data-parallel-size", "-dp"), BOTH, "engines behind a proxy that keeps a session on one of them"),
    SameFlag("dp", ("--dp-size",), SGLANG, "engines behind a proxy that keeps a session on one of them"),
    SameFlag("ep", ("--enable-expert-parallel",), VLLM),
    SameFlag("quantization", ("-q",), VLLM, "`fp8` alone; quantised checkpoints are recognised"),
    SameFlag("prefix_cache", ("--enable-prefix-caching",), VLLM, "on unless it is turned off"),
    SameFlag("prefix_cache", ("--disable-radix-cache",), SGLANG, const=False),
    SameFlag("max_model_len", ("--context-length",), SGLANG),
    SameFlag("max_num_seqs", ("--max-running-requests",), SGLANG),
    SameFlag("max_num_batched_tokens", ("--chunked-prefill-size",), SGLANG, "bounds a step, decoding included"),
    SameFlag("gpu_memory_utilization", ("--mem-fraction-static",), SGLANG, "activations and the image cache are part of it"),
    SameFlag("block_size", ("--page-size",), SGLANG),
    SameFlag("enforce_eager", ("--disable-cuda-graph",), SGLANG, const=True),
    SameFlag("wedge_timeout", ("--watchdog-timeout",), SGLANG),
    SameFlag("seed", ("--random-seed",), SGLANG),
    SameFlag("root_path", ("--fastapi-root-path",), SGLANG),
    SameFlag("access_log", ("--disable-uvicorn-access-log",), VLLM, const=False),
)  # fmt: skip

OTHER_VALUES = {  # of fields that have the same name
    ("dtype", "float"): "float32",
    ("load_format", "safetensors"): "auto",
    ("draft", "suffix"): "lookup",
}
FLOAT16 = "float16 overflows in these models: use bfloat16, or float32 on CPUs"
REFUSED_VALUES = {
    ("dtype", "half"): FLOAT16,
    ("dtype", "float16"): FLOAT16,
    ("draft", "auto"): "choose lookup, for answers that repeat their prompt or prediction, or mtp, for models with such a head",
}

CHUNKED = "prefill is always chunked; --max-num-batched-tokens and --max-num-mixed-tokens bound a step"
PARSED = "the checkpoint's template decides how tool calls and thoughts are parsed"
EMBEDS = "every model generates, and answers /v1/embeddings, /rerank and /score"
CHOSEN = "--backend chooses all kernels"
COUNTED = "usage always counts cached tokens"
FOUND = "put what belongs together into one folder, and give it as --model"

OTHER = (
    true("--trust-remote-code", BOTH, "code of a checkpoint is never run"),
    true("--enable-chunked-prefill", VLLM, CHUNKED),
    true("--enable-auto-tool-choice", VLLM, "tool calls are always recognised"),
    harmless("--tool-call-parser", BOTH, PARSED),
    harmless("--reasoning-parser", BOTH, PARSED),
    true("--enable-multimodal", SGLANG, "every model takes images"),
    true("--tokenizer-mode", BOTH, "the tokenizer is the fast one", "auto", "hf"),
    true("--config-format", VLLM, "the folder is one of Hugging Face's", "auto", "hf"),
    true("--model-impl", BOTH, "there is one implementation of a model", "auto", "vllm", "sglang"),
    true("--kv-cache-dtype", BOTH, "keys and values have the model's dtype", "auto", "bf16", "bfloat16"),
    true("--pipeline-parallel-size -pp --pp-size", BOTH, "use --tp to split a model over GPUs", "1"),
    true("--nnodes", BOTH, "an engine runs on one host; docs/scaling.md has many of them", "1"),
    true("--node-rank", BOTH, "an engine runs on one host; docs/scaling.md has many of them", "0"),
    true("--chat-template-content-format", VLLM, "a template sees lists where a request has lists", "auto", "openai"),
    true("--max-logprobs", VLLM, "a token has at most 20 log-probabilities beside it", *(str(number) for number in range(21))),
    true("--scheduling-policy", VLLM, "requests come in their order, those of a lower `priority` first", "fcfs", "priority"),
    true("--schedule-policy", SGLANG, "requests come in their order, those of a lower `priority` first", "fcfs", "lpm", "priority"),
    true("--mm-encoder-tp-mode", VLLM, "with --tp, each GPU encodes its share of the images", "data"),
    true("--distributed-executor-backend", VLLM, "workers are processes of the launcher; engine.replicas uses Ray", "mp", "uni"),
    true("--cpu-offload-gb", VLLM, "weights stay on the GPU: use --quantization fp8 or --tp", "0"),
    true("--api-server-count -asc", VLLM, "an engine has one HTTP process; --dp starts several engines", "1"),
    harmless("--ep-size --expert-parallel-size", SGLANG, "--ep places whole experts on the GPUs of --tp"),
    harmless("--runner --task --convert", VLLM, EMBEDS),
    true("--is-embedding", SGLANG, EMBEDS),
    harmless("--attention-backend --mm-attention-backend --sampling-backend", BOTH, CHOSEN),
    harmless("--guided-decoding-backend --structured-outputs-config", VLLM, "grammars are xgrammar's"),
    harmless("--grammar-backend", SGLANG, "grammars are xgrammar's"),
    harmless("--compilation-config", VLLM, "decoding and the vision tower are captured in CUDA graphs; --enforce-eager turns that off"),
    harmless("--cuda-graph-max-bs --cuda-graph-bs", SGLANG, "graphs are captured for up to --max-num-seqs rows"),
    harmless("--max-seq-len-to-capture", VLLM, "graphs do not depend on lengths"),
    true("--async-scheduling", VLLM, "steps are always planned ahead"),
    true("--enable-mixed-chunk", SGLANG, "prefill and decoding always share steps"),
    true("--disable-custom-all-reduce", BOTH, "--no-symmetric-memory uses NCCL"),
    true("--enable-p2p-check", SGLANG, "--no-symmetric-memory uses NCCL"),
    harmless("--swap-space", VLLM, "preempted requests are computed again"),
    harmless("--mm-processor-cache-gb", VLLM, "processed images are not cached but encoded ones: --image-cache-bytes"),
    true("--disable-mm-preprocessor-cache", VLLM, "processed images are not cached but encoded ones: --image-cache-bytes"),
    true("--skip-mm-profiling", VLLM, "memory is planned by --max-num-encoder-tokens"),
    true("--disable-fast-image-processor", SGLANG, "images are resized on the GPU as the reference does"),
    true("--keep-mm-feature-on-device", SGLANG, "pixels never leave the GPU"),
    harmless("--max-prefill-tokens", SGLANG, CHUNKED),
    harmless("--schedule-conservativeness", SGLANG, "a request that does not fit is preempted and computed again"),
    harmless("--stream-interval", BOTH, "each token is sent at once"),
    true("--skip-server-warmup", SGLANG, "the server is ready when it is warm"),
    true("--disable-log-stats --disable-log-requests --enable-log-requests", VLLM, "--access-log has one line per request"),
    true("--log-requests", SGLANG, "--access-log has one line per request"),
    harmless("--log-requests-level --decode-log-interval --log-level-http", SGLANG, "--access-log has one line per request"),
    harmless("--uvicorn-log-level", VLLM, "--log-level sets it for all processes"),
    harmless("--max-log-len", VLLM, "prompts are not logged"),
    true("--enable-metrics", SGLANG, "/metrics is always there"),
    true("--enable-prompt-tokens-details", VLLM, COUNTED),
    true("--enable-cache-report", SGLANG, COUNTED),
    true("--enable-server-load-tracking", VLLM, "/load always answers"),
    true("--disable-fastapi-docs", VLLM, "there is /openapi.json and no page for it"),
    true("--disable-frontend-multiprocessing", VLLM, "HTTP has a process of its own"),
    true("--allow-credentials", VLLM, "credentials are headers, which --allowed-origins admits"),
    harmless("--allowed-methods --allowed-headers", VLLM, "--allowed-origins admits all methods and headers"),
    harmless("--response-role", VLLM, "answers are the assistant's"),
    refused("--no-enable-chunked-prefill", VLLM, CHUNKED),
    refused("--tokenizer --hf-config-path", VLLM, FOUND),
    refused("--tokenizer-path", SGLANG, FOUND),
    refused("--revision", BOTH, "download it (`hf download MODEL --revision NAME`), and give its folder as --model"),
    refused("--code-revision --tokenizer-revision", VLLM, FOUND),
    refused("--download-dir", BOTH, "set HF_HOME, the hub's own variable"),
    refused("--hf-token", VLLM, "set HF_TOKEN, the hub's own variable"),
    refused("--hf-overrides --json-model-override-args", BOTH, "edit config.json in a copy of the folder"),
    refused("--rope-scaling --rope-theta", VLLM, "edit config.json in a copy of the folder"),
    refused("--override-generation-config", VLLM, "edit generation_config.json in a copy of the folder, or let requests say it"),
    refused("--enable-lora --lora-modules --max-loras --max-lora-rank --lora-paths", BOTH, "merge the adapter into the weights"),
    refused("--speculative-config", VLLM, "no draft model is loaded: see --draft lookup and mtp"),
    refused("--speculative-algorithm --speculative-draft-model-path", SGLANG, "no draft model is loaded: see --draft lookup and mtp"),
    refused("--max-total-tokens", SGLANG, "use --kv-cache-memory-bytes"),
    refused("--enable-sleep-mode --enable-memory-saver", BOTH, "stop the server, and start it when it is needed"),
    refused("--skip-tokenizer-init", BOTH, "text is always made; requests may give token ids as `prompt`"),
    refused("--max-parallel-loading-workers --model-loader-extra-config", VLLM, "weights are read as fast as the disk is"),
    refused("--middleware --tool-parser-plugin --logits-processors", VLLM, "no code of others runs here: put a proxy in front"),
    refused("--ssl-ca-certs", VLLM, "clients' certificates are checked by a proxy in front"),
    refused("--kv-transfer-config --disaggregation-mode", BOTH, "prefill and decoding share the GPU"),
    refused("--log-config-file", VLLM, "logs are lines on stderr; --log-level"),
    refused("--trust-request-chat-template", VLLM, "requests cannot bring a template: start the server with --chat-template"),
    refused("--media-io-kwargs", VLLM, "images are read one way"),
)  # fmt: skip


OTHERS_BY_NAME = {name: other for other in OTHER for name in other.names}


class ReadFlag(NamedTuple):
    """A flag whose JSON sets fields of ours, by `read_json`."""

    name: str
    servers: tuple[Server, ...]
    differs: str


READ = (
    ReadFlag("--limit-mm-per-prompt", VLLM, "`image` becomes `--max-images-per-request`; no other media"),
    ReadFlag("--limit-mm-data-per-request", SGLANG, "`image` becomes `--max-images-per-request`; no other media"),
    ReadFlag("--mm-processor-kwargs", VLLM, "`min_pixels` and `max_pixels`, or `size`, become the flags of these names"),
    ReadFlag("--mm-process-config", SGLANG, "of `image`, `min_pixels` and `max_pixels` become the flags of these names"),
)


def read_json(name: str, text: str) -> dict[str, int]:
    """Fields that the value of a ReadFlag sets. Raises ValueError."""
    pairs = [pair.split("=", 1) for pair in text.split(",")]
    is_old = not text.lstrip().startswith("{") and all(len(pair) == 2 and pair[1].isdigit() for pair in pairs)  # `image=4,video=0`
    try:
        value = {key: int(number) for key, number in pairs} if is_old else json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be JSON, such as " + ("'{\"image\": 4}'" if "limit" in name else "'{\"max_pixels\": 1003520}'"))
    return _read_limits(name, value) if "limit" in name else _read_pixels(name, value.get("image", {}) if "config" in name else value)


def _read_limits(name: str, value: dict[str, Any]) -> dict[str, int]:
    count = value.get("image")
    count = count.get("count") if isinstance(count, dict) else count
    if count is not None and (type(count) is not int or count < 0):
        raise ValueError(f"{name}: `image` must be a number of images")
    return {} if count is None else {"max_images_per_request": count}


def _read_pixels(name: str, value: dict[str, Any]) -> dict[str, int]:
    size = value.get("size")
    size = size if isinstance(size, dict) else {}
    told = {
        "min_pixels": value.get("min_pixels", size.get("shortest_edge")),
        "max_pixels": value.get("max_pixels", size.get("longest_edge")),
    }
    others = [key for key in value if key not in ("min_pixels", "max_pixels", "size", "use_fast")]
    if others or any(number is not None and type(number) is not int for number in told.values()):
        raise ValueError(f"{name} may set min_pixels and max_pixels, whole numbers" + (f", not {others[0]}" if others else ""))
    return {key: number for key, number in told.items() if number is not None}
