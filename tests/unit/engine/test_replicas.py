"""The command line of `engine.launch.replicas`."""

import pytest

pytest.importorskip("ray", reason='pip install -e ".[ray]"')

from engine.launch.replicas import parse


def test_flags_are_its_own_and_the_engines() -> None:
    own, config = parse(["--replicas", "2", "--max-num-seqs", "7", "--port", "8100"])
    assert (own.replicas, own.max_replicas, own.address) == (2, 2, None) and (config.max_num_seqs, config.port) == (7, 8100)


REFUSED = ["--replicas 0", "--replicas 3 --max-replicas 2", "--replicas 1 --dp 2", "--replicas 1 --port 0", ""]


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_does_not_go_together_is_refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(arguments.split())
    assert stopped.value.code == 2 and "--replicas" in capsys.readouterr().err
