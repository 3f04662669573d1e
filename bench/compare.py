"""Our probe results beside published figures of others and the compute bound: the README's table and the plot of the notes.

    python -m bench.compare bench/results/h200/probe.json bench/results/h200/probe-64.json --plot bench/results/h200/compare.png

Times are milliseconds to first token on one H200 with the 8B shape. Conditions differ where the columns say so.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from bench.report import table

COUNTS = (1, 8, 32, 64)


@dataclass(frozen=True)
class Published:
    """Somebody else's figures by (resolution, number of images), and where and how they were measured."""

    name: str
    conditions: str
    ttft_ms: dict[tuple[str, int], float]


def row(resolution: str, *values: float | None) -> dict[tuple[str, int], float]:
    return {(resolution, count): value for count, value in zip(COUNTS, values, strict=False) if value is not None}


PUBLISHED = (
    Published(
        "compute bound",
        "operations of the model at 790 TFLOP/s, what a bf16 matrix product reaches on this GPU",
        row("720p", 27, 197, 996, 2582) | row("1080p", 63, 554, 3396) | row("2k", 123, 1221, 8589),
    ),
    Published(
        "SGLang, published",
        "yhyang201/sgl-bench, April 2026, CUDA-IPC transport, noise JPEGs at quality 85, client's serialisation included",
        row("720p", 63, 374, 1771, 4555) | row("1080p", 120, 1013, 5720) | row("2k", 223, 2453, 15053),
    ),
    Published(
        "SGLang 0.5.15",
        "measured by us, dummy weights, CUDA-IPC, smaller smooth-noise JPEGs, clock after the client's serialisation, best of two",
        row("720p", 83, 390, 1845) | row("1080p", 136, 1061, 7001) | row("2k", 266, 2403),
    ),
    Published(
        "vLLM 0.26",
        "measured by us, same client and kind of machine as the row above",
        row("720p", 168, 910, 3553) | row("1080p", 214, 2076, 10302) | row("2k", 360, 3982),
    ),
)


def load(paths: list[Path]) -> dict[tuple[str, int], float]:
    """Our medians, the client's serialisation included."""
    ours = {}
    for path in paths:
        for point in json.loads(path.read_text())["points"]:
            if "error" not in point:
                ours[point["resolution"], point["images"]] = float(point["ttft_ms"])
    return ours


def markdown(ours: dict[tuple[str, int], float]) -> str:
    """The README's table and the conditions of its rows."""
    columns = sorted(ours, key=lambda key: (("720p", "1080p", "2k").index(key[0]), key[1]))
    header = ["TTFT, ms", *(f"{resolution} x {count}" for resolution, count in columns)]
    rows = [["**this engine**", *(f"**{ours[key]:.0f}**" for key in columns)]]
    rows += [[other.name, *(f"{other.ttft_ms[key]:.0f}" if key in other.ttft_ms else "-" for key in columns)] for other in PUBLISHED]
    notes = "\n".join(f"* {other.name}: {other.conditions}." for other in PUBLISHED)
    return table(header, rows) + "\n\n" + notes


def plot(ours: dict[tuple[str, int], float], path: Path) -> None:
    """Times over the compute bound, one panel a resolution: 1 is the bound."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bound = PUBLISHED[0].ttft_ms
    figure, panels = pyplot.subplots(1, 3, figsize=(11, 3.6), sharey=True)
    for axes, resolution in zip(panels, ("720p", "1080p", "2k"), strict=True):
        for name, series in [("this engine", ours), *((other.name, other.ttft_ms) for other in PUBLISHED[1:])]:
            points = sorted((key[1], series[key] / bound[key]) for key in series if key[0] == resolution and key in bound)
            axes.plot([count for count, _ in points], [ratio for _, ratio in points], "o-" if series is ours else ".--", label=name)
        axes.set(xscale="log", ylim=(1, 6.5), xlabel="images in the request", title=resolution, xticks=COUNTS, xticklabels=COUNTS)
        axes.minorticks_off()
        axes.grid(True, alpha=0.3)
    panels[0].set_ylabel("time to first token / compute bound")
    panels[2].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser("bench.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of bench.probe")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    ours = load(args.results)
    print(markdown(ours))
    if args.plot:
        plot(ours, args.plot)


if __name__ == "__main__":
    main()
