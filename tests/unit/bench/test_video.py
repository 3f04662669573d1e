"""The video benchmark: its clips and its bound."""

from bench.video import compute_bound, expected, make_clip
from models.scaffold import SHAPES


def test_the_bound_and_the_tokens() -> None:
    assert 20 < compute_bound(SHAPES["8B"], 1, 44 * 80, 880 + 200) < 27
    assert [expected("374", fps)[2] - 60 for fps in (1, 2, 4, 8)] == [2290, 4580, 9160, 13_040]
    assert expected("720p", 2)[2] - 60 == 8880
    assert make_clip(1, "tiny")[4:8] == b"ftyp"
