"""Time each kernel of the model against its bound, to find regressions in a minute of GPU time.

    python -m bench kernels --size 8B --json kernels.json

The bound of a kernel is the larger of its operations and its bytes divided by rates measured on the device just before.
"""

import argparse
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.kernels.text_cases import text_cases
from bench.kernels.timing import Case, Ceilings, seconds_per_call
from bench.kernels.vision_cases import vision_cases
from bench.report import environment, table, write_json
from models.config.huggingface import read_config
from models.config.types import ModelConfig
from models.kernels.make import make_backend
from models.scaffold import SHAPES, write_model_folder


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table."""

    kernel: str
    shape: str
    us: float
    bound_us: float
    tflop_per_s: float
    tb_per_s: float

    def cells(self) -> list[str]:
        return [self.kernel, self.shape, f"{self.us:.1f}", f"{self.bound_us:.1f}", f"{100 * self.bound_us / self.us:.0f} %"]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SHAPES), default="8B")
    parser.add_argument("--backend", choices=("hopper", "portable"), default="hopper")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    return parser.parse_args(argv)


def model_config(size: str) -> ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(Path(folder), SHAPES[size], weights="none", seed=0)
        return read_config(Path(folder))


def measure(case: Case, ceilings: Ceilings) -> Result:
    seconds, bound = seconds_per_call(case.calls), ceilings.bound(case)
    return Result(case.name, case.shape, seconds * 1e6, bound * 1e6, case.flops / seconds / 1e12, case.num_bytes / seconds / 1e12)


@torch.inference_mode()
def main() -> None:
    args = parse_args()
    device = torch.device("cuda")
    config, backend = model_config(args.size), make_backend(args.backend, device)
    backend.load(config.text.heads(1), config.vision_head_dim)
    ceilings = Ceilings.measure(device)
    results = [measure(case, ceilings) for cases in (vision_cases, text_cases) for case in cases(config, backend)]
    print(f"this device: {ceilings.flops_per_s / 1e12:.0f} TFLOP/s in bfloat16, {ceilings.bytes_per_s / 1e12:.2f} TB/s")
    print(table(["kernel", "shape", "us", "bound us", "of bound"], [result.cells() for result in results]))
    if args.json:
        command = ["python", "-m", "bench.kernels", *sys.argv[1:]]
        described = {"environment": environment(command), "model": args.size, "backend": args.backend}
        write_json(args.json, described | {"kernels": [asdict(result) for result in results]})


if __name__ == "__main__":
    main()
