"""Files below a folder, and nothing else, whatever becomes of the folders meanwhile."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import EngineConfig
from server.errors import RequestError
from server.processor import beneath
from server.processor.beneath import Outside, open_beneath, open_step_by_step
from server.processor.fetch import Fetcher

WAYS = [open_beneath, open_step_by_step]
Open = Callable[[int, str], int]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a file, and a secret beside it."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/file").write_bytes(b"secret")
    folder = tmp_path / "root"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub/file").write_bytes(b"inside")
    return folder


def read(way: Open, root: Path, path: str) -> bytes:
    at = os.open(root, os.O_PATH)
    try:
        descriptor = way(at, path)
        with open(descriptor, "rb") as file:
            return file.read()
    finally:
        os.close(at)


@pytest.mark.parametrize("way", WAYS)
def test_only_what_lies_below_is_opened(root: Path, way: Open) -> None:
    """Red if a path or a link leads out of the folder, or if a FIFO blocks."""
    (root / "out").symlink_to("../secret")
    (root / "file").symlink_to("/etc/passwd")
    (root / "process").symlink_to("/proc/self/exe")  # a link that no path explains
    os.mkfifo(root / "fifo")
    assert read(way, root, "sub/file") == read(way, root, "./sub//file") == b"inside"
    for path in ("../secret/file", "sub/../../secret/file", "out/file", "file", "process", "missing", "sub/file/x"):
        with pytest.raises(OSError):
            read(way, root, path)
    for path in ("..", "../secret/file"):
        with pytest.raises(Outside):
            read(way, root, path)
    assert read(way, root, "fifo") == b""


def test_links_that_stay_inside_are_followed(root: Path) -> None:
    """Red if a collection that is made of links cannot be served, where the kernel can tell."""
    (root / "link").symlink_to("sub/file")
    assert read(open_beneath, root, "link") == b"inside"


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_folder_that_is_exchanged_for_a_link(root: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool) -> None:
    """Red if there is a moment between the check of a path and its use."""
    if not is_known:
        monkeypatch.setattr(beneath, "_syscall", lambda *arguments: (beneath.ctypes.set_errno(beneath.errno.ENOSYS), -1)[1])
    fetcher = Fetcher(EngineConfig(allowed_local_media_path=str(root)))
    stopping = threading.Event()
    (root / "link").symlink_to("../secret")

    def exchange() -> None:
        while not stopping.is_set():
            os.rename(root / "sub", root / "kept")
            os.rename(root / "link", root / "sub")
            os.rename(root / "sub", root / "link")
            os.rename(root / "kept", root / "sub")

    thread = threading.Thread(target=exchange)
    thread.start()
    found, deadline = set(), time.monotonic() + 1.5
    while time.monotonic() < deadline:
        with contextlib.suppress(RequestError):
            found.add(fetcher.read_local(f"file://{root}/sub/file"))
    stopping.set()
    thread.join()
    await fetcher.close()
    assert found == {b"inside"}
