"""Prometheus metrics of the api process: what clients saw, how long each stage took, the scheduler's gauges. Owned by `app.py`."""

from collections.abc import Iterator

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.messages import EngineStats
from server.http.client import Client

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_SECONDS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
PREFIX = "engine_"
GAUGES = frozenset({
    "max_model_len", "num_running", "num_waiting", "num_blocks", "num_free_blocks", "num_pinned_images", "image_cache_bytes",
    "image_cache_budget", "image_host_cache_bytes", "image_host_cache_budget",
})  # fmt: skip


class StatsCollector(Collector):
    """The latest EngineStats at the moment of a scrape: gauges as they are, running totals as counters."""

    def __init__(self, client: Client):
        self._client = client

    def collect(self) -> Iterator[Metric]:
        stats = self._client.stats
        for name, value in msgspec.structs.asdict(stats).items():
            family = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            yield family(PREFIX + name, f"{name.replace('_', ' ')} (engine)", value=value)
        yield GaugeMetricFamily(PREFIX + "prefix_cache_hit_rate", "cached share of prompt tokens", value=_prefix_hit_rate(stats))
        yield GaugeMetricFamily(PREFIX + "image_cache_hit_rate", "share of images not encoded again", value=_image_hit_rate(stats))
        yield GaugeMetricFamily(PREFIX + "open_streams", "requests that a client waits for", value=self._client.num_streams)


def _prefix_hit_rate(stats: EngineStats) -> float:
    return stats.cached_prompt_tokens / max(1, stats.prompt_tokens)


def _image_hit_rate(stats: EngineStats) -> float:
    spared = stats.images_hit + stats.images_skipped + stats.images_restored
    return spared / max(1, spared + stats.images_encoded)


class Metrics:
    """Counters and histograms of finished requests. `prompt_tokens` and `generated_tokens` as totals come from the scheduler."""

    def __init__(self, client: Client):
        self._registry = CollectorRegistry()
        self._registry.register(StatsCollector(client))
        self._responses = Counter(PREFIX + "responses", "chat responses by HTTP status", ["status"], registry=self._registry)
        self._finished = Counter(PREFIX + "finished_requests", "accepted requests by how they ended", ["reason"], registry=self._registry)
        self._stage = Histogram(
            PREFIX + "stage_seconds", "critical path until the first text", ["stage"], buckets=SECONDS, registry=self._registry
        )
        self._first_token = Histogram(
            PREFIX + "time_to_first_token_seconds", "last byte of the body to first text", buckets=SECONDS, registry=self._registry
        )
        self._inter_token = Histogram(
            PREFIX + "inter_token_seconds", "between two tokens of a request", buckets=TOKEN_SECONDS, registry=self._registry
        )
        self._request = Histogram(
            PREFIX + "request_seconds", "last byte of the body to the end of the answer", buckets=SECONDS, registry=self._registry
        )

    def note_response(self, status: int) -> None:
        self._responses.labels(str(status)).inc()

    def note_finish(self, reason: str, seconds: float) -> None:
        self._finished.labels(reason).inc()
        self._request.observe(seconds)

    def note_first_token(self, seconds: float, stages: dict[str, float]) -> None:
        self._first_token.observe(seconds)
        for name, value in stages.items():
            self._stage.labels(name).observe(value)

    def note_tokens(self, num_tokens: int, seconds: float) -> None:
        """`num_tokens` came `seconds` after the ones before."""
        for _ in range(num_tokens):
            self._inter_token.observe(seconds / num_tokens)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)
