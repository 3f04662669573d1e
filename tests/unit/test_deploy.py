"""Container and cluster files: linted, what they name exists, and scripts that orchestrators call do what they say.

No container runtime runs here: `deploy/install.sh` and `deploy/smoke.sh` are the images' steps.
"""

import importlib
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import kubernetes_validate
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from engine.launch.flags import make_parser
from engine.wire.config import VERSION
from engine.wire.messages import ErrorInfo
from engine.wire.stats import EngineStats, Stages
from models.kernels.heads import Heads
from models.kernels.hopper import build, compile
from models.scaffold import SHAPES
from server.api.chat.status import StatusRoutes
from server.api.http.metrics import Metrics
from server.api.http.middleware import OPEN_PATHS
from server.api.http.registry import RequestRegistry

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted(path for path in (DEPLOY / "kubernetes").glob("*.yaml") if path.name != "kustomization.yaml")


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def deployment() -> Any:
    return load(DEPLOY / "kubernetes/deployment.yaml")["spec"]["template"]["spec"]


@pytest.mark.packaging
def test_images_pass_the_linter() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    run = subprocess.run([hadolint, ROOT / "Dockerfile", ROOT / "Dockerfile.cpu"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def images(name: str) -> list[str]:
    return [stage for stage in (ROOT / name).read_text().split("\nFROM ")[1:] if "AS wheel" not in stage.split("\n")[0]]


@pytest.mark.replicas
@pytest.mark.skipif(shutil.which("haproxy") is None, reason="runs haproxy")
def test_the_configuration_of_haproxy_is_good() -> None:
    run = subprocess.run(["haproxy", "-c", "-f", DEPLOY / "haproxy/haproxy.cfg"], capture_output=True, text=True, check=False)
    assert run.returncode == 0 and not re.search("WARNING|ALERT", run.stderr), run.stderr


def test_workflows_pin_actions_by_commit() -> None:
    used = [line for path in (ROOT / ".github/workflows").glob("*.yml") for line in path.read_text().splitlines() if "uses: " in line]
    assert len(used) > 10 and not [line for line in used if not re.search(r"@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)]


@pytest.mark.packaging
def test_manifests_are_valid() -> None:
    for path in MANIFESTS:
        kubernetes_validate.validate(load(path), "1.34", strict=True)


def test_image_and_wheel_have_the_kernels_of_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the kernels of the first start, and of a float8 cache; Qwen3.5 needs those of its tower alone."""
    pytest.importorskip("triton")  # imported with the backend
    from models.kernels.hopper.backend import HopperBackend

    hopper, portable = images("Dockerfile")
    assert "models.kernels.hopper.build" in hopper and "models.kernels.hopper.build" not in portable
    built = {kernel for heads in build.HEADS for kernel in compile.kernels_of(*heads)}
    needed: set[tuple[str, int]] = set()
    monkeypatch.setattr(compile, "load_kernel", lambda *kernel: needed.add(kernel))
    backend = HopperBackend.__new__(HopperBackend)
    for shape in (shape for name, shape in SHAPES.items() if "tiny" not in name):
        heads = Heads(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim)
        HopperBackend.load(backend, heads, shape.vision_hidden // shape.vision_heads)
    assert built == needed
    assert "-runtime-" in portable.split("\n")[0]


def test_manifests_fit_together() -> None:
    listed = load(DEPLOY / "kubernetes/kustomization.yaml")["resources"]
    assert sorted(listed) == [path.name for path in MANIFESTS]
    labels = load(DEPLOY / "kubernetes/deployment.yaml")["spec"]["template"]["metadata"]["labels"]
    service, budget = load(DEPLOY / "kubernetes/service.yaml")["spec"], load(DEPLOY / "kubernetes/pdb.yaml")["spec"]
    assert service["selector"].items() <= labels.items() and budget["selector"]["matchLabels"].items() <= labels.items()
    container = deployment()["containers"][0]
    drain = int(re.findall(r"drain\.py (\d+)", container["lifecycle"]["preStop"]["exec"]["command"][-1])[0])
    assert deployment()["terminationGracePeriodSeconds"] > drain + 15
    assert container["image"].endswith(f":{VERSION}")
    assert deployment()["enableServiceLinks"] is False  # ENGINE_PORT=tcp://... of a Service would be read as a flag


def test_probes_ask_paths_that_need_no_key() -> None:
    """A probe that gets 401 or 404 restarts every pod for ever."""
    container = deployment()["containers"][0]
    paths = {kind: container[kind]["httpGet"]["path"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {"startupProbe": "/health", "readinessProbe": "/health", "livenessProbe": "/health/live"}
    assert set(paths.values()) <= OPEN_PATHS
    routes = {route.path for route in StatusRoutes(cast(Any, None)).routes()}
    assert set(paths.values()) | {"/load", "/metrics"} <= routes


def test_flags_of_the_files_exist() -> None:
    texts = [(ROOT / name).read_text() for name in ("Dockerfile", "Dockerfile.cpu", "compose.yaml")]
    lines = [line for text in texts for line in text.splitlines() if line.strip().startswith(("ENTRYPOINT", "command:"))]
    named = {flag for line in lines for flag in re.findall(r'"(--[\w-]+)"', line)}
    named |= {argument for argument in deployment()["containers"][0]["args"] if argument.startswith("--")}
    assert {"--host", "--device", "--model"} <= named
    assert named <= set(make_parser()._option_string_actions)


def served_metrics() -> set[str]:
    metrics = Metrics(cast(RequestRegistry, SimpleNamespace(stats=EngineStats(), num_streams=0)), "demo", 16)
    metrics.note_response(200)
    metrics.note_refusal(ErrorInfo(503, "", code="overloaded"))
    metrics.note_finish("stop", 1.0)
    metrics.note_first_token(1.0, {"prefill": 0.5})
    metrics.note_work(7, [3], Stages(admitted=1.0, first_token=2.0), 3.0)
    metrics.note_tokens(1, 0.1)
    return {sample.name for family in text_string_to_metric_families(metrics.render().decode()) for sample in family.samples}


def expressions() -> Iterator[str]:
    for panel in json.loads((DEPLOY / "grafana/dashboards/engine.json").read_text())["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for rule in load(DEPLOY / "prometheus/alerts.yml")["groups"][0]["rules"]:
        yield rule["expr"]
    for metric in load(DEPLOY / "kubernetes/hpa.yaml")["spec"]["metrics"]:
        yield metric["pods"]["metric"]["name"]


def test_dashboard_alerts_and_autoscaler_read_what_is_served() -> None:
    """A panel or alert on a renamed metric would be empty without an error."""
    named = {name for expression in expressions() for name in re.findall(r"\b(?:engine_|vllm:)\w+", expression)}
    assert len(named) > 20
    assert not named - served_metrics()


class Answer(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b'{"server_load": 0}')


def exit_codes(port: int) -> list[int]:
    scripts: list[list[object]] = [[DEPLOY / "healthcheck.py"], [DEPLOY / "drain.py", "30"]]
    return [subprocess.run([sys.executable, *map(str, script)], env={"ENGINE_PORT": str(port)}).returncode for script in scripts]


def test_the_health_check_and_the_drain_ask_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert exit_codes(server.server_port) == [0, 0]
        monkeypatch.setattr(Answer, "status", 503)
        assert exit_codes(server.server_port) == [1, 1]
        server.shutdown()
    assert exit_codes(server.server_port) == [1, 1]


def test_the_drain_waits_for_the_last_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    drain = importlib.import_module("deploy.drain")
    slept: list[float] = []
    loads = iter([2, 1, 0, 1, 0, 0])
    monkeypatch.setattr(drain, "time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append))
    monkeypatch.setattr(drain, "open_streams", loads.__next__)
    drain.main(30)
    assert [*loads] == [] and slept == [drain.EVERY_S] * 6
    slept.clear()
    monkeypatch.setattr(drain, "open_streams", lambda: 1)
    drain.main(30)
    assert sum(slept) == 30
