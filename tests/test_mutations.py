"""The list of mutations is valid. Whether tests find them is what `python -m tests.mutations` reports."""

from pathlib import Path

from tests.mutations import MUTATIONS

ROOT = Path(__file__).parent.parent


def test_every_mutation_can_be_applied() -> None:
    for mutation in MUTATIONS:
        assert (ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.old) == 1, mutation.name
        assert mutation.old != mutation.new and all((ROOT / path).exists() for path in mutation.tests), mutation.name
    assert len(MUTATIONS) >= 25 and len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
