"""Second composition root: engines as replicas of a Ray Serve deployment behind Serve's HAProxy. Needs `pip install -e ".[ray]"`.

    python -m engine.launch.replicas --replicas 4 [--max-replicas 8] [--address HOST:PORT] [flags of engine.serve]

    HAProxy ──hash of x-session-id──▶ replica: an actor that forwards ──Unix socket──▶ engine.serve, its child

Without `--address` a cluster of this machine is started, and ends with this command; with it replicas are deployed there, or replaced one
after the other, and stay.
"""

import argparse
import logging
import signal
import sys
import threading
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp

from engine.launch.flags import parse_args
from engine.launch.process import ServerProcess
from engine.serve import size_arenas
from engine.wire.arena import memory_limit
from engine.wire.child import raise_file_limit, setup_logging
from engine.wire.config import EngineConfig, set_ray_defaults
from models.kernels.choose import list_gpus
from server.proxy import Forwarder

set_ray_defaults()  # read by Ray when it is imported
import ray  # noqa: E402
from ray import serve  # noqa: E402

logger = logging.getLogger(__name__)

APP = "mini-vlm"
HEALTH_CHECK_S = 1  # interval; a replica is replaced after three consecutive failures
BUSY_SHARE = 0.75  # share of --max-num-seqs: autoscaling target of a replica


@serve.deployment
@serve.ingress()
class Replica:
    """One engine. The actor is its parent; it uses the GPUs assigned by Ray."""

    async def __init__(self, config: EngineConfig, num_neighbours: int):  # type: ignore[misc] # Serve awaits it
        """Return when the engine is ready. Raises ValueError or ChildDied."""
        setup_logging("replica", config.log_level)
        raise_file_limit()
        has_gpu = config.device != "cpu" and bool(list_gpus())
        self._server = ServerProcess(size_arenas(config, memory_limit() // num_neighbours, has_gpu))
        await self._server.start()
        self._forwarder = Forwarder(self._server.path)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return Starlette(routes=[Mount("/", self._forwarder)])

    async def check_health(self) -> None:
        if self._server.death is not None:
            raise RuntimeError(self._server.death)

    async def __del__(self) -> None:
        """Called by Ray Serve when the running requests have ended."""
        await self._server.stop()
        await self._forwarder.session.close()


def application(config: EngineConfig, replicas: int, max_replicas: int) -> serve.Application:
    """`replicas` engines, up to `max_replicas` when those are busy."""
    gpus = max(int(node["Resources"].get("GPU", 0)) for node in ray.nodes())
    has_gpus = config.device != "cpu" and gpus >= config.tp
    options: dict[str, Any] = {
        "ray_actor_options": {"num_gpus": config.tp} if has_gpus else {"num_cpus": 0},
        "max_ongoing_requests": config.max_queued_requests,
        "health_check_period_s": HEALTH_CHECK_S,
        "graceful_shutdown_timeout_s": config.shutdown_timeout,
    }
    if replicas == max_replicas:
        options["num_replicas"] = replicas
    else:
        busy = max(1, int(BUSY_SHARE * config.max_num_seqs))
        options["autoscaling_config"] = {"min_replicas": replicas, "max_replicas": max_replicas, "target_ongoing_requests": busy}
    deployment: Any = Replica
    return deployment.options(**options).bind(config, gpus // config.tp if has_gpus else max_replicas)


def build(args: dict[str, str]) -> serve.Application:
    """For Serve's configuration files (`import_path: engine.launch.replicas:build`). `args`: flags without their dashes."""
    own, config = parse([word for name, value in args.items() for word in (f"--{name}", str(value))])
    return application(config, own.replicas, own.max_replicas)


def parse(argv: list[str] | None = None) -> tuple[argparse.Namespace, EngineConfig]:
    parser = argparse.ArgumentParser("engine.launch.replicas", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, required=True, help="engines")
    parser.add_argument("--max-replicas", type=int, help="maximum number of engines when those are busy; default: no more")
    parser.add_argument("--address", help="address of a running Ray cluster; default: start one here")
    own, rest = parser.parse_known_args(argv)
    config = parse_args(rest)
    own.max_replicas = own.max_replicas or own.replicas
    if own.replicas < 1 or own.max_replicas < own.replicas:
        parser.error("--replicas must be at least 1, and --max-replicas at least that")
    if config.dp != 1 or config.port == 0:
        parser.error("--dp and --port 0 cannot be combined with replicas")
    return own, config


def main(argv: list[str] | None = None) -> int:
    own, config = parse(argv)
    setup_logging("launcher", config.log_level)
    stop = threading.Event()
    ray.init(address=own.address, include_dashboard=None if own.address else False, log_to_driver=own.address is None)
    try:
        if own.address is None:
            serve.start(http_options={"host": config.host, "port": config.port})
        serve.run(application(config, own.replicas, own.max_replicas), name=APP, route_prefix="/")
        if own.address is None:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: stop.set())
            address = ray.get_runtime_context().gcs_address
            print(f"ready: http://{config.host}:{config.port} by {own.replicas} replicas, on the Ray cluster {address}", flush=True)
            stop.wait()
            serve.shutdown()
    except (RuntimeError, ValueError, OSError) as problem:
        logger.error("%s", problem)
        return 1
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
