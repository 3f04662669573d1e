"""Flags of vLLM and SGLang. `engine/launch/flags.py` accepts them; docs/generate.py lists them."""

import json
from collections.abc import Iterator
from typing import Any

# Names, then our field; `field=on` and `field=off` are switches.
TRANSLATED = """
--model-path model
--tensor-parallel-size -tp --tp-size tp
--data-parallel-size -dp --dp-size dp
--enable-expert-parallel ep
-q quantization
--enable-prefix-caching prefix_cache
--disable-radix-cache prefix_cache=off
--context-length max_model_len
--max-running-requests max_num_seqs
--chunked-prefill-size max_num_batched_tokens
--mem-fraction-static gpu_memory_utilization
--disable-cuda-graph enforce_eager=on
--disable-custom-all-reduce symmetric_memory=off
--watchdog-timeout wedge_timeout
--random-seed seed
--fastapi-root-path root_path
--disable-uvicorn-access-log access_log=off
--lora-paths lora_modules
--max-loras-per-batch max_loras
"""
# `=` marks flags that take a value.
NO_EFFECT = """
--api-server-count= --async-scheduling --attention-backend= --block-size= --chat-template-content-format= --compilation-config=
--cuda-graph-max-bs= --decode-log-interval= --disable-log-requests --disable-log-stats --disable-mm-preprocessor-cache
--enable-auto-tool-choice --enable-cache-report --enable-chunked-prefill --enable-log-requests --enable-lora --enable-metrics
--enable-mixed-chunk --enable-multimodal --enable-prompt-tokens-details --enable-request-id-headers
--enable-tokenizer-info-endpoint --fully-sharded-loras --grammar-backend=
--guided-decoding-backend= --is-embedding --keep-mm-feature-on-device --language-model-only --log-level-http= --log-requests --lora-dtype=
--mamba-cache-mode= --mamba-full-memory-ratio= --mamba-scheduler-strategy= --max-cpu-loras= --max-loaded-loras= --max-logprobs=
--max-prefill-tokens= --mm-attention-backend= --mm-enable-dp-encoder --mm-encoder-tp-mode= --mm-max-concurrent-calls=
--mm-processor-cache-gb= --mm-processor-cache-type= --model-impl= --moe-runner-backend= --page-size= --reasoning-parser= --runner=
--sampling-backend= --schedule-conservativeness= --schedule-policy= --scheduling-policy= --skip-mm-profiling --skip-server-warmup
--speculative-eagle-topk= --speculative-num-draft-tokens= --speculative-num-steps= --stream-interval= --structured-outputs-config=
--swap-space= --task= --tool-call-parser= --trust-remote-code --uvicorn-log-level=
"""
# Names, with the values that are accepted without effect; then the nearest equivalent.
REFUSED = """
--tokenizer-mode --config-format =auto =hf | convert the checkpoint to Hugging Face's format
--kv-cache-dtype =auto =bf16 =bfloat16 | --quantization fp8 or --tp leave more memory for the context
--pipeline-parallel-size -pp --pp-size =1 | --tp splits a model over GPUs
--nnodes =1 | one engine per host: docs/scaling.md
--node-rank =0 | one engine per host: docs/scaling.md
--master-addr --master-port --headless --dist-init-addr | one engine per host: docs/scaling.md
--distributed-executor-backend =mp =uni | engine.launch.replicas runs engines on Ray
--cpu-offload-gb =0 | --quantization fp8 or --tp
--speculative-draft-model-path | --draft lookup or mtp
--no-enable-chunked-prefill | --max-num-batched-tokens
--max-total-tokens --num-gpu-blocks-override | --kv-cache-memory-bytes
--tokenizer --tokenizer-path | put all files into the folder of --model
--revision | pass the folder of `hf download MODEL --revision NAME`
--download-dir --hf-token | set HF_HOME, HF_TOKEN
--hf-overrides --json-model-override-args --rope-scaling --rope-theta | edit config.json in a copy of the folder
--override-generation-config | edit generation_config.json in a copy of the folder
--enable-sleep-mode --enable-memory-saver | stop and start the server
--enable-per-request-metrics | the field `timings: true` of requests
--logprobs-mode =raw_logprobs | log-probabilities are those of the raw logits
--reasoning-config | the field `thinking_token_budget` of requests
"""
# Names; keys of their JSON (- for the value itself) and the fields that these set.
READ = """
--ep-size --expert-parallel-size | - ep
--limit-mm-per-prompt --limit-mm-data-per-request | image max_images_per_request image.count max_images_per_request
--mm-processor-kwargs | min_pixels min_pixels max_pixels max_pixels size.shortest_edge min_pixels size.longest_edge max_pixels
--mm-process-config | image.min_pixels min_pixels image.max_pixels max_pixels
--media-io-kwargs | video.num_frames max_video_frames
--speculative-config | method draft
--speculative-algorithm --speculative-algo | - draft
"""


def _rows(table: str) -> Iterator[tuple[list[str], str]]:
    for line in table.strip().splitlines():
        names, _, rest = line.partition(" | ")
        yield names.split(), rest


ALIASES = {name: field for (*names, field), _ in _rows(TRANSLATED) for name in names}
IGNORED = {word.rstrip("="): word.endswith("=") for word in NO_EFFECT.split()}  # whether the flag takes a value
REFUSALS = {
    name: ({word[1:] for word in words if word[0] == "="}, instead) for words, instead in _rows(REFUSED) for name in words if name[0] == "-"
}
KEYS = {name: dict(zip(words.split()[::2], words.split()[1::2], strict=True)) for names, words in _rows(READ) for name in names}
NAMES = {*KEYS, *IGNORED, *REFUSALS}


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix or "-", value


def _convert(field: str, value: Any) -> Any:
    if field == "draft":
        if (word := str(value).lower()).endswith(("mtp", "nextn")):
            return "mtp"
        if word in ("ngram", "suffix"):
            return "lookup"
        raise ValueError("use --draft lookup or mtp")
    if type(value) is not int:
        raise ValueError(f"{value} is not a whole number")
    return value > 1 if field == "ep" else value


def _read(name: str, text: str) -> tuple[dict[str, Any], list[str]]:
    """Return our fields and their values, and the keys without effect. Raises ValueError."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    keys, given = KEYS[name], dict(_flatten(value))
    if "-" in given and "-" not in keys:
        raise ValueError("must be a JSON object, such as '{\"image\": 4}'")
    fields = {keys[key]: _convert(keys[key], one) for key, one in given.items() if key in keys and one not in (-1, None)}  # our defaults
    return fields, [f"{name}.{key}" for key in given.keys() - keys.keys()]


def settle(values: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Replace the values of NAMES, lists by name, by those of our fields. Return what has no effect, and errors."""
    unused, problems = [], []
    for name in sorted(NAMES):
        for given in values.pop(name) or ():
            if name in KEYS:
                try:
                    fields, others = _read(name, given)
                except ValueError as problem:
                    problems.append(f"{name} {given}: {problem}")
                else:
                    values |= fields
                    unused += others
            elif name in IGNORED or str(given) in REFUSALS[name][0]:
                unused.append(name)
            else:
                problems.append(f"{name} is not supported; instead: {REFUSALS[name][1]}")
    return sorted(set(unused)), problems
