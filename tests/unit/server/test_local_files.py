"""Files below a folder, and nothing else, even if folders are exchanged meanwhile."""

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from server.errors import RequestError
from server.processor.fetch import Fetcher, Outside, open_within


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a file, and a secret next to it."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/file").write_bytes(b"secret")
    folder = tmp_path / "root"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub/file").write_bytes(b"inside")
    return folder


def read(root: Path, path: str) -> bytes:
    with open(open_within(root, root / path), "rb") as file:
        return file.read()


def test_only_what_lies_below_is_opened(root: Path) -> None:
    (root / "out").symlink_to("../secret")
    (root / "file").symlink_to("/etc/passwd")
    (root / "process").symlink_to("/proc/self/exe")  # a link that no path explains
    os.mkfifo(root / "fifo")
    assert read(root, "sub/file") == read(root, "./sub//file") == b"inside"
    for path in ("missing", "sub/file/x"):
        with pytest.raises(OSError):
            read(root, path)
    for path in ("..", "../secret/file", "../root-2/file", "sub/../../secret/file", "out/file", "file", "process"):
        with pytest.raises(Outside):
            read(root, path)
    assert read(root, "fifo") == b""


def test_links_that_stay_inside_are_followed(root: Path) -> None:
    (root / "link").symlink_to("sub/file")
    assert read(root, "link") == b"inside"


async def test_a_folder_that_is_exchanged_for_a_link(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if there is a moment between the check of a path and its use. The folder is exchanged before every system call in turn."""
    fetcher = Fetcher(EngineConfig(allowed_local_media_path=str(root)))
    real_open, real_resolve = os.open, Path.resolve
    (root / "link").symlink_to("../secret")
    num_calls = exchanged_at = 0

    def exchange() -> None:
        nonlocal num_calls
        if num_calls == exchanged_at:
            os.rename(root / "sub", root / "kept")
            os.rename(root / "link", root / "sub")
        num_calls += 1

    def open_later(*arguments: Any, **options: Any) -> int:
        exchange()
        return real_open(*arguments, **options)

    def resolve(path: Path) -> Path:
        exchange()
        return real_resolve(path)

    monkeypatch.setattr(os, "open", open_later)
    monkeypatch.setattr(Path, "resolve", resolve)
    found = []
    while exchanged_at <= num_calls:
        num_calls = 0
        with contextlib.suppress(RequestError):
            found.append(fetcher.read_local(f"file://{root}/sub/file"))
        if num_calls > exchanged_at:
            os.rename(root / "sub", root / "link")
            os.rename(root / "kept", root / "sub")
        exchanged_at += 1
    await fetcher.close()
    assert exchanged_at > 3 and found and set(found) == {b"inside"}


async def test_a_name_is_not_cut(root: Path) -> None:
    fetcher = Fetcher(EngineConfig(allowed_local_media_path=str(root)))
    with pytest.raises(RequestError):
        fetcher.read_local(f"file://{root}/sub/file%00.txt")
    await fetcher.close()
