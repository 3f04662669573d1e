"""Processes of an engine on this machine and their memory."""

from pathlib import Path

MODULES = {
    "server.http.app": "api",
    "server.processor.main": "processor",
    "engine.scheduler.main": "scheduler",
    "engine.worker.main": "worker",
}


def children_of(pid: int) -> list[int]:
    """Return the children of a process, if it still exists."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def roles_of(launcher: int) -> dict[str, int]:
    """Map roles to process ids; of several workers the last one."""
    found = {"launcher": launcher}
    for pid in children_of(launcher):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        module = words[words.index(b"-m") + 1].decode() if b"-m" in words else ""
        found[MODULES.get(module, module)] = pid
    return found


def own_memory(pid: int) -> int:
    """Return the private bytes of a process, without arenas and libraries."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024 if "RssAnon:" in text else 0


def is_running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def memory_mib(launcher: int | None) -> dict[str, int]:
    """Return the private memory of each role in MiB; empty without a process id."""
    return {role: own_memory(pid) >> 20 for role, pid in roles_of(launcher).items()} if launcher else {}
