"""Traces, and Prometheus metrics: the scheduler's gauges and totals, and the latencies that clients observe.

Metrics that vLLM has use vLLM's names (`vllm:`); all others begin with `engine_`."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp

from engine.wire.config import VERSION
from engine.wire.messages import ErrorInfo
from engine.wire.stats import METRICS, Gauge, Stages, Total
from server.api.http.registry import RequestRegistry

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_SECONDS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
TOKENS = tuple(float(1 << power) for power in range(19))
LABELS = ("model_name",)
HISTOGRAMS = {  # buckets, and texts by name
    SECONDS: {
        "time_to_first_token_seconds": "from the last byte of the body to the first text",
        "e2e_request_latency_seconds": "from the last byte of the body to the end of the answer",
        "request_queue_time_seconds": "from the complete prompt to the first plan",
        "request_prefill_time_seconds": "from the first plan to the first token",
        "request_decode_time_seconds": "from the first token to the end of the answer",
    },
    TOKEN_SECONDS: {"inter_token_latency_seconds": "between two tokens of a choice"},
    TOKENS: {
        "request_prompt_tokens": "tokens of all prompts of one request",
        "request_generation_tokens": "tokens of all answers of one request",
        "request_max_num_generation_tokens": "tokens of the longest answer of one request",
    },
}
ENDINGS = {"tool_calls": "stop", "disconnect": "abort"}  # finish reasons with another name in vLLM


class Metrics(Collector):
    def __init__(self, requests: RequestRegistry, model_name: str, block_size: int):
        self._requests, self._name, self._block_size = requests, model_name, block_size
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._responses = self._counter("engine_responses", "answers by HTTP status", "status")
        self._refusals = self._counter("engine_refused_requests", "rejected and failed requests by error code", "reason")
        self._finished = self._counter("vllm:request_success", "finished requests by finish reason", "finished_reason")
        self._stage = Histogram(
            "engine_stage_seconds", "time of each stage before the first token, except the queue", [*LABELS, "stage"], buckets=SECONDS,
            registry=self._registry,
        )  # fmt: skip
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self._registry).labels(model_name)
            for buckets, texts in HISTOGRAMS.items()
            for name, text in texts.items()
        }

    def collect(self) -> Iterator[Metric]:
        stats = self._requests.stats
        for field, metric in METRICS.items():
            yield self._family(f"vllm:{metric.vllm}" if metric.vllm else f"engine_{field}", metric, getattr(stats, field))
        num_hits, num_held = stats.images_hit + stats.images_skipped, stats.num_blocks - stats.num_free_blocks
        for name, metric, value in (
            ("vllm:prefix_cache_queries", Total("prompt tokens looked up in the prefix cache"), stats.prompt_tokens),
            ("vllm:mm_cache_queries", Total("images looked up in the caches"), num_hits + stats.images_encoded),
            ("vllm:mm_cache_hits", Total("images found in a cache"), num_hits),
            ("vllm:kv_cache_usage_perc", Gauge("fraction of KV blocks held by requests"), num_held / (stats.num_blocks or 1)),
            ("engine_open_streams", Gauge("choices in progress"), self._requests.num_streams),
        ):
            yield self._family(name, metric, value)
        labels = {"block_size": str(self._block_size), "num_gpu_blocks": str(stats.num_blocks)}
        yield self._family("vllm:cache_config_info", Gauge("settings of the KV cache"), 1, **labels)

    def _family(self, name: str, metric: Total, value: float, **labels: str) -> Metric:
        kind, suffix = ("gauge", "") if isinstance(metric, Gauge) else ("counter", "_total")
        family = Metric(name, metric.text, kind)
        family.add_sample(name + suffix, {"model_name": self._name, **labels}, value)
        return family

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, [*LABELS, label], registry=self._registry)

    def _observe(self, **values: float) -> None:
        for name, value in values.items():
            self._histograms[name].observe(value)

    def note_response(self, status: int) -> None:
        self._responses.labels(self._name, str(status)).inc()

    def note_refusal(self, info: ErrorInfo) -> None:
        self.note_response(info.status)
        self.note_error(info)

    def note_error(self, info: ErrorInfo) -> None:
        self._refusals.labels(self._name, info.code or str(info.status)).inc()

    def note_finish(self, reason: str, seconds: float) -> None:
        self._finished.labels(self._name, ENDINGS.get(reason, reason)).inc()
        self._observe(e2e_request_latency_seconds=seconds)

    def note_work(self, num_prompt: int, lengths: list[int], stages: Stages, now: float) -> None:
        self._observe(
            request_prompt_tokens=num_prompt, request_generation_tokens=sum(lengths), request_max_num_generation_tokens=max(lengths),
            request_prefill_time_seconds=stages.first_token - stages.admitted, request_decode_time_seconds=now - stages.first_token,
        )  # fmt: skip

    def note_first_token(self, seconds: float, stages: dict[str, float]) -> None:
        self._observe(time_to_first_token_seconds=seconds)
        for name, value in stages.items():
            if name == "queue":
                self._observe(request_queue_time_seconds=value)
            else:
                self._stage.labels(self._name, name).observe(value)

    def note_tokens(self, num_tokens: int, seconds: float) -> None:
        for _ in range(num_tokens):
            self._observe(inter_token_latency_seconds=seconds / num_tokens)

    def render(self) -> bytes:
        return generate_latest(self._registry)


def traced(app: ASGIApp, endpoint: str) -> ASGIApp:
    """Return the application with one OpenTelemetry span per request, sent by OTLP over HTTP, and none for single messages, which are
    tokens. Needs the extra `tracing`."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": "mini-vlm-engine", "service.version": VERSION})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    middleware: ASGIApp = OpenTelemetryMiddleware(app, tracer_provider=provider, exclude_spans=["receive", "send"])
    return middleware
