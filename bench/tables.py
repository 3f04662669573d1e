"""Write the tables of README.md and docs/benchmarks.md from `bench/results`. Needs a clone: a wheel does not contain results.

    python -m bench tables                                   # write the tables
    python -m bench tables --add h200/8B 1a2b3c4 out/*.json  # first store new runs, measured at that commit

`bench/results/GPU/MODEL.json` holds the current runs of one model on one kind of machine: name of the run -> its results (a
list where several clients ran concurrently or a run was repeated). The names and their commands are in docs/benchmarks.md.
"""

import argparse
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from bench.report import table, write_json

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results"
PAGES = ("README.md", "docs/benchmarks.md")
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

PROBES = ("probe", "probe32", "probe2k")
PHOTOS = ("720p", "smooth")
GPUS = {"h200": "1 x H200", "h200-x2": "2 x H200", "h200-x4": "4 x H200", "h100": "1 x H100"}
SERVED = (
    *("h200/2B", "h200/4B", "h200/8B", "h200/8B-fp8", "h200/8B-portable", "h200/30B-A3B", "h200/30B-A3B-fp8"),
    *("h200/3.5-27B", "h200/3.5-27B-fp8", "h200/3.5-35B-A3B-fp8"),
    *("h200-x2/8B", "h200-x2/32B", "h200-x2/235B-A22B-fp8", "h200-x2/235B-A22B-fp8-ep"),
    *("h200-x4/8B", "h200-x4/32B", "h200-x4/235B-A22B-fp8", "h100/8B", "h100/8B-portable"),
)

Run = dict[str, Any]


@cache
def content(name: str) -> dict[str, Any]:
    """Return a file of `bench/results`, named without its suffix."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def runs(name: str, run: str) -> list[Run]:
    """Return the runs of this name in a file: none, one, or those of concurrent clients."""
    found = content(name).get(run, [])
    return found if isinstance(found, list) else [found]


def figure(value: float) -> str:
    """Format with at least three digits: 1.15, 18.5, 248, 1,334."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def first_tokens(found: Sequence[Run], clock: str) -> dict[tuple[str, int], tuple[float, str]]:
    """Return milliseconds to the first token by (resolution, number of images), and the kind of image. `clock`: the field of a point."""
    times: dict[tuple[str, int], tuple[float, str]] = {}
    for run in found:
        for point in run["points"]:
            if "error" not in point:
                times.setdefault((point["resolution"], point["images"]), (float(point[clock]), run["content"]))
    return times


def rates(found: Sequence[Run], name: str) -> float:
    """Return a rate, summed over concurrent clients."""
    return sum(float(one["result"][name]) for one in found)


def median(found: Sequence[Run], name: str) -> float:
    """Return a median in milliseconds: the median over the clients' medians."""
    return statistics.median(float(one["result"][name]["p50"]) for one in found)


def summary() -> str:
    """Return the table of 8B on one H200, the bound, and the newest versions of other engines."""
    name = "h200/8B"
    origin, found = of_one_commit(name)
    references = content("references")
    bounds, others = references["bounds"], references["others"][1:]
    times = {count: time for (size, count), (time, kind) in first_tokens(found["probe"], "ttft_sent_ms").items() if (size, kind) == PHOTOS}
    rows = []
    for count in ("1", "8", "32"):
        ours = times.get(int(count))
        rows.append([
            f"time to first token, {count} x 720p, ms", f"**{figure(ours)}**" if ours else "-", bounds["ttft_ms"]["8B"]["720p"][count],
            *(figure(other["ttft_ms"]["720p"][count]) for other in others),
        ])  # fmt: skip
    for label, run, field, bound in (
        ("32 clients with one 720p image, requests/s", "image", "requests_per_s", "30"),
        ("16 clients with four 720p images, requests/s", "images4", "requests_per_s", "9.5"),
        ("64 text streams, tokens/s", "text", "output_tokens_per_s", ""),
        ("one stream, ms per token", "one", "tpot_ms", figure(bounds["token_ms"]["8B"])),
    ):
        value = (rates if "_per_" in field else median)(found[run], field) if found[run] else None
        theirs = [other["loads"].get(run, {}).get(field) for other in others]
        rows.append([label, f"**{figure(value)}**" if value else "-", bound, *(figure(one) if one else "-" for one in theirs)])
    return table(["", "this engine", "bound", *(other["name"] for other in others)], rows) + f"\n\nThis engine: commit {origin}."


def against_others() -> str:
    """Return the time to first token by the rules of the image-limit probe, with published figures and the bound."""
    ours = {key: value for key, (value, _) in first_tokens(runs("h200/8B", "noise") + runs("h200/8B", "noise64"), "ttft_ms").items()}
    columns = sorted(ours, key=lambda key: (("720p", "1080p", "2k").index(key[0]), key[1]))
    references = content("references")
    bound = references["bounds"]["ttft_ms"]["8B"]
    rows = [["**this engine**", *(f"**{ours[key]:.0f}**" for key in columns)]]
    for label, times in [("compute bound", bound), *((other["name"], other["ttft_ms"]) for other in references["others"])]:
        rows.append([label, *(str(times.get(resolution, {}).get(str(count), "-")) for resolution, count in columns)])
    notes = [f"* compute bound: {references['bounds']['how'].partition(';')[0]}."]
    notes += [f"* {other['name']}: {other['versions']}; {other['command']}." for other in references["others"]]
    header = ["TTFT, ms", *(f"{resolution} x {count}" for resolution, count in columns)]
    return table(header, rows) + "\n\n" + "\n".join(notes)


def loads() -> str:
    """Return the table of 8B under load with other engines."""
    others = content("references")["others"][1:]
    shown = (
        ("32 clients, one 720p image, 128 tokens out", "image", ("requests_per_s", "ttft_ms", "tpot_ms")),
        ("64 clients, 256 text tokens in, 256 out", "text", ("output_tokens_per_s", "tpot_ms")),
        ("16 clients, four 720p images, 64 tokens out", "images4", ("requests_per_s", "ttft_ms")),
        ("one stream, 1k context", "one", ("tpot_ms",)),
    )
    units = {"requests_per_s": "requests/s", "output_tokens_per_s": "tokens/s", "ttft_ms": "ms to the first token", "tpot_ms": "ms a token"}
    rows = []
    for label, run, figures in shown:
        ours = [rates(runs("h200/8B", run), name) if "_per_" in name else median(runs("h200/8B", run), name) for name in figures]
        measured = [other["loads"].get(run, {}) for other in others]
        cells = ["; ".join(figure(of_run[name]) for name in figures) if of_run else "-" for of_run in measured]
        rows.append([f"{label}: {', '.join(units[name] for name in figures)}", f"**{'; '.join(map(figure, ours))}**", *cells])
    return table(["load", "this engine", *(other["name"] for other in others)], rows)


def of_one_commit(name: str) -> tuple[str, dict[str, list[Run]]]:
    """Return commit and date of a row's single stream, and the runs measured at that commit."""
    alone = runs(name, "one")[0]
    cells = (*PROBES, "one", "text", "image", "images4")
    found = {run: [one for one in runs(name, run) if one["commit"] == alone["commit"]] for run in cells}
    return " ".join([alone["commit"], *([alone["date"]] if "date" in alone else [])]), found


def size_row(name: str) -> list[str]:
    """Return the row of one model on one machine. Images are smooth JPEGs; a star marks noise, whose files are twice as large."""
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
    token = figure(median(found["one"], "tpot_ms")) + (f" ({of_token / gpus:.2f})" if of_token else "")
    text = f"{rates(found['text'], 'output_tokens_per_s'):,.0f}" if found["text"] else "-"
    image = f"{rates(found['image'], 'requests_per_s'):.1f}" if found["image"] else "-"
    return [model, GPUS[folder], *cells, token, text, image, origin]


def sizes(names: Sequence[str]) -> str:
    header = ["model", "GPUs", "720p x 1, ms", "x 8", "x 32", "one stream, ms per token", "64 x text, tokens/s", "32 x image, requests/s"]
    return table([*header, "commit"], [size_row(name) for name in names])


def four_gpus() -> str:
    """Return the table of configurations of four GPUs for a model that fits on one."""
    ways = {"`--tp 4`": "h200-x4/8B", "`--dp 2 --tp 2`": "h200-x4/8B-dp2-tp2", "`--dp 4`": "h200-x4/8B-dp4"}
    loaded = [runs(name, "images") for name in ways.values()]
    images = [f"{figure(rates(found, 'requests_per_s'))}; {figure(median(found, 'ttft_ms'))}" for found in loaded]
    texts = [f"{rates(runs(name, 'texts'), 'output_tokens_per_s'):,.0f}" for name in ways.values()]
    alone = [figure(median(runs(name, "one"), "tpot_ms")) for name in ("h200-x4/8B", "h200-x2/8B", "h200/8B")]
    rows = [
        ["128 clients with an image: requests/s; ms to the first token", *images],
        ["256 clients with text: tokens/s", *texts],
        ["one stream: ms per token (an engine of that size alone)", *alone],
    ]
    return table(["load", *ways], rows)


def two_engines() -> str:
    """Return the table of `--dp 2` and one engine, with the same number of clients per engine."""
    name = "h200-x2/8B-dp2"
    one, two = rates(runs(name, "images_of_one_engine"), "requests_per_s"), rates(runs(name, "images"), "requests_per_s")
    talks = [
        sum(run["rows"][-1]["requests_per_s"] for run in runs(name, kind)) for kind in ("conversations_of_one_engine", "conversations")
    ]
    rows = [
        ["one image, 32 clients an engine: requests/s", figure(one), figure(two), f"{two / one:.2f} x"],
        ["conversations of six turns, 40 clients an engine: requests/s", *map(figure, talks), f"{talks[1] / talks[0]:.2f} x"],
    ]
    return table(["load", "one engine", "`--dp 2`", "gain"], rows)


def sampling() -> str:
    """Return the cost of request fields with many streams."""
    labels = {"response_format": "a JSON schema", "presence_penalty": "`presence_penalty`"}
    cells: dict[tuple[str, str], list[str]] = {}
    for run in runs("h200/8B", "sampling"):
        fields = next((label for field, label in labels.items() if field in run["settings"]["fields"]), "none")
        cells.setdefault((run["settings"]["concurrency"], fields), []).append(figure(run["result"]["tpot_ms"]["p50"]))
    return table(["streams", "fields", "ms per token, each run"], [[*key, ", ".join(values)] for key, values in cells.items()])


TABLES: dict[str, Callable[[], str]] = {
    "summary": summary,
    "against-others": against_others,
    "loads": loads,
    "sizes": lambda: sizes(SERVED),
    "four-gpus": four_gpus,
    "two-engines": two_engines,
    "sampling": sampling,
}


def rendered(page: str) -> str:
    """Return the page with updated tables."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return MARKED.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", text)


def placeless(run: Run) -> Run:
    """Return the run without its output file and the server's address, which are irrelevant to the measurement."""
    command = re.sub(r" --(json|url) \S+", "", run["environment"]["command"])
    settings = {name: value for name, value in run.get("settings", {}).items() if name not in ("json", "url")}
    return run | {"environment": run["environment"] | {"command": command}} | ({"settings": settings} if settings else {})


def add(name: str, commit: str, files: Sequence[Path]) -> None:
    """Store each file as the run of its stem (`probe.json` is the run "probe"); `images-1.json`, `images-2.json` are one run's clients."""
    new: dict[str, list[Run]] = {}
    for file in sorted(files):
        new.setdefault(re.sub(r"-\d+$", "", file.stem), []).append({"commit": commit, **json.loads(file.read_text(encoding="utf-8"))})
    store(name, new)


def store(name: str, new: Mapping[str, Sequence[Run]]) -> None:
    """Replace runs in bench/results/NAME.json."""
    path = RESULTS / f"{name}.json"
    old = content(name) if path.exists() else {}
    placed = {run: [placeless(one) for one in found] for run, found in new.items()}
    write_json(path, old | {run: found if len(found) > 1 else found[0] for run, found in placed.items()})
    content.cache_clear()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser("bench.tables", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", nargs="+", metavar="ARG", help="GPU/MODEL, the commit, and files of runs to store first")
    args = parser.parse_args()
    if args.add:
        add(args.add[0], args.add[1], [Path(file) for file in args.add[2:]])
    for page in PAGES:
        (ROOT / page).write_text(rendered(page), encoding="utf-8")


if __name__ == "__main__":
    main()
