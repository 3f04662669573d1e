"""An engine on a machine with a small /dev/shm, whose disk fills while it runs, and on which other users are curious."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.serving import doomed, image_part, picture, role_of

pytestmark = pytest.mark.faults

ALONE = ["unshare", "--map-root-user", "--mount"]  # mounts that only the engine sees
MOUNTS = 'mount -t tmpfs -o size=64k none /dev/shm && mount -t tmpfs -o size=4m none "$0" && export TMPDIR="$0" && exec "$@"'
NOBODY = 65534


def test_little_shared_memory_and_a_disk_that_fills(tiny: Path, tmp_path: Path) -> None:
    """Red if an engine needs /dev/shm, or if a full disk for its sockets and temporary files ends it, makes it refuse
    what it could serve, or keeps it from stopping cleanly."""
    if subprocess.run([*ALONE, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs mounts of its own")
    with doomed(tiny, prefix=[*ALONE, "sh", "-c", MOUNTS, str(tmp_path)]) as engine:
        folder = Path(f"/proc/{engine.process.pid}/root{tmp_path}")
        assert engine.run_dir.is_relative_to(tmp_path) and any(folder.iterdir())
        with pytest.raises(OSError), open(folder / "others", "wb", buffering=0) as others:
            while True:
                others.write(bytes(1 << 16))
        assert os.statvfs(folder).f_bavail == 0
        assert engine.text("Go on") and engine.text([image_part(picture(1, 64, 64))])
        assert engine.chat("Yes or no?", response_format={"type": "json_object"}).status_code == 200
        assert engine.client.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 4}).status_code == 200
        engine.stop()


def test_other_users_see_nothing(tiny: Path) -> None:
    """Red if the run directory, its sockets or a process's memory are open to other users of the machine."""
    with doomed(tiny, "--api-key", "sekret") as engine:
        assert stat.S_IMODE(engine.run_dir.stat().st_mode) == 0o700
        if os.getuid() == 0:
            code = f"import os, sys; os.setgid({NOBODY}); os.setuid({NOBODY}); os.listdir(sys.argv[1])"
            done = subprocess.run([sys.executable, "-c", code, str(engine.run_dir)], capture_output=True, text=True, check=False)
            assert "PermissionError" in done.stderr
        for child in engine.children:
            assert b"sekret" not in Path(f"/proc/{child}/cmdline").read_bytes(), role_of(child)
        assert engine.client.post("/tokenize", json={"prompt": "a"}, headers={"x-api-key": "sekret"}).status_code == 200
        engine.stop()
