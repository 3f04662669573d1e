"""Writes the generated tables of pages: `python docs/generate.py`. `tests/unit/test_docs.py` checks that they are current.

flags.md has `engine/wire/config.py` with advice on when to change a flag; moving.md has `engine/launch/compat.py`;
fields.md has `engine/wire/params.py`, `server/api/schema/requests.py` and `server/api/schema/validate.py`;
guides/fit.md has the output of `--plan`.
"""

import json
import re
import sys
import tempfile
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the first entry is the script's own folder otherwise

from bench.tables import rendered  # noqa: E402
from engine.launch import compat  # noqa: E402
from engine.launch.flags import GROUPS  # noqa: E402
from engine.wire.config import GIB, MIB, EngineConfig  # noqa: E402
from engine.wire.memory import describe  # noqa: E402
from engine.wire.params import PARAMETERS, Limits  # noqa: E402
from models.config.huggingface import read_config  # noqa: E402
from models.config.types import ModelConfig  # noqa: E402
from models.scaffold.configs import config_files  # noqa: E402
from models.scaffold.shapes import SHAPES  # noqa: E402
from server.api.schema.requests import ChatRequest, CompletionRequest, GenerationRequest  # noqa: E402
from server.api.schema.validate import REFUSED  # noqa: E402

WHEN = {
    "model": "Always: the default is a demo.",
    "served_model_name": "Clients use another name than the checkpoint's, or several names.",
    "chat_template": "The checkpoint's template lacks a feature, such as tools.",
    "device": "`cpu` to leave a GPU unused.",
    "port": "Another service uses it.",
    "root_path": "A proxy serves the API under a path prefix and strips it.",
    "access_log": "Off if the proxy logs requests.",
    "log_level": "`debug` for a bug report.",
    "enable_weight_updates": "A trainer replaces weights: see [weight updates](guides/weight-updates.md).",
    "wedge_timeout": "0 to examine a hang with a debugger.",
    "request_timeout": "Clients give up without closing the connection, or stop reading.",
    "max_connections": "Higher for many idle connections; the limit on open files also bounds it.",
    "idle_timeout": "Longer than the idle timeout of the proxy in front, or the proxy uses closed connections.",
    "max_image_pixels": "Lower if clients are not trusted: a camera has 40 million.",
    "download_timeout": "Higher for slow servers; a client can hold one of the 64 downloads this long.",
    "max_download_bytes": "Lower if clients are not trusted.",
    "quantization": "`fp8` for speed and half the memory of the decoder's matrices, if slight rounding is acceptable.",
    "dtype": "`float32` only to compare with a reference.",
    "backend": "To compare, or if `auto` chose the wrong one. See [models and cards](models.md).",
    "tp": "The model does not fit on one GPU, or one stream must be faster. For throughput of a model that fits, replicas are better.",
    "dp": "There are more GPUs than the model needs: see [replicas](guides/replicas.md#several-engines-on-one-host).",
    "ep": "The share of an expert would be too narrow: not whole float8 blocks, or slow.",
    "seed": "Runs must be repeatable although requests have no seeds.",
    "generation_config": "Scores are to be compared with those of vLLM with the same flag.",
    "min_pixels": "Small images are read badly.",
    "max_pixels": "Lower: fewer tokens for each large image.",
    "host": "`0.0.0.0` behind a proxy: read [security](security.md) first.",
    "api_key": "Always if others reach the port. The environment keeps it out of process lists.",
    "otlp_traces_endpoint": '`http://collector:4318/v1/traces`, with `pip install -e ".[tracing]"`.',
    "api_key_file": "A key per client, so that one can be revoked; the file is read at the start.",
    "allowed_hosts": "Browsers that also visit other sites reach the port.",
    "allowed_origins": "Your own web page calls this server from browsers.",
    "max_model_len": "Lower to refuse long prompts early. The KV pool may already cut the default; `/v1/models` shows the result.",
    "max_num_seqs": "Lower: fewer and faster streams, longer waits. Higher: throughput of short texts.",
    "max_num_batched_tokens": "Lower if activations take too much memory.",
    "max_num_mixed_tokens": "Lower to shorten the longest stall of a stream.",
    "max_num_encoder_tokens": "Higher for images of more than 16 megapixels; also sets the peak memory of the vision tower.",
    "max_queued_requests": "Lower to refuse early, higher to queue more.",
    "lora_modules": "To serve [LoRA adapters](guides/lora.md).",
    "lora_root": "Adapters are loaded while the server runs.",
    "max_loras": "Higher if requests wait for adapters; slots take memory: see `--plan`.",
    "max_lora_rank": "Lower if all adapters have smaller ranks: slots take less memory.",
    "prefix_cache": "Off to measure without it.",
    "kv_cache_dtype": "For long contexts or many streams. See [quantization](guides/quantization.md#kv-cache-in-float8).",
    "mamba_ssm_dtype": "For many streams of a hybrid. See [models](models.md#snapshots-of-states).",
    "draft": "For few streams: `lookup` if answers repeat the prompt or themselves; `mtp` if the model has a head for it."
    " See [speculative decoding](guides/speculative.md).",
    "image_cache_bytes": "Higher if images are often reused; it competes with KV blocks.",
    "gpu_memory_utilization": "Lower if other programs use the GPU.",
    "gpu_memory": "To plan for another card, or to use only a part of one.",
    "plan": "Before you buy a card or download a model.",
    "kv_cache_memory_bytes": "To fix the pool's size, for example for benchmarks.",
    "enforce_eager": "To find a bug: every stream becomes slower.",
    "api_arena_bytes": "Bodies are refused with 503 although memory is free.",
    "processor_arena_bytes": "The same, for images other than baseline JPEGs.",
    "max_body_bytes": "Lower if clients are not trusted.",
    "max_images_per_request": "0 to serve only text.",
    "allowed_local_media_path": "Clients on the same machine send paths of files below this folder.",
    "allowed_media_domains": "If clients are not trusted, list the hosts of their images, or one that does not exist.",
    "allow_private_media": "Only if every client may reach the server's own network.",
    "symmetric_memory": "Off if the start fails because GPUs cannot map each other's memory.",
    "load_format": "`dummy` for benchmarks: answers mean nothing.",
}


def _kind(annotation: Any) -> str:
    """The value that a flag takes."""
    kind = get_args(annotation)[0]
    if get_origin(kind) is types.UnionType:
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
    if get_origin(kind) is Literal:
        return " \\| ".join(get_args(kind))
    return {int: "number", float: "number", str: "text", bool: "switch"}[kind]


def _default(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and value >= MIB and value % MIB == 0:
        return f"{value // GIB}G" if value % GIB == 0 else f"{value // MIB}M"
    return "" if value is None else str(value)


def flags() -> str:
    lines: list[str] = []
    defaults = {field.name: field.default for field in msgspec.structs.fields(EngineConfig)}
    hints = get_type_hints(EngineConfig, include_extras=True)
    for name in EngineConfig.__struct_fields__:
        annotation = hints[name]
        if name in GROUPS:
            head = ["| flag | value | default | meaning | when to change it |", "|---|---|---|---|---|"]
            lines += [*([""] if lines else []), f"## {GROUPS[name].capitalize()}", "", *head]
        text = get_args(annotation)[1].replace("|", "\\|")
        lines.append(f"| `{_flag_of(name)}` | {_kind(annotation)} | {_default(defaults[name])} | {text} | {WHEN.get(name, '')} |")
    return "\n".join(lines)


def _flag_of(field: str) -> str:
    return "--" + field.replace("_", "-")


def _names_of(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) + "."


def translated() -> str:
    rows: dict[str, list[str]] = {}
    for name, flag in compat.ALIASES.items():
        rows.setdefault(f"`{flag}`", []).append(f"`{name}`")
    for name, keys in compat.KEYS.items():
        rows.setdefault(", ".join(f"`{flag} from {key}`" for key, flag in keys.items()), []).append(f"`{name}`")
    return "\n".join(["| flag | here |", "|---|---|", *(f"| {', '.join(names)} | {here} |" for here, names in rows.items())])


def refused() -> str:
    rows: dict[str, list[str]] = {}
    for name, instead in compat.REFUSALS.items():
        rows.setdefault(instead, []).append(f"`{name}`")
    return "\n".join(["| flag | use instead |", "|---|---|", *(f"| {', '.join(names)} | {instead} |" for instead, names in rows.items())])


PLANNED = ("2B", "4B", "8B", "32B", "30B-A3B", "3.5-9B", "3.5-27B", "3.5-35B-A3B")
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def _published(size: str, quantization: dict[str, object] | None) -> ModelConfig:
    """Configuration of a published model, without its tokenizer, which takes long to write."""
    files = config_files(SHAPES[size])
    if quantization is not None:
        files["config.json"]["quantization_config"] = quantization
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_text(json.dumps(content))
        return read_config(Path(folder))


def fit() -> str:
    """Context in thousands of tokens for each usual card, from the output of `--plan`; * marks smaller steps, - what does not fit."""
    rows: dict[str, dict[str, str]] = {}
    for size in PLANNED:
        name = f"Qwen{size}" if size.startswith("3.5") else f"Qwen3-VL-{size}"
        for flag, stored, suffix in (("auto", None, ""), ("fp8", None, ", fp8"), ("auto", AWQ, ", 4 bits")):
            output = describe(EngineConfig(quantization=flag), _published(size, stored), name)
            _, header, *lines = (re.split(r"\s{2,}", line.strip()) for line in output.splitlines())
            cells = [dict(zip(header, line, strict=False)) for line in lines]
            rows[name + suffix] = {cell["GPU"]: _context(cell) for cell in cells}
    cards = list(next(iter(rows.values())))
    head = [f"| model | {' | '.join(f'{card} GiB' for card in cards)} |", "|---|" + "---:|" * len(cards)]
    return "\n".join([*head, *(f"| {name} | {' | '.join(row[card] for card in cards)} |" for name, row in rows.items())])


def _context(cell: dict[str, str]) -> str:
    context = cell["context"].replace(",", "")
    return f"{int(context) // 1000}{'*' * ('smaller steps' in cell)}" if context.isdigit() else "-"


SIGNS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "min_length": "at least", "max_length": "at most"}


def _values(hint: Any) -> str:
    """JSON type and limits."""
    if get_origin(hint) in (Union, types.UnionType):
        return _values(get_args(hint)[0])
    base, limits = get_args(hint) if get_origin(hint) is Annotated else (hint, Limits())
    kind = {int: "integer", float: "number", bool: "true or false", str: "text", list: "list", dict: "object"}[get_origin(base) or base]
    bounds = {name: f"2^{int(bound).bit_length() - 1}" if bound > 1 << 30 else f"{bound:,}" for name, bound in limits.bounds.items()}
    bounds |= {name: f"-2^{int(-bound).bit_length() - 1}" for name, bound in limits.bounds.items() if bound < -1 << 30}
    units = " entries" if "max_length" in bounds else ""
    return ", ".join([kind, *(f"{SIGNS[name]} {bound}{units}" for name, bound in bounds.items())])


def sampling() -> str:
    off = {name: "" if one.default in (None, ()) or name == "seed" else json.dumps(one.default) for name, one in PARAMETERS.items()}
    rows = [f"| `{name}` | {_values(parameter.json)} | {off[name]} |" for name, parameter in PARAMETERS.items()]
    return "\n".join(["| field | values | otherwise |", "|---|---|---|", *rows])


def endpoints() -> str:
    of_all = GenerationRequest.model_fields
    fields = {
        "chat and text completions": [name for name in of_all if name not in PARAMETERS],
        "chat completions": [name for name in ChatRequest.model_fields if name not in of_all],
        "text completions": [name for name in CompletionRequest.model_fields if name not in of_all],
    }
    rows = [f"| {kind} | {', '.join(f'`{name}`' for name in names)} |" for kind, names in fields.items()]
    return "\n".join(["| endpoint | fields |", "|---|---|", *rows])


PAGES = ("docs/flags.md", "docs/fields.md", "docs/moving.md", "docs/guides/fit.md")
TABLES: dict[str, Callable[[], str]] = {
    "flags": flags,
    "translated": translated,
    "no-effect": lambda: _names_of(compat.IGNORED),
    "refused": refused,
    "fit": fit,
    "endpoints": endpoints,
    "sampling": sampling,
    "limited": lambda: _names_of(REFUSED),
}


if __name__ == "__main__":
    for page in PAGES:
        (ROOT / page).write_text(rendered(page, TABLES), encoding="utf-8")
