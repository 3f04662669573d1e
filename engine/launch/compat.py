"""Flags of vLLM and SGLang. `engine/launch/flags.py` accepts them; docs/generate.py lists them."""

import argparse
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
--limit-mm-data-per-request= --limit-mm-per-prompt= --log-level-http= --log-requests --lora-dtype=
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
--speculative-config | --draft lookup, mtp or eagle3, --draft-model
--mm-processor-kwargs --mm-process-config | --min-pixels, --max-pixels
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

def _rows(table: str) -> Iterator[tuple[list[str], str]]:
    for line in table.strip().splitlines():
        names, _, rest = line.partition(" | ")
        yield names.split(), rest


ALIASES = {name: field for (*names, field), _ in _rows(TRANSLATED) for name in names}
IGNORED = {word.rstrip("="): word.endswith("=") for word in NO_EFFECT.split()}  # whether the flag takes a value
REFUSALS = {name: instead for names, instead in _rows(REFUSED) for name in names}
NAMES = {*IGNORED, *REFUSALS}


class Ignore(argparse.Action):
    """Note a flag without effect in `unused` of the result."""

    def __call__(self, parser: argparse.ArgumentParser, result: Any, values: Any, option_string: str | None = None) -> None:
        result.unused.add(self.option_strings[0])


class Refuse(argparse.Action):
    """Stop with the nearest equivalent of a flag."""

    def __call__(self, parser: argparse.ArgumentParser, result: Any, values: Any, option_string: str | None = None) -> None:
        parser.error(f"{self.option_strings[0]} is not supported; instead: {REFUSALS[self.option_strings[0]]}")


def add_compatible(parser: argparse.ArgumentParser) -> None:
    """Add the flags that have no help text: those above but ALIASES."""
    for name in NAMES:
        action = Ignore if name in IGNORED else Refuse
        values: Any = "*" if name in REFUSALS else 0 if IGNORED.get(name) is False else None
        parser.add_argument(name, action=action, nargs=values, dest=argparse.SUPPRESS, help=argparse.SUPPRESS)
