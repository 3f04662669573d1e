"""Write the tables of README.md and docs/benchmarks.md from `bench/results`. Needs a clone: wheels contain no results.

    python -m bench tables

`bench/results/GPU/MODEL.json` holds the current runs of one model on one kind of machine: name of the run -> its results (a
list if there were several). The names and their commands are in docs/benchmarks.md.
"""

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.bounds import Model, bound_of, checked, first_token_ms
from bench.flags import make_parser
from bench.report import table, write_json

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results"
PAGES = ("README.md", "docs/benchmarks.md")
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

PROBES = ("probe", "probe32", "probe2k")
GPUS = {"h200": "1 x H200", "h200-x2": "2 x H200", "h200-x4": "4 x H200", "h100": "1 x H100"}
LOADS = (  # label, run, figure; the first four have bounds and are in all tables
    ("32 clients with one 720p image, requests/s", "image", "requests_per_s"),
    ("16 clients with four 720p images, requests/s", "images4", "requests_per_s"),
    ("64 text streams, tokens/s", "text", "output_tokens_per_s"),
    ("one stream, ms per token", "one", "tpot_ms"),
    ("32 clients with one 720p image, ms to first token", "image", "ttft_ms"),
    ("32 clients with one 720p image, ms per token", "image", "tpot_ms"),
    ("16 clients with four 720p images, ms to first token", "images4", "ttft_ms"),
    ("64 text streams, ms per token", "text", "tpot_ms"),
)
NUM_BOUNDED = 4
COUNTS = (1, 8, 32)

Run = dict[str, Any]


def content(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def runs(name: str, run: str) -> list[Run]:
    """Return the runs of this name in a file: none, one, or one per concurrent client."""
    found = content(name).get(run, [])
    return found if isinstance(found, list) else [found]


def served(gpus: Iterable[str] = GPUS) -> list[str]:
    """Return the files with a single stream, rows of a table of sizes, by machine, generation and size."""
    names = [f"{gpu}/{path.stem}" for gpu in gpus for path in (RESULTS / gpu).glob("*.json")]

    def order(name: str) -> tuple[object, ...]:
        gpu, _, model = name.partition("/")
        return [*GPUS].index(gpu), model.startswith("3.5"), int(re.findall(r"(\d+)B", model)[0]), model

    return sorted((name for name in names if "one" in content(name)), key=order)


def figure(value: float | None) -> str:
    """Format with at least three digits: 1.15, 18.5, 248, 1,334."""
    return "-" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def value_of(found: Sequence[Run], name: str) -> float:
    """Return a rate, summed over clients, or the median of their medians in ms."""
    results = [one["result"][name] for one in found]
    return float(sum(results)) if "_per_" in name else statistics.median(float(result["p50"]) for result in results)


def against(model: str, loads: Sequence[tuple[str, str, str]] = LOADS[:NUM_BOUNDED], shown: int = 2) -> str:
    """Return the table of a model on one H200 with bounds and the last `shown` references."""
    theirs = content("references")["models"][model][-shown:]
    origin, found = of_one_commit(f"h200/{model}") if (RESULTS / f"h200/{model}.json").exists() else ("", dict[str, list[Run]]())
    times = cells_of_probe(f"h200/{model}", found)
    rows = []

    def figure_of(other: dict[str, Any], value: float | None, run: str = "") -> str:
        is_unknown = other.get("routing") == "unknown" and value is not None and run != "one"
        return figure(value) + " ?" * is_unknown

    for count, (cell, bound) in times.items():
        figures = [figure_of(other, other["ttft_ms"]["720p"].get(str(count))) for other in theirs]
        rows.append([f"time to first token, {count} x 720p, ms", f"**{cell}**", bound, *figures])
    for label, run, field in loads:
        cell, bound = cell_of_load(f"h200/{model}", found, run, field)
        figures = [figure_of(other, other["loads"].get(run, {}).get(field), run) for other in theirs]
        rows.append([label, f"**{cell}**", bound, *figures])
    header = ["", "this engine", "bound", *(other["name"] for other in theirs)]
    return table(header, rows) + (f"\n\nThis engine: commit {origin}." if origin else "")


def mixtures() -> str:
    """Return the tables of mixtures, all references, their conditions."""
    tables = []
    for model in ("30B-A3B", "3.5-35B-A3B"):
        found = content("references")["models"][model]
        notes = "\n".join(f"* {other['name']}: {other['versions']}; ready after {other['start_s']} s." for other in found)
        tables.append(f"{model} in bfloat16:\n\n{against(model, shown=len(found))}\n\n{notes}")
    references = content("references")
    tables.append(f"Other engines and the independent client: {references['conditions']}; {references['runs']}. ?: routing unknown.")
    return "\n\n".join(tables)


def cells_of_probe(name: str, found: Mapping[str, Sequence[Run]]) -> dict[int, tuple[str, str]]:
    """Return ms to first token and bound by the number of 720p images. A star marks noise: its files are twice as large."""
    model, cells = model_of(name), {}
    points = [(point, run["content"]) for probe in PROBES for run in found.get(probe, ()) for point in run["points"]]
    times = {point["images"]: (float(point["ttft_sent_ms"]), kind) for point, kind in reversed(points) if point["resolution"] == "720p"}
    for count in COUNTS:
        (value, kind), bound = times.get(count, (None, "")), first_token_ms(model, count)
        if value is not None:
            checked(f"{name}, 720p x {count}", value, bound, is_rate=False)
        cells[count] = figure(value) + ("*" if kind == "noise" else ""), figure(bound)
    return cells


def cell_of_load(name: str, found: Mapping[str, Sequence[Run]], run: str, field: str) -> tuple[str, str]:
    """Return a figure and its bound, or ""."""
    value = value_of(found[run], field) if found.get(run) else None
    if (run, field) not in [load[1:] for load in LOADS[:NUM_BOUNDED]]:
        return figure(value), ""
    bound = bound_of(model_of(name), run)
    if value is not None:
        checked(f"{name}, {run}", value, bound, is_rate="_per_" in field)
    return figure(value), figure(bound)


def model_of(name: str) -> Model:
    folder, _, model = name.partition("/")
    return Model.of(model, int(GPUS[folder][0]), folder.partition("-")[0])


def of_one_commit(name: str) -> tuple[str, dict[str, list[Run]]]:
    """Return commit and date of a row's single stream, and the runs at that commit."""
    alone = runs(name, "one")[0]
    cells = (*PROBES, "one", "text", "image", "images4")
    found = {run: [one for one in runs(name, run) if one["commit"] == alone["commit"]] for run in cells}
    return " ".join([alone["commit"], *([alone["date"]] if "date" in alone else [])]), found


def size_row(name: str) -> list[str]:
    """Return the row of one model, with the bound of each cell in brackets."""
    folder, _, model = name.partition("/")
    origin, found = of_one_commit(name)
    loads = [cell_of_load(name, found, run, field) for _, run, field in (LOADS[3], *LOADS[:3])]
    cells = [f"{cell} ({bound})" if cell != "-" else cell for cell, bound in (*cells_of_probe(name, found).values(), *loads)]
    return [model, GPUS[folder], *cells, origin]


def sizes(gpus: Iterable[str]) -> str:
    header = ["model", "GPUs", "720p x 1, ms", "x 8", "x 32", "one stream, ms per token"]
    rates = ["32 x image, requests/s", "16 x four images, requests/s", "64 x text, tokens/s"]
    return table([*header, *rates, "commit"], [size_row(name) for name in served(gpus)])


TABLES: dict[str, Callable[[], str]] = {
    "summary": partial(against, "8B"),
    "loads": partial(against, "8B", sorted(LOADS, key=lambda load: ("image", "images4", "text", "one").index(load[1]))),
    "mixtures": mixtures,
    "sizes": partial(sizes, ("h200", "h200-x2")),
    "older": partial(sizes, ("h200-x4", "h100")),
}


def rendered(page: str, tables: Mapping[str, Callable[[], str]] = TABLES) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    return MARKED.sub(lambda match: f"{match[1]}{tables[match[2]]()}\n{match[3]}", text)


def store(name: str, new: Mapping[str, Run]) -> None:
    """Replace runs in bench/results/NAME.json."""
    path = RESULTS / f"{name}.json"
    old = content(name) if path.exists() else {}
    write_json(path, {**old, **new})


def main() -> None:
    make_parser("tables", __doc__).parse_args()
    for page in PAGES:
        (ROOT / page).write_text(rendered(page), encoding="utf-8")
