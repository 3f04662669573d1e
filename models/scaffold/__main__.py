"""`python -m models.scaffold --shape 8B --out DIR`: write a model folder of a published shape or of a tiny test model."""

import argparse
from pathlib import Path

from models.scaffold import SHAPES, write_model_folder


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m models.scaffold", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; files of the same names are replaced")
    parser.add_argument("--weights", choices=("none", "random"), default="none", help="random: safetensors of seeded normal values")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_model_folder(args.out, SHAPES[args.shape], args.weights, args.seed)
    print(args.out)


if __name__ == "__main__":
    main()
