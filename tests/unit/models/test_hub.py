"""A hub that cannot be had is an error in words."""

import httpx
import pytest

from models.config import hub


@pytest.mark.parametrize("failure", [httpx.ConnectError("refused"), httpx.ReadTimeout("slow")])
def test_a_connection_that_breaks_is_a_value_error(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*arguments: object, **options: object) -> str:
        raise failure

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ValueError, match="could not be fetched from the hub"):
        hub._download("Qwen/Qwen3-VL-8B-Instruct", ("*",))
