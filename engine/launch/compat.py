"""Flags of vLLM and SGLang. `engine/launch/flags.py` accepts them; docs/generate.py lists them."""

import argparse
import json
from collections.abc import Iterable, Iterator
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
--speculative-algorithm --speculative-algo draft
--speculative-draft-model-path --speculative-draft-model draft_model
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
# Names, then keys of their JSON with the fields that these set.
READ = """
--limit-mm-per-prompt --limit-mm-data-per-request | image max_images_per_request image.count max_images_per_request
--mm-processor-kwargs | min_pixels min_pixels max_pixels max_pixels size.shortest_edge min_pixels size.longest_edge max_pixels
--mm-process-config | image.min_pixels min_pixels image.max_pixels max_pixels
--speculative-config | method draft model draft_model
"""
METHODS = {"ngram": "lookup", "suffix": "lookup", "eagle3": "eagle3", "mtp": "mtp", "qwen3_next_mtp": "mtp", "qwen3_5_mtp": "mtp"}


def _rows(table: str) -> Iterator[tuple[list[str], str]]:
    for line in table.strip().splitlines():
        names, _, rest = line.partition(" | ")
        yield names.split(), rest


ALIASES = {name: field for (*names, field), _ in _rows(TRANSLATED) for name in names}
IGNORED = {word.rstrip("="): word.endswith("=") for word in NO_EFFECT.split()}  # whether the flag takes a value
REFUSALS = {name: instead for names, instead in _rows(REFUSED) for name in names}
KEYS = {name: dict(zip(words.split()[::2], words.split()[1::2], strict=True)) for names, words in _rows(READ) for name in names}
NAMES = {*KEYS, *IGNORED, *REFUSALS}


class Ignore(argparse.Action):
    """Note a flag without effect in `unused` of the result."""

    def __call__(self, parser: argparse.ArgumentParser, result: Any, values: Any, option_string: str | None = None) -> None:
        result.unused.add(self.option_strings[0])


class Refuse(argparse.Action):
    """Stop with the nearest equivalent of a flag."""

    def __call__(self, parser: argparse.ArgumentParser, result: Any, values: Any, option_string: str | None = None) -> None:
        parser.error(f"{self.option_strings[0]} is not supported; instead: {REFUSALS[self.option_strings[0]]}")


class ReadKeys(argparse.Action):
    """Set our fields from the keys of a flag's JSON."""

    def __call__(self, parser: argparse.ArgumentParser, result: Any, values: Any, option_string: str | None = None) -> None:
        name = self.option_strings[0]
        try:
            found = dict(_flatten(json.loads(values).items()))
        except (ValueError, AttributeError):
            parser.error(f"{name} {values}: must be a JSON object")
        for key, value in found.items():
            field = KEYS[name].get(key)
            value = METHODS.get(str(value)) if field == "draft" else value
            if field is None:
                result.unused.add(f"{name}.{key}")
            elif value is None or (field not in ("draft", "draft_model") and type(value) is not int):
                parser.error(f"{name} {values}: {key} has no such value")
            else:
                setattr(result, field, value)


def _flatten(items: Iterable[tuple[str, Any]], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in items:
        yield from _flatten(value.items(), f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]


def add_compatible(parser: argparse.ArgumentParser) -> None:
    """Add the flags that have no help text: those above but ALIASES."""
    for name in NAMES:
        action = ReadKeys if name in KEYS else Ignore if name in IGNORED else Refuse
        values: Any = "*" if name in REFUSALS else 0 if IGNORED.get(name) is False else None
        parser.add_argument(name, action=action, nargs=values, dest=argparse.SUPPRESS, help=argparse.SUPPRESS)
