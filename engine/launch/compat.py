"""Flags of vLLM and SGLang. docs/generate.py lists them."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

# Names, then our flag.
TRANSLATED = """
--model-path --model
--tensor-parallel-size -tp --tp-size --tp
--data-parallel-size -dp --dp-size --dp
--enable-expert-parallel --ep
-q --quantization
--enable-prefix-caching --prefix-cache
--disable-radix-cache --no-enable-prefix-caching --no-prefix-cache
--context-length --max-model-len
--max-running-requests --max-num-seqs
--chunked-prefill-size --max-num-batched-tokens
--mem-fraction-static --gpu-memory-utilization
--disable-cuda-graph --enforce-eager
--disable-custom-all-reduce --no-symmetric-memory
--watchdog-timeout --wedge-timeout
--random-seed --seed
--fastapi-root-path --root-path
--disable-uvicorn-access-log --no-access-log
--lora-paths --lora-modules
--mamba-ssm-cache-dtype --mamba-ssm-dtype
--max-loras-per-batch --max-loras
--speculative-algorithm --speculative-algo --draft
--speculative-draft-model-path --speculative-draft-model --draft-model
"""
# `=` marks flags that take a value.
NO_EFFECT = """
--api-server-count= --async-scheduling --attention-backend= --block-size= --chat-template-content-format= --compilation-config=
--cuda-graph-max-bs= --decode-log-interval= --disable-log-requests --disable-log-stats --disable-mm-preprocessor-cache
--enable-auto-tool-choice --enable-cache-report --enable-chunked-prefill --enable-log-requests --enable-lora --enable-metrics
--enable-mixed-chunk --enable-multimodal --enable-prompt-tokens-details --enable-request-id-headers
--enable-tokenizer-info-endpoint --fully-sharded-loras --grammar-backend=
--guided-decoding-backend= --is-embedding --keep-mm-feature-on-device --language-model-only
--log-level-http= --log-requests --lora-dtype=
--mamba-cache-mode= --mamba-full-memory-ratio= --mamba-scheduler-strategy= --max-cpu-loras= --max-loaded-loras= --max-logprobs=
--max-prefill-tokens= --media-io-kwargs= --mm-attention-backend= --mm-enable-dp-encoder --mm-encoder-tp-mode= --mm-max-concurrent-calls=
--mm-processor-cache-gb= --mm-processor-cache-type= --model-impl= --moe-runner-backend= --page-size= --reasoning-parser= --runner=
--sampling-backend= --schedule-conservativeness= --schedule-policy= --scheduling-policy= --skip-mm-profiling --skip-server-warmup
--speculative-eagle-topk= --speculative-num-draft-tokens= --speculative-num-steps= --stream-interval= --structured-outputs-config=
--swap-space= --task= --tool-call-parser= --trust-remote-code --uvicorn-log-level=
"""
# Names, then the nearest equivalent.
REFUSED = """
--tokenizer-mode --config-format | convert the checkpoint to Hugging Face's format
--pipeline-parallel-size -pp --pp-size | --tp splits a model over GPUs
--nnodes --node-rank --master-addr --master-port --headless --dist-init-addr | one engine per host: docs/scaling.md
--distributed-executor-backend | engine.launch.replicas runs engines on Ray
--ep-size --expert-parallel-size | --ep places whole experts on GPUs
--cpu-offload-gb | --quantization fp8 or --tp
--no-enable-chunked-prefill | --max-num-batched-tokens
--max-total-tokens --num-gpu-blocks-override | --kv-cache-memory-bytes
--tokenizer --tokenizer-path | put all files into the folder of --model
--revision | pass the folder of `hf download MODEL --revision NAME`
--download-dir --hf-token | set HF_HOME, HF_TOKEN
--hf-overrides --json-model-override-args --rope-scaling --rope-theta | edit config.json in a copy of the folder
--override-generation-config | edit generation_config.json in a copy of the folder
--ssl-certfile --ssl-keyfile | a reverse proxy terminates TLS: SECURITY.md
--enable-sleep-mode --enable-memory-saver | stop and start the server
--enable-per-request-metrics | the field `timings: true` of requests
--logprobs-mode | log-probabilities are those of the raw logits
--reasoning-config | the field `thinking_token_budget` of requests
"""
# Names, then keys of their JSON with the flags that these set.
READ = """
--limit-mm-per-prompt --limit-mm-data-per-request | image --max-images-per-request image.count --max-images-per-request
--mm-processor-kwargs | min_pixels --min-pixels max_pixels --max-pixels size.shortest_edge --min-pixels size.longest_edge --max-pixels
--mm-process-config | image.min_pixels --min-pixels image.max_pixels --max-pixels
--speculative-config | method --draft model --draft-model
"""


class BadFlags(ValueError):
    """Error in the flags, as one line."""


def _rows(table: str) -> Iterator[tuple[list[str], str]]:
    for line in table.strip().splitlines():
        names, _, rest = line.partition(" | ")
        yield names.split(), rest


ALIASES = {name: flag for (*names, flag), _ in _rows(TRANSLATED) for name in names}
IGNORED = {word.rstrip("="): word.endswith("=") for word in NO_EFFECT.split()}  # whether the flag takes a value
REFUSALS = {name: instead for names, instead in _rows(REFUSED) for name in names}
KEYS = {name: dict(zip(words.split()[::2], words.split()[1::2], strict=True)) for names, words in _rows(READ) for name in names}


def translate(argv: Iterable[str]) -> tuple[list[str], set[str]]:
    """Return our flags for a command line, and the names of flags without effect. `--max_num_seqs` is `--max-num-seqs`, `--ep 8` is `--ep`,
    `--name.key 4` is `--name {"key": 4}`. Raises BadFlags."""
    words: list[str] = []
    unused: set[str] = set()
    rest = iter(argv)
    for word in rest:
        name, equals, value = word.partition("=")
        bare, *keys = name.split(".")
        bare = bare.replace("_", "-") if word.startswith("-") else bare
        if bare in REFUSALS:
            raise BadFlags(f"{bare} is not supported; instead: {REFUSALS[bare]}")
        if not equals and (bare in KEYS or IGNORED.get(bare)):
            value = next(rest, "")
        if bare in IGNORED:
            unused.add(bare)
        elif bare in KEYS:
            try:
                found = [(".".join(keys), value)] if keys else list(_members(json.loads(value)))
            except (ValueError, AttributeError):
                raise BadFlags(f"{bare} {value}: must be a JSON object") from None
            for key, inner in found:
                if flag := KEYS[bare].get(key):
                    words.append(f"{flag}={inner}")
                else:
                    unused.add(f"{bare}.{key}")
        elif words[-1:] == ["--ep"] and word.isdigit():
            words[-1] = "--no-ep" if word == "1" else "--ep"
        else:
            words.append(".".join([ALIASES.get(bare, bare), *keys]) + equals + value)
    return words, unused


def _members(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        yield from _members(inner, f"{prefix}{key}.") if isinstance(inner, dict) else [(prefix + key, inner)]
