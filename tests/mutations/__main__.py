"""Report which mutations the tests of their modules find. Takes about half an hour.

usage: python -m tests.mutations [--only TEXT]
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
HANG_S = 1800  # a mutation may make a test wait for ever: that counts as found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run the mutations whose names contain this text")
    arguments = parser.parse_args()
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(Path(folder) / "tree")
        for mutation in MUTATIONS:
            if arguments.only in mutation.name:
                found = is_found(mutation, tree)
                print(f"{'found' if found else 'survives':>9} | {mutation.file} | {mutation.name}", flush=True)
                survivors += [] if found else [mutation.name]
    print(f"{len(survivors)} survived")
    return 1 if survivors else 0


def copy_tree(target: Path) -> Path:
    """Copy every tracked file, so that a mutation never touches the working tree."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target / name)
    return target


def is_found(mutation: Mutation, tree: Path) -> bool:
    file = tree / mutation.file
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        return fails(tree, *mutation.tests)
    finally:
        file.write_text(text, encoding="utf-8")


def fails(tree: Path, *arguments: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    try:
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=HANG_S, check=False)
    except subprocess.TimeoutExpired:
        return True
    assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-2000:]
    return done.returncode == 1


if __name__ == "__main__":
    sys.exit(main())
