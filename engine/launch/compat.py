"""Table of the flags of vLLM and SGLang and their equivalents here. `engine/launch/flags.py` accepts them; docs/generate.py lists them."""

import json
import re
from typing import Any, NamedTuple

# Names (V: only vLLM, S: only SGLang) and a rule; then what differs, why there is no effect, or what to use instead. Rules:
#   =field  another name of our flag; =field:on and :off are switches     json  its value sets our fields (`read`)
#   ok      no value and no effect; ok:a,b with these values, ok:* any     no  rejected with any value
TABLE = """
S:--model-path =model
--tensor-parallel-size -tp S:--tp-size =tp
--data-parallel-size -dp S:--dp-size =dp | engines behind an affinity proxy
V:--enable-expert-parallel =ep
S:--ep-size S:--expert-parallel-size json | more than 1 is `--ep`; also `--ep N`
V:-q =quantization | only `fp8`; quantized checkpoints are detected
V:--enable-prefix-caching =prefix_cache | on by default
S:--disable-radix-cache =prefix_cache:off
S:--context-length =max_model_len
S:--max-running-requests =max_num_seqs
S:--chunked-prefill-size =max_num_batched_tokens | limits a step, including decoding
S:--mem-fraction-static =gpu_memory_utilization | includes activations and image cache
S:--page-size =block_size
S:--disable-cuda-graph =enforce_eager:on
S:--watchdog-timeout =wedge_timeout
S:--random-seed =seed
S:--fastapi-root-path =root_path
V:--disable-uvicorn-access-log =access_log:off
V:--limit-mm-per-prompt S:--limit-mm-data-per-request json | `image` becomes `--max-images-per-request`; no other media
V:--mm-processor-kwargs S:--mm-process-config json | pixels or `size` (of `image`) become `--min-pixels`, `--max-pixels`
V:--media-io-kwargs json | `num_frames` of `video` becomes `--max-video-frames`
V:--speculative-config S:--speculative-algorithm S:--speculative-algo json | `mtp`, `NEXTN` become `--draft mtp`, `ngram` `lookup`
S:--speculative-num-steps S:--speculative-eagle-topk S:--speculative-num-draft-tokens ok:* | the number of draft tokens is adaptive
S:--speculative-draft-model-path no | no draft model is loaded: use --draft lookup or mtp
--trust-remote-code ok | code of a checkpoint is never run
V:--enable-chunked-prefill ok | prefill is always chunked
S:--max-prefill-tokens ok:* | see --max-num-batched-tokens
V:--no-enable-chunked-prefill no | prefill is always chunked: see --max-num-batched-tokens
V:--enable-auto-tool-choice ok | tool calls are always recognised
--tool-call-parser --reasoning-parser ok:* | the checkpoint's template decides
S:--enable-multimodal ok | every model takes images
V:--language-model-only ok | requests without images do not use the tower
--tokenizer-mode V:--config-format ok:auto,hf | only Hugging Face's formats are supported
--model-impl ok:auto,vllm,sglang | each model has one implementation
--kv-cache-dtype ok:auto,bf16,bfloat16 | keys and values have the model's dtype: for more context use --quantization fp8 or --tp
--pipeline-parallel-size -pp S:--pp-size ok:1 | use --tp to split a model over GPUs
--nnodes ok:1 | one host per engine: see docs/scaling.md
--node-rank ok:0 | one host per engine: see docs/scaling.md
V:--master-addr V:--master-port V:--headless S:--dist-init-addr no | one host per engine: see docs/scaling.md
S:--enable-dp-attention no | use --dp: engines behind a proxy
V:--chat-template-content-format ok:auto,openai | templates get lists where requests have lists
V:--max-logprobs ok:0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20 | a token has at most 20 alternatives
V:--scheduling-policy S:--schedule-policy ok:fcfs,lpm,priority | requests run by `priority`, then in order of arrival
V:--mm-encoder-tp-mode ok:data | each GPU of --tp encodes its share
S:--mm-enable-dp-encoder ok | each GPU of --tp encodes its share
V:--distributed-executor-backend ok:mp,uni | see engine.launch.replicas for Ray
V:--cpu-offload-gb ok:0 | weights stay on the GPU: use --quantization fp8 or --tp
V:--api-server-count V:-asc ok:1 | one HTTP process per engine: see --dp
V:--runner V:--task V:--convert ok:* | every model has /v1/embeddings, /rerank and /score
S:--is-embedding ok | every model has /v1/embeddings, /rerank and /score
--attention-backend --mm-attention-backend --sampling-backend S:--moe-runner-backend S:--fp8-gemm-backend ok:* | see --backend
V:--guided-decoding-backend V:--structured-outputs-config S:--grammar-backend ok:* | grammars are compiled by xgrammar
V:--compilation-config ok:* | CUDA graphs are used unless --enforce-eager
S:--cuda-graph-max-bs S:--cuda-graph-bs ok:* | see --max-num-seqs
V:--max-seq-len-to-capture ok:* | graphs do not depend on lengths
V:--async-scheduling ok | steps are always planned ahead
S:--enable-mixed-chunk ok | prefill and decoding always share steps
S:--mamba-scheduler-strategy S:--mamba-full-memory-ratio S:--max-mamba-cache-size V:--mamba-cache-mode ok:* | see --snapshot-share
--disable-custom-all-reduce S:--enable-p2p-check S:--enable-flashinfer-allreduce-fusion ok | --no-symmetric-memory uses NCCL
V:--swap-space ok:* | preempted requests are recomputed
V:--mm-processor-cache-gb V:--mm-processor-cache-type ok:* | see --image-cache-bytes
V:--disable-mm-preprocessor-cache ok | see --image-cache-bytes
V:--skip-mm-profiling ok | see --max-num-encoder-tokens
S:--mm-max-concurrent-calls ok:* | see --max-num-encoder-tokens
S:--disable-fast-image-processor ok | the GPU resizes images
S:--keep-mm-feature-on-device ok | image embeddings stay on the GPU
S:--schedule-conservativeness ok:* | requests that do not fit are preempted
--stream-interval ok:* | each token is sent at once
S:--skip-server-warmup ok | the server warms up before it is ready
V:--disable-log-stats V:--disable-log-requests V:--enable-log-requests S:--log-requests ok | see --access-log
S:--log-requests-level S:--decode-log-interval S:--log-level-http V:--uvicorn-log-level ok:* | see --access-log and --log-level
V:--max-log-len ok:* | prompts are not logged
S:--enable-metrics ok | /metrics is always served
V:--enable-prompt-tokens-details S:--enable-cache-report ok | usage always counts cached tokens
V:--enable-server-load-tracking ok | /load is always served
V:--disable-fastapi-docs ok | /openapi.json and /docs are always served
V:--disable-frontend-multiprocessing ok | HTTP always has its own process
V:--allow-credentials ok | see --allowed-origins
V:--allowed-methods V:--allowed-headers ok:* | see --allowed-origins
V:--response-role ok:* | the role is always `assistant`
V:--tokenizer V:--hf-config-path V:--code-revision V:--tokenizer-revision S:--tokenizer-path no | put all files into one folder: --model
--revision no | pass the folder of `hf download MODEL --revision NAME`
--download-dir no | set HF_HOME, the hub's own variable
V:--hf-token no | set HF_TOKEN, the hub's own variable
--hf-overrides --json-model-override-args V:--rope-scaling V:--rope-theta no | edit config.json in a copy of the folder
V:--override-generation-config no | edit generation_config.json in a copy of the folder
S:--lora-paths =lora_modules | with --enable-lora
S:--max-loras-per-batch =max_loras
S:--max-loaded-loras =max_cpu_loras
V:--fully-sharded-loras ok | --tp shards an adapter like its matrix
V:--lora-dtype ok:auto,bfloat16 | adapters have the model's dtype
S:--lora-backend S:--lora-target-modules ok:* | slots support every linear layer
V:--enable-tower-connector-lora ok | adapters may include the tower
V:--default-mm-loras no | name the adapter as `model`
S:--max-total-tokens no | use --kv-cache-memory-bytes
V:--weight-transfer-config ok:* | see --enable-weight-updates
--enable-sleep-mode --enable-memory-saver no | stop and start the server
--skip-tokenizer-init no | requests may give token ids as `prompt`
V:--max-parallel-loading-workers V:--model-loader-extra-config no | weights are read at the speed of the disk
V:--middleware V:--tool-parser-plugin V:--logits-processors no | put a proxy in front
V:--ssl-ca-certs no | a proxy checks clients' certificates
--kv-transfer-config --disaggregation-mode no | prefill and decoding share the GPU
V:--log-config-file no | logs are lines on stderr: see --log-level
V:--trust-request-chat-template no | start the server with --chat-template
"""


class Flag(NamedTuple):
    """A row of the table; `values` are the words after the colon of its rule."""

    names: dict[str, str]  # with their servers
    rule: str
    values: tuple[str, ...]
    text: str

    @property
    def field(self) -> str:
        """The field of ours of which this is an alias; empty if there is none."""
        return self.rule[1:] if self.rule[0] == "=" else ""


def _flag(line: str) -> Flag:
    row, _, text = line.partition(" | ")
    *names, rule = row.split()
    word, _, values = rule.partition(":")
    return Flag({name[2:] if name[1] == ":" else name: name[0].replace("-", "VS") for name in names}, word, tuple(values.split(",")), text)


FLAGS = tuple(map(_flag, TABLE.strip().splitlines()))
BY_NAME = {name: flag for flag in FLAGS for name in flag.names if not flag.field}
SAME_VALUES = {("dtype", "float"): "float32", ("load_format", "safetensors"): "auto", ("draft", "suffix"): "lookup"}  # aliases of values
ADVICE = {  # for values that our fields do not accept
    "dtype": "float16 overflows in these models: use bfloat16, or float32 on CPUs",
    "quantization": "use fp8, or a checkpoint in float8",
    "draft": "lookup is for answers that repeat their prompt or prediction, mtp for models with such a head",
}


def settle(values: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Remove the values of foreign flags from a parser's result. Return lines about flags without effect, and about errors."""
    notes, problems = [], []
    for name, flag in BY_NAME.items():
        for given in values.pop(name) or ():
            if flag.rule == "json":
                try:
                    values |= read(name, given)
                except ValueError as problem:
                    problems.append(f"{name} {given}: {problem}")
            elif flag.rule == "ok" and (given is None or "*" in flag.values or given in flag.values):
                notes.append(f"{name} has no effect: {flag.text}")
            else:
                problems.append(f"{name}{f' {given}' if flag.rule == 'ok' else ''} is not supported: {flag.text}")
    return notes, problems


def read(name: str, text: str) -> dict[str, Any]:
    """Return our fields and their values for the value of a foreign flag. Raises ValueError."""
    if name in ("--ep-size", "--expert-parallel-size"):
        return {"ep": int(text) > 1}
    if name.startswith("--speculative-algo"):
        return {"draft": _draft_of(text)}
    text = re.sub(r"(\w+)=(\d+)", r'"\1": \2', f"{{{text}}}") if re.fullmatch(r"(\w+=\d+,?)+", text) else text  # `image=4,video=0`
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError("must be JSON, such as '{\"image\": 4}' or '{\"max_pixels\": 1003520}'")
    if name == "--speculative-config":
        return {"draft": _draft_of(str(value.get("method")))} if value.keys() & {"method", "model"} else {}
    if name == "--media-io-kwargs":
        return _numbers(max_video_frames=dict(value.get("video") or {}).get("num_frames"))
    if "limit" in name:
        count = value.get("image")
        return _numbers(max_images_per_request=count.get("count") if isinstance(count, dict) else count)
    value = value.get("image", {}) if "config" in name else value
    if others := value.keys() - {"min_pixels", "max_pixels", "size", "use_fast"}:
        raise ValueError(f"only min_pixels and max_pixels, not {min(others)}: requests have `mm_processor_kwargs`")
    size = dict(value.get("size") or {})
    edges = size.get("shortest_edge"), size.get("longest_edge")
    return _numbers(min_pixels=value.get("min_pixels", edges[0]), max_pixels=value.get("max_pixels", edges[1]))


def _draft_of(method: str) -> str:
    if method.upper() == "NEXTN" or method.endswith("mtp"):
        return "mtp"
    if method.lower() in ("ngram", "suffix"):
        return "lookup"
    raise ValueError("no draft model is loaded: use --draft lookup or mtp")


def _numbers(**values: Any) -> dict[str, int]:
    """Return the values that are given; -1 means our default."""
    if bad := [value for value in values.values() if value is not None and type(value) is not int]:
        raise ValueError(f"{bad[0]} is not a whole number")
    return {name: value for name, value in values.items() if value not in (None, -1)}
