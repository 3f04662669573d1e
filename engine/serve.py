"""The launcher: `python -m engine.serve --model NAME`. Parses flags, makes the arenas, starts the processes and watches them.

Exits 0 after Ctrl-C or SIGTERM, 1 when any process died, 2 for a bad flag or an unavailable model.
"""

import asyncio
import contextlib
import functools
import logging
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import msgspec

from engine.launch.flags import parse_args
from engine.launch.fleet import Fleet
from engine.launch.supervise import ChildDied, Supervisor
from engine.wire.adapters import named_adapters
from engine.wire.arena import create_memfd, memory_limit
from engine.wire.child import Runtime, StopFlag, setup_logging
from engine.wire.config import GIB, MIB, UNIX_HOST, VERSION, EngineConfig
from engine.wire.memory import cuts, describe, fit, read_model
from models.config.hub import DEMO, SIZES, resolve, resolve_eagle3
from models.config.types import ModelConfig
from models.kernels.choose import Gpu, choose, gpu_decodes_jpegs, list_gpus, suit

logger = logging.getLogger(__name__)

INTERRUPTS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(Exception):
    """Ctrl-C or SIGTERM."""


def command() -> int:
    """Run `mini-vlm`: `serve` is `python -m engine.serve`, `plan` its `--plan`, `bench NAME` is `python -m bench NAME`."""
    match sys.argv[1:]:
        case ["serve", *flags]:
            return main(flags)
        case ["plan", *flags]:
            return main(["--plan", *flags])
        case ["bench", *words]:
            sys.argv = ["mini-vlm bench", *words]
            runpy.run_module("bench", run_name="__main__")
            return 0
    write_out(f"mini-vlm serve --help, mini-vlm plan or mini-vlm bench NAME; version {VERSION}")
    return 0 if sys.argv[1:] == ["--version"] else 2


def main(argv: list[str] | None = None) -> int:
    config = parse_args(argv)
    setup_logging("launcher", config.log_level)
    try:
        if config.plan:
            return print_plan(config)
        return serve_one(config) if config.dp == 1 else serve_several(config)
    except (ValueError, OSError) as problem:
        report(config, problem)
        return 2


def print_plan(config: EngineConfig) -> int:
    """Print the plan of the model or of every published size. ValueError or OSError."""
    names = [config.model] if config.model != DEMO else [f"Qwen3-VL-{size}" for size in SIZES]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            model = read_model(config, resolve(name, "dummy", Path(folder)).folder, draft_folder_of(config, Path(folder)))
            write_out(describe(config, model, name) + "\n")
    return 0


def serve_several(config: EngineConfig) -> int:
    gpus = list_gpus() if config.device != "cpu" else []
    share = size_arenas(config, memory_limit() // config.dp, bool(gpus))
    with bind(config.host, config.port) as listener:
        return asyncio.run(Fleet(share, listener).serve(gpus))


def serve_one(config: EngineConfig) -> int:
    started, supervisor = time.monotonic(), _supervise()
    try:
        with contextlib.ExitStack() as listeners:
            is_unix = config.host == UNIX_HOST
            listener = listeners.enter_context(bind_unix(supervisor.run_dir) if is_unix else bind(config.host, config.port))
            runtime = make_runtime(config, supervisor, listener.fileno())
            is_interrupted = StopFlag()  # an exception within a start would leave a child that `stop` does not know
            _on_interrupt(lambda *_: is_interrupted.set())
            start_all(supervisor, runtime)
        _on_interrupt(_interrupt)
        if is_interrupted.is_set():
            return 0
        url = supervisor.wait_ready()
        write_out(url if is_unix else f"ready after {time.monotonic() - started:.1f} s: {url} serves {runtime.model_names[0]}")
        while True:
            supervisor.check(config.wedge_timeout)
    except Interrupted:
        drain(supervisor, config.shutdown_timeout)
        return 0
    except ChildDied as death:
        report(config, death)
        return 1
    finally:
        _on_interrupt(signal.SIG_IGN)
        supervisor.stop()


def _supervise() -> Supervisor:
    """Return a supervisor whose run directory is removed by any signal from the start."""
    signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
    try:
        supervisor = Supervisor()
        _on_interrupt(functools.partial(_leave, supervisor))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)
    return supervisor


def report(config: EngineConfig, problem: Exception) -> None:
    """Log why the engine ends, or print it for the program that started it."""
    if config.host != UNIX_HOST:
        logger.error("%s", problem)
        return
    with contextlib.suppress(OSError):  # the program has ended
        write_out(str(problem))


def drain(supervisor: Supervisor, timeout: float) -> None:
    logger.info("stopping: running requests have %d s to finish; a second signal stops immediately", timeout)
    try:
        _on_interrupt(_interrupt)
        supervisor.drain(timeout)
        _on_interrupt(signal.SIG_IGN)
    except Interrupted:
        logger.info("stopping now")


def bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Return a bound socket, which listens when the api serves. Raises OSError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as problem:
        listener.close()
        raise OSError(f"cannot listen on --host {host} {flag} {port}: {problem.strerror}") from None
    return listener


def bind_unix(run_dir: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(run_dir / "http.sock"))
    return listener


def size_arenas(config: EngineConfig, memory: int, has_gpu: bool) -> EngineConfig:
    """Set the arenas' sizes. Raises ValueError if they exceed half of `memory` bytes."""
    api_bytes = config.api_arena_bytes or min(GIB if has_gpu else 64 * MIB, memory // 16)
    processor_bytes = config.processor_arena_bytes or min(2 * GIB if has_gpu else 192 * MIB, memory // 8)
    total = api_bytes + processor_bytes
    if total > memory // 2:
        there = f"{memory / GIB:.1f} GiB of memory"
        raise ValueError(f"--api-arena-bytes and --processor-arena-bytes take {total / GIB:.1f} GiB: more than half of the {there}")
    return msgspec.structs.replace(config, api_arena_bytes=api_bytes, processor_arena_bytes=processor_bytes)


def make_runtime(config: EngineConfig, supervisor: Supervisor, listener_fd: int) -> Runtime:
    """Find the model and create the arenas. Raises ValueError or OSError."""
    gpus = list_gpus()
    choice = choose(config.backend, config.device, config.tp, config.model == DEMO, gpus)
    if choice.device == "cpu" and config.device == "auto" and config.model != DEMO:
        logger.warning("no GPU found: the model runs on the CPU, slowly")
    config = size_arenas(config, memory_limit(), choice.device == "cuda")
    resolved = resolve(config.model, config.load_format, supervisor.run_dir)
    draft_folder = draft_folder_of(config, supervisor.run_dir)
    model = read_model(config, resolved.folder, draft_folder)
    choice = suit(choice, config.backend, model.text.heads(config.tp), config.dtype)
    if choice.note:
        logger.warning("%s", choice.note)
    limit = model.text.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(f"--max-model-len {config.max_model_len} exceeds the model's {limit}")
    if choice.device == "cuda":
        config = fit_to_card(config, model, gpus[: config.tp])
    names = tuple(name.strip() for name in (config.served_model_name or resolved.name).split(","))
    adapters = named_adapters(config.lora_modules or "", config.max_lora_rank, model, names)
    fds = (create_memfd("api", config.api_arena_bytes or 0), create_memfd("processor", config.processor_arena_bytes or 0))
    return Runtime(
        config=config,
        backend=choice.backend,
        device=choice.device,
        run_dir=str(supervisor.run_dir),
        arena_fds=fds,
        lifeline_fd=supervisor.lifeline_fd,
        listener_fd=listener_fd,
        model_folder=str(resolved.folder),
        model_names=names,
        max_model_len=config.max_model_len or limit,
        gpu_decodes_jpegs=gpu_decodes_jpegs(choice),
        adapters=adapters,
        draft_folder=draft_folder,
    )


def draft_folder_of(config: EngineConfig, cache_dir: Path) -> str:
    """Return the folder of --draft-model, empty without one. ValueError or OSError."""
    return str(resolve_eagle3(config.draft_model, cache_dir)) if config.draft == "eagle3" else ""


def fit_to_card(config: EngineConfig, model: ModelConfig, gpus: Sequence[Gpu]) -> EngineConfig:
    memory = config.gpu_memory or min(gpu.total_memory for gpu in gpus)
    fitted = fit(config, model, memory)
    if smaller := cuts(config, fitted):
        logger.warning("reduced the step sizes so that the model fits in %.1f GiB: %s", memory / GIB, smaller)
    return fitted


def start_all(supervisor: Supervisor, runtime: Runtime) -> None:
    for rank in range(runtime.config.tp):
        supervisor.start(f"worker-{rank}", "engine.worker.main", runtime, str(rank))
    for fd in runtime.arena_fds:  # takes a second, while workers import torch
        os.posix_fallocate(fd, 0, os.fstat(fd).st_size)
    supervisor.start("scheduler", "engine.scheduler.main", runtime)
    supervisor.start("processor", "server.processor.main", runtime)
    supervisor.start("api", "server.api.main", runtime, fds=(runtime.listener_fd,))
    for fd in runtime.arena_fds:
        os.close(fd)


def write_out(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError as problem:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter tries again at its end
        raise OSError(f"cannot write to stdout: {problem.strerror}") from None


def _interrupt(signum: int, frame: FrameType | None) -> None:
    _on_interrupt(signal.SIG_IGN)  # a second Ctrl-C must not end the stop that the first one began
    raise Interrupted


def _leave(supervisor: Supervisor, signum: int, frame: FrameType | None) -> None:
    _on_interrupt(signal.SIG_IGN)
    logger.info("stopping")
    supervisor.stop()
    os._exit(0)  # an exception would wait for the threads of a download


def _on_interrupt(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for number in INTERRUPTS:
        signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
