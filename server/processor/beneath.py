"""Opens files below a folder so that no link leads out of it, also while somebody exchanges folders for links. Used by `fetch.py`."""

import ctypes
import errno
import os
import struct

OPENAT2 = 437  # the system call's number, the same on every architecture of Linux; libc has no name for it
NO_MAGICLINKS, BENEATH = 0x02, 0x08
FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO must not block
FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MISSING = (errno.ENOSYS, errno.EPERM)  # an old kernel, or a container that does not know the call

_syscall = ctypes.CDLL(None, use_errno=True).syscall


class Outside(OSError):
    """The path leads out of the folder."""


def open_beneath(root: int, path: str) -> int:
    """A descriptor of the file at `path`, relative to the folder of the descriptor `root`. Outside, or another OSError."""
    how = struct.pack("QQQ", FLAGS, 0, BENEATH | NO_MAGICLINKS)
    descriptor = int(_syscall(OPENAT2, root, os.fsencode(path), how, ctypes.c_size_t(len(how))))
    if descriptor >= 0:
        return descriptor
    problem = ctypes.get_errno()
    if problem in MISSING:
        return open_step_by_step(root, path)
    if problem == errno.EXDEV:
        raise Outside(problem, "it leads out of the folder")
    raise OSError(problem, os.strerror(problem))


def open_step_by_step(root: int, path: str) -> int:
    """The same without the system call: no link is followed at all, and there is no way up."""
    *folders, name = [part for part in path.split("/") if part not in ("", ".")] or ["."]
    if ".." in (*folders, name):
        raise Outside(errno.EXDEV, "it leads out of the folder")
    current = os.dup(root)
    try:
        for folder in folders:
            below = os.open(folder, FOLDER, dir_fd=current)
            os.close(current)
            current = below
        return os.open(name, FLAGS | os.O_NOFOLLOW, dir_fd=current)
    finally:
        os.close(current)
