"""Writes the pages that the code dictates: `python docs/generate.py`. `tests/unit/test_docs.py` compares them with what this returns.

flags.md is `engine/config.py` with a word on when to change what; fields.md is `server/api/schema.py` and `server/api/fields.py`.
"""

import json
import sys
import types
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # a script's own folder stands there otherwise

from engine.config import GIB, MIB, EngineConfig  # noqa: E402
from server.api.fields import HARMLESS, LIMITED, LIMITED_IN_IMAGES  # noqa: E402
from server.api.schema import ChatRequest, CompletionRequest, GenerationRequest  # noqa: E402

OF_THE_MACHINE = {"media_pool_size": "2 to 16, by CPUs", "processing_pool_size": "1 to 16, by CPUs"}  # defaults that no page can name

WHEN = {
    "model": "Always: the default is a toy.",
    "served_model_name": "Clients ask for another name than the checkpoint's, or for several.",
    "chat_template": "The checkpoint's template lacks something, as tools.",
    "device": "`cpu` to leave a GPU alone.",
    "port": "Another service has it.",
    "ssl_certfile": "Where no proxy ends TLS.",
    "ssl_keyfile": "With the above.",
    "root_path": "A proxy serves this under a path of its own and takes that away.",
    "access_log": "Off where the proxy has a log already.",
    "log_level": "`debug` for a report of a bug.",
    "max_queue_seconds": "Where a late answer is worth nothing: others come sooner.",
    "wedge_timeout": "0 to look at a wedge with a debugger.",
    "request_timeout": "Where clients give up without saying so.",
    "num_gpu_blocks_override": "Never, outside of tests.",
    "block_size": "Hardly ever: smaller ones find more of a prefix and cost more of a plan.",
    "jpeg_decoder": "`cpu` if the GPU's decoder is suspected.",
    "media_pool_size": "More where many images are fetched from slow servers.",
    "processing_pool_size": "More where many images are PNGs and cores are free.",
    "body_timeout": "Higher for clients on slow lines.",
    "max_connections": "Higher for many clients that keep idle connections; the limit of open files bounds it, too.",
    "header_timeout": "Lower where clients are not trusted.",
    "idle_timeout": "Longer than that of the proxy in front, or it meets closed connections.",
    "write_timeout": "Higher for clients that pause while they read.",
    "max_image_pixels": "Lower where clients are not trusted: a camera has 40 million.",
    "max_request_pixels": "Lower where clients are not trusted.",
    "max_decode_bytes": "Lower where memory is short: an image takes 8 bytes a pixel; one that takes more than all of it is refused.",
    "decode_timeout": "Higher on slow machines with very large images.",
    "max_request_downloads": "Higher where requests of many addresses come alone.",
    "download_connect_timeout": "Higher for slow servers.",
    "download_timeout": "Higher for slow servers; it is also how long a client can keep one of the 64.",
    "download_pace_bytes": "Lower for slow servers.",
    "max_download_bytes": "Lower where clients are not trusted.",
    "quantization": "`fp8` for speed and half of the memory of the decoder's matrices, where a little rounding is allowed.",
    "dtype": "`float32` only to compare with a reference.",
    "backend": "To compare, or where `auto` chose what is not wanted. See [models and cards](models.md).",
    "tp": "The model does not fit on one GPU, or a single stream must be faster. For throughput of a model that fits, replicas do more.",
    "dp": "More GPUs than the model needs: see [operations](operations.md#several-engines-on-one-host).",
    "ep": "A share of an expert is too narrow: not whole blocks of float8, or slow.",
    "host": "`0.0.0.0` behind a proxy: read [security](security.md) first.",
    "api_key": "Always, where others reach the port. The environment keeps it out of the list of processes.",
    "otlp_traces_endpoint": "`http://collector:4318/v1/traces`, with `pip install -e \".[tracing]\"`.",
    "api_key_file": "A key for each client, so that one can be taken away; keys are read at the start.",
    "metrics_port": "Prometheus shall not have the key, or the proxy shall not pass metrics on.",
    "allowed_hosts": "Browsers of people who may visit other sites reach the port.",
    "allowed_origins": "A web page of yours calls this server from browsers.",
    "max_model_len": "A shorter one refuses long prompts early; the KV pool may cut the default already, and `/v1/models` tells to what.",
    "max_num_seqs": "Lower: fewer streams at once, each faster, and others wait for a first token. Higher: throughput of short texts.",
    "max_num_batched_tokens": "Lower where activations take too much memory.",
    "max_num_mixed_tokens": "Lower to bound the longest stall of a stream further.",
    "mixed_step_tokens": "Lower favours streams, higher first tokens.",
    "max_num_encoder_tokens": "Images of more than 16 megapixels are refused as too large; also the peak memory of the vision tower.",
    "max_queued_requests": "How many wait before others are refused with 503.",
    "prefix_cache": "Off to measure without it.",
    "image_cache_bytes": "More for many images that are asked about again, against KV blocks.",
    "image_host_cache_bytes": "Many long conversations at once, more than the KV pool holds: embeddings come back, not encoded again.",
    "gpu_memory_utilization": "Lower where others use the GPU, too.",
    "gpu_memory": "To plan for a card that is not there, or to leave a part of one alone when steps are sized.",
    "plan": "Before a card is bought or a model is downloaded.",
    "kv_cache_memory_bytes": "To fix the pool whatever is free, as for benchmarks.",
    "enforce_eager": "To look for a bug: every stream becomes slower.",
    "api_arena_bytes": "Bodies are refused with 503 although memory is there.",
    "processor_arena_bytes": "The same, for images that are no baseline JPEGs.",
    "max_body_bytes": "Lower where clients are not trusted with so much.",
    "max_images_per_request": "0 to serve text alone.",
    "allowed_local_media_path": "Clients on the same machine name files below this folder.",
    "allowed_media_domains": "Where clients are not trusted, name the hosts that images may come from, or none that exists.",
    "allow_private_media": "Only where every client is trusted with the server's own network.",
    "symmetric_memory": "Off if GPUs cannot map each other's memory and the start fails.",
    "load_format": "`dummy` for benchmarks: answers mean nothing.",
}


def _kind(annotation: Any) -> str:
    """What may stand behind a flag."""
    kind = get_args(annotation)[0]
    if get_origin(kind) is types.UnionType:
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
    if get_origin(kind) is Literal:
        return " \\| ".join(get_args(kind))
    return {int: "number", float: "number", str: "text", bool: "switch"}[kind]


def _default(name: str, value: object) -> str:
    if name in OF_THE_MACHINE:
        return OF_THE_MACHINE[name]
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and value >= MIB and value % MIB == 0:
        return f"{value // GIB}G" if value % GIB == 0 else f"{value // MIB}M"
    return "" if value is None else str(value)


def flags_page() -> str:
    """docs/flags.md."""
    lines = [
        "# Flags",
        "",
        "Of `python -m engine.serve` and `mini-vlm serve`, which take the model also without its flag. Byte sizes take K, M and G.",
        "A switch is turned off by `no-` before its name. A flag beats the environment (`ENGINE_PORT` is `--port`), which beats a YAML",
        "file of `--config`.",
        "Written by `python docs/generate.py` from `engine/config.py`.",
        "",
        "| flag | value | default | what it is | when to change it |",
        "|---|---|---|---|---|",
    ]
    defaults = {field.name: field.default for field in msgspec.structs.fields(EngineConfig)}
    for name, annotation in get_type_hints(EngineConfig, include_extras=True).items():
        text = get_args(annotation)[1].replace("|", "\\|")
        flag = "--" + name.replace("_", "-")
        lines.append(f"| `{flag}` | {_kind(annotation)} | {_default(name, defaults[name])} | {text} | {WHEN.get(name, '')} |")
    return "\n".join(lines) + "\n"


def _limited(fields: dict[str, tuple[object, ...]]) -> list[str]:
    values = {name: ", ".join(f"`{json.dumps(value)}`" for value in allowed) for name, allowed in fields.items()}
    return [f"| `{name}` | {shown or 'nothing'} |" for name, shown in values.items()]


def fields_page() -> str:
    """docs/fields.md."""
    shared = list(GenerationRequest.model_fields)
    of_chat = [name for name in ChatRequest.model_fields if name not in shared]
    of_text = [name for name in CompletionRequest.model_fields if name not in shared]
    return "\n".join([
        "# Fields of requests",
        "",
        "What each may hold is in `server/api/schema.py`; a bad value is a 400 that names the field. A field that is on no list here is",
        "ignored and named once in the log. Written by `python docs/generate.py`.",
        "",
        "| read | fields |",
        "|---|---|",
        f"| chat and text completions | {', '.join(f'`{name}`' for name in shared)} |",
        f"| chat completions | {', '.join(f'`{name}`' for name in of_chat)} |",
        f"| text completions | {', '.join(f'`{name}`' for name in of_text)} |",
        "",
        "## Known, not implemented",
        "",
        "They would change the answer, so any value but these, and null, is a 400.",
        "",
        "| field | may be |",
        "|---|---|",
        *_limited(LIMITED),
        "",
        "Of an image part, beside its URL:",
        "",
        "| field | may be |",
        "|---|---|",
        *_limited(LIMITED_IN_IMAGES),
        "",
        "## Accepted, without effect",
        "",
        ", ".join(f"`{name}`" for name in sorted(HARMLESS)) + ".",
        "",
    ])  # fmt: skip


PAGES = {"flags.md": flags_page, "fields.md": fields_page}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (ROOT / "docs" / name).write_text(page(), encoding="utf-8")
