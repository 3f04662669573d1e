"""Tuning of tiles for products of a single token, `GEMV_TILES` of `models/kernels/triton/tuned.py`, for a list of model sizes.

    python -m bench.kernels.tune 2B 4B --tp 1

The products of some layers follow each other in a CUDA graph, as in a decode step, so that each prefetches its weights while the
previous one ends; tiles of one product vary while the others are fixed. The output has a line per product: the rule's tiles and the best
ones, in us per layer.
"""

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bench.kernels.__main__ import model_config
from bench.kernels.timing import L2_BYTES, seconds_per_call
from models.config.types import TextConfig
from models.kernels.triton import gemv
from models.kernels.triton.launch import capability_of, num_multiprocessors
from models.kernels.triton.tuned import GEMV_VALUES, GemvTiles, gemv_tiles
from models.scaffold import SHAPES

GAIN = 0.99  # minimum gain over the rule's tiles


@dataclass(frozen=True, slots=True)
class Product:
    """`num_out` rows of `width` values each; twice as many if `gated`. `normed`: the input is normalised in the same kernel."""

    name: str
    num_out: int
    width: int
    gated: bool = False
    normed: bool = False

    @property
    def is_whole(self) -> bool:
        return self.gated or self.normed

    def run(self, weight: torch.Tensor, norm: tuple[torch.Tensor, float], x: torch.Tensor, out: torch.Tensor) -> None:
        gemv.gemv(x, weight, out, norm if self.normed else None, self.gated, adds=not self.normed)

    def candidates(self) -> Iterator[GemvTiles]:
        whole = 1 << (self.width - 1).bit_length()
        blocks = (whole,) if self.is_whole else sorted({min(whole, size) for size in (1024, 2048, 4096)})
        for block, rows, (warps, programs) in itertools.product(blocks, (1, 2, 4, 8), ((8, 4), (4, 8))):
            if GEMV_VALUES // 8 <= rows * block * (1 + self.gated) <= GEMV_VALUES:
                yield GemvTiles(rows, block, warps, programs)


def products_of(text: TextConfig, tp: int) -> list[Product]:
    """Return the products of one layer in order."""
    hidden, heads = text.hidden_size, text.num_heads * text.head_dim // tp
    kv = max(1, text.num_kv_heads // tp) * text.head_dim
    found = [Product("qkv", heads + 2 * kv, hidden, normed=True), Product("o", hidden, heads)]
    if (delta := text.delta) is not None:  # of most layers
        width = delta.num_value_heads * delta.value_dim // tp
        found = [Product("in_proj", delta.conv_width // tp + width, hidden, normed=True), Product("out_proj", hidden, width)]
    if text.moe is not None:
        return [*found, Product("router", text.moe.num_experts, hidden, normed=True)]
    inner = text.intermediate_size // tp
    return [*found, Product("gate, up", inner, hidden, gated=True, normed=True), Product("down", hidden, inner)]


class Chain:
    """Products of so many layers that their weights exceed all caches."""

    def __init__(self, products: list[Product], device: torch.device) -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.bfloat16, device=device)

        self._products = products
        layer_bytes = sum(2 * product.num_out * (1 + product.gated) * product.width for product in products)
        self.num_layers = max(4, 2 * L2_BYTES // layer_bytes)
        self._weights = [[zeros(p.num_out * (1 + p.gated), p.width) for p in products] for _ in range(self.num_layers)]
        self._vectors = [(zeros(1, p.width), (zeros(p.width), 1e-6), zeros(1, p.num_out)) for p in products]

    def seconds(self, tiles: dict[tuple[int, int, bool], GemvTiles]) -> float:
        """Return the seconds of one layer."""
        gemv.gemv_tiles = lambda num_out, width, gated, *others: (
            tiles.get((num_out, width, gated)) or gemv_tiles(num_out, width, gated, *others)
        )

        def run() -> None:
            for weights in self._weights:
                for product, weight, (x, norm, out) in zip(self._products, weights, self._vectors, strict=True):
                    product.run(weight, norm, x, out)

        return seconds_per_call([run]) / self.num_layers


def tune(name: str, products: list[Product], device: torch.device) -> None:
    chain, found = Chain(products, device), dict[tuple[int, int, bool], GemvTiles]()
    key_of_device = capability_of(device), num_multiprocessors(device)
    for product in products:
        key = product.num_out, product.width, product.gated
        rule = gemv_tiles(*key, product.is_whole, key_of_device)
        before = chain.seconds(found)
        times = {tiles: chain.seconds({**found, key: tiles}) for tiles in product.candidates()}
        best = min(times, key=lambda tiles: times[tiles])
        if times[best] < GAIN * before:
            found[key] = best
        print(f"{name} {product.name} {key}: {rule} {before * 1e6:.1f} us per layer; {best} {times[best] * 1e6:.1f}", flush=True)
    lines = (f"    {key}: GemvTiles({tiles.rows}, {tiles.block}, {tiles.warps}, {tiles.programs})," for key, tiles in found.items())
    print("\n".join(lines), flush=True)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser("bench.kernels.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="+", choices=list(SHAPES))
    parser.add_argument("--tp", type=int, default=1)
    args = parser.parse_args()
    for size in args.sizes:
        tune(size, products_of(model_config(size).text, args.tp), torch.device("cuda"))


if __name__ == "__main__":
    main()
