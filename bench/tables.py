"""Write the tables of README.md and docs/benchmarks.md from `bench/results`. Needs a clone: wheels contain no results.

    python -m bench tables                                   # write the tables
    python -m bench tables --add h200/8B 1a2b3c4 out/*.json  # first store new runs, measured at that commit

`bench/results/GPU/MODEL.json` holds the current runs of one model on one kind of machine: name of the run -> its results (a
list where several clients ran concurrently or a run was repeated). The names and their commands are in docs/benchmarks.md.
"""

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.flags import make_parser
from bench.report import table, write_json

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results"
PAGES = ("README.md", "docs/benchmarks.md")
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

PROBES = ("probe", "probe32", "probe2k")
PHOTOS = ("720p", "smooth")
GPUS = {"h200": "1 x H200", "h200-x2": "2 x H200", "h200-x4": "4 x H200", "h100": "1 x H100"}
LOADS = (  # label, run, figure, bound; the first four are in the summary, the first three in all rows
    ("32 clients with one 720p image, requests/s", "image", "requests_per_s", "30"),
    ("16 clients with four 720p images, requests/s", "images4", "requests_per_s", "9.5"),
    ("64 text streams, tokens/s", "text", "output_tokens_per_s", ""),
    ("one stream, ms per token", "one", "tpot_ms", "3.52"),
    ("32 clients with one 720p image, ms to first token", "image", "ttft_ms", ""),
    ("32 clients with one 720p image, ms per token", "image", "tpot_ms", ""),
    ("16 clients with four 720p images, ms to first token", "images4", "ttft_ms", ""),
    ("64 text streams, ms per token", "text", "tpot_ms", ""),
)

Run = dict[str, Any]


def content(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def runs(name: str, run: str) -> list[Run]:
    """Return the runs of this name in a file: none, one, or one per concurrent client."""
    found = content(name).get(run, [])
    return found if isinstance(found, list) else [found]


def served() -> list[str]:
    """Return the files with a single stream, which are rows of the table of sizes, by machine, generation and size."""
    names = [f"{gpu}/{path.stem}" for gpu in GPUS for path in (RESULTS / gpu).glob("*.json")]

    def order(name: str) -> tuple[object, ...]:
        gpu, _, model = name.partition("/")
        return [*GPUS].index(gpu), model.startswith("3.5"), int(re.findall(r"(\d+)B", model)[0]), model

    return sorted((name for name in names if "one" in content(name)), key=order)


def figure(value: float) -> str:
    """Format with at least three digits: 1.15, 18.5, 248, 1,334."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def bold(value: float | None) -> str:
    return "-" if value is None else f"**{figure(value)}**"


def first_tokens(found: Sequence[Run], clock: str) -> dict[tuple[str, int], tuple[float, str]]:
    """Return milliseconds to the first token (`clock`: the field) and the kind of image, by resolution and number of images."""
    points = [(point, run["content"]) for run in found for point in run["points"] if "error" not in point]
    return {(point["resolution"], point["images"]): (float(point[clock]), kind) for point, kind in reversed(points)}  # the first one counts


def value_of(found: Sequence[Run], name: str) -> float:
    """Return a rate, summed over concurrent clients, or the median of their medians in milliseconds."""
    results = [one["result"][name] for one in found]
    return float(sum(results)) if "_per_" in name else statistics.median(float(result["p50"]) for result in results)


def summary() -> str:
    """Return the table of 8B on one H200, the bound, and the newest versions of other engines."""
    origin, found = of_one_commit("h200/8B")
    references = content("references")
    bound, others = references["bounds"]["ttft_ms"]["8B"]["720p"], references["others"][1:]
    times = {count: time for (size, count), (time, kind) in first_tokens(found["probe"], "ttft_sent_ms").items() if (size, kind) == PHOTOS}
    rows = []
    for count in ("1", "8", "32"):
        theirs = [figure(other["ttft_ms"]["720p"][count]) for other in others]
        rows.append([f"time to first token, {count} x 720p, ms", bold(times.get(int(count))), bound[count], *theirs])
    header = ["", "this engine", "bound", *(other["name"] for other in others)]
    return table(header, rows + [load_row(load, found, others) for load in LOADS[:4]]) + f"\n\nThis engine: commit {origin}."


def load_row(load: tuple[str, str, str, str], found: Mapping[str, Sequence[Run]], others: Sequence[Run]) -> list[str]:
    label, run, field, bound = load
    theirs = [other["loads"].get(run, {}).get(field) for other in others]
    return [label, bold(value_of(found[run], field) if found[run] else None), bound, *(figure(one) if one else "-" for one in theirs)]


def loads() -> str:
    others = content("references")["others"][1:]
    found = {run: runs("h200/8B", run) for _, run, _, _ in LOADS}
    rows = [load_row(load, found, others) for load in sorted(LOADS, key=lambda load: list(found).index(load[1]))]
    return table(["load", "this engine", "bound", *(other["name"] for other in others)], rows)


def against_others() -> str:
    """Return the table of the image-limit probe with published figures and the bound."""
    ours = {key: value for key, (value, _) in first_tokens(runs("h200/8B", "noise") + runs("h200/8B", "noise64"), "ttft_ms").items()}
    columns = sorted(ours, key=lambda key: (("720p", "1080p", "2k").index(key[0]), key[1]))
    references = content("references")
    bounds, others = references["bounds"], references["others"]
    rows = [["**this engine**", *(f"**{ours[key]:.0f}**" for key in columns)]]
    for label, times in [("compute bound", bounds["ttft_ms"]["8B"]), *((other["name"], other["ttft_ms"]) for other in others)]:
        rows.append([label, *(str(times.get(resolution, {}).get(str(count), "-")) for resolution, count in columns)])
    notes = [f"* compute bound: {bounds['how'].partition(';')[0]}."]
    notes += [f"* {other['name']}: {other['versions']}; {other['command']}." for other in others]
    header = ["TTFT, ms", *(f"{resolution} x {count}" for resolution, count in columns)]
    return table(header, rows) + "\n\n" + "\n".join(notes)


def of_one_commit(name: str) -> tuple[str, dict[str, list[Run]]]:
    """Return commit and date of a row's single stream, and the runs measured at that commit."""
    alone = runs(name, "one")[0]
    cells = (*PROBES, "one", "text", "image", "images4")
    found = {run: [one for one in runs(name, run) if one["commit"] == alone["commit"]] for run in cells}
    return " ".join([alone["commit"], *([alone["date"]] if "date" in alone else [])]), found


def size_row(name: str) -> list[str]:
    """Return the row of one model. Images are smooth JPEGs; a star marks noise, whose files are twice as large."""
    folder, _, model = name.partition("/")
    bounds, gpus = content("references")["bounds"], int(GPUS[folder][0])
    of_images = {} if folder == "h100" else bounds["ttft_ms"].get(model.removesuffix("-portable"), {}).get("720p", {})
    of_token = None if folder == "h100" else bounds["token_ms"].get(model.removesuffix("-portable"))
    origin, found = of_one_commit(name)
    cells, times = [], first_tokens([run for probe in PROBES for run in found[probe]], "ttft_sent_ms")
    for count in (1, 8, 32):
        value, kind = times.get(("720p", count), (None, ""))
        bound = f" ({of_images[str(count)] / gpus:.0f})" if str(count) in of_images else ""
        cells.append("-" if value is None else figure(value) + ("*" if kind == "noise" else "") + bound)
    token = figure(value_of(found["one"], "tpot_ms")) + (f" ({of_token / gpus:.2f})" if of_token else "")
    rates = [figure(value_of(found[run], name)) if found[run] else "-" for _, run, name, _ in LOADS[:3]]
    return [model, GPUS[folder], *cells, token, *rates, origin]


def sizes() -> str:
    header = ["model", "GPUs", "720p x 1, ms", "x 8", "x 32", "one stream, ms per token"]
    rates = ["32 x image, requests/s", "16 x four images, requests/s", "64 x text, tokens/s"]
    return table([*header, *rates, "commit"], [size_row(name) for name in served()])


TABLES: dict[str, Callable[[], str]] = {each.__name__.replace("_", "-"): each for each in (summary, against_others, loads, sizes)}


def rendered(page: str, tables: Mapping[str, Callable[[], str]] = TABLES) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    return MARKED.sub(lambda match: f"{match[1]}{tables[match[2]]()}\n{match[3]}", text)


def add(name: str, commit: str, files: Sequence[Path]) -> None:
    """Store each file as the run of its stem; `images-1.json`, `images-2.json` are one run's clients."""
    new: dict[str, list[Run]] = {}
    for file in sorted(files):
        new.setdefault(re.sub(r"-\d+$", "", file.stem), []).append({"commit": commit, **json.loads(file.read_text(encoding="utf-8"))})
    store(name, new)


def store(name: str, new: Mapping[str, Sequence[Run]]) -> None:
    """Replace runs in bench/results/NAME.json."""
    path = RESULTS / f"{name}.json"
    old = content(name) if path.exists() else {}
    write_json(path, old | {run: found if len(found) > 1 else found[0] for run, found in new.items()})


def main() -> None:
    parser = make_parser("tables", __doc__)
    parser.add_argument("--add", nargs="+", metavar="ARG", help="GPU/MODEL, the commit, and files of runs to store first")
    args = parser.parse_args()
    if args.add:
        add(args.add[0], args.add[1], [Path(file) for file in args.add[2:]])
    for page in PAGES:
        (ROOT / page).write_text(rendered(page), encoding="utf-8")
