"""Finds the sizes to which pure prompts are padded, `LONG_PROMPTS` of `models/backends/hopper/tuned.py`, for one size after another.

    python -m bench.kernels.tune_steps 2B 4B 8B

The time of a matrix product grows with the tokens in steps, which depend on all of its sizes and on the kernel that cuBLAS selects:
a longer prompt often takes less time than a shorter one. Times are of a layer's products with their norms, activation and residual.
"""

import argparse
import math

import torch

from bench.kernels.__main__ import model_config
from bench.kernels.text_cases import Call, layer_products
from bench.kernels.timing import seconds_per_call
from models.backends.hopper.tuned import STEP_SIZES
from models.backends.make import make_backend
from models.backends.ops import Ops
from models.config import ModelConfig
from models.scaffold import SHAPES

STEP = 8  # tokens
LAYERS = 3  # one after another, so that no cache holds a layer's matrices
PASSES = 2  # up and down, so that a device that gets slower is no trend; the best counts
WORTH = 0.99  # a size must take less than this part of the next larger one's time
BEYOND = 1.05  # times the longest prompt: what the last one may be padded to


class Layers:
    """The products of some layers with random weights."""

    def __init__(self, config: ModelConfig, ops: Ops, device: torch.device) -> None:
        self._config, self._ops, self._device = config, ops, device
        shapes = self._products(num_tokens=1)
        self._weights = {name: self._normal(LAYERS, rows, width) for name, (rows, width, _) in shapes.items()}

    def seconds(self, num_tokens: int) -> float:
        """Of one layer."""
        products = self._products(num_tokens)
        inputs = {name: self._normal(num_tokens, width) for name, (_, width, _) in products.items()}

        def run() -> None:
            for layer in range(LAYERS):
                for name, (_, _, product) in products.items():
                    product(inputs[name], self._weights[name][layer])

        return seconds_per_call([run]) / LAYERS

    def _products(self, num_tokens: int) -> dict[str, tuple[int, int, Call]]:
        found = layer_products(self._config, self._ops, self._device, num_tokens)
        return {name: product for name, product in found.items() if name != "head"}

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self._device, dtype=torch.bfloat16)


def sizes_that_pay(seconds: dict[int, float]) -> list[int]:
    """Of all sizes, ascending, those that are faster than every larger one, and by enough."""
    found: list[int] = []
    for size in sorted(seconds, reverse=True):
        if not found or seconds[size] < WORTH * seconds[found[0]]:
            found.insert(0, size)
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser("bench.kernels.tune_steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="+", choices=list(SHAPES))
    device = torch.device("cuda")
    for name in parser.parse_args().sizes:
        config, backend = model_config(name), make_backend("hopper", device)
        num_parameters = config.text.layer_parameters
        longest = STEP_SIZES.for_layers(num_parameters, max_tokens=1 << 30).largest_prompt
        layers, seconds = Layers(config, backend.ops, device), dict[int, float]()
        sizes = list(range(STEP_SIZES.largest_chunk + STEP, int(BEYOND * longest), STEP))
        for turn in range(PASSES):
            for size in sizes[:: 1 - 2 * (turn % 2)]:
                seconds[size] = min(seconds.get(size, math.inf), layers.seconds(size))
        found = sizes_that_pay(seconds)
        kept = found[: 1 + next((i for i, size in enumerate(found) if size >= longest), len(found))]
        print(f"{name}: {len(sizes)} sizes, " + ", ".join(f"{size} {seconds[size] * 1e6:.0f}" for size in kept) + " us a layer")
        print(f"    {num_parameters}: ({', '.join(map(str, kept))}),  # {name}", flush=True)


if __name__ == "__main__":
    main()
