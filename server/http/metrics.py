"""Prometheus metrics: what clients saw, how long each stage took, the scheduler's gauges."""

from collections.abc import Iterator
from typing import get_args, get_type_hints

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.messages import ErrorInfo
from engine.stats import EngineStats, Stages
from server.http.client import Client

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_SECONDS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
PREFIX = "engine_"
TEXTS = {name: text for name, hint in get_type_hints(EngineStats, include_extras=True).items() for text in get_args(hint)[1:]}
GAUGES = frozenset({
    "max_model_len", "num_running", "num_waiting", "num_blocks", "num_free_blocks", "num_pinned_images", "image_cache_bytes",
    "image_cache_budget",
})  # fmt: skip
LABELS = ("model_name",)
TOKENS = tuple(float(1 << power) for power in range(19))
OF_VLLM = "vllm:"
ENDINGS = {"tool_calls": "stop", "disconnect": "abort"}  # where vLLM's names of them are others
DRAFTS = "vllm:spec_decode_num_"


class StatsCollector(Collector):
    """The latest EngineStats, running totals as counters; and what others' routers and dashboards read, by vLLM's names."""

    def __init__(self, client: Client, model_name: str):
        self._client = client
        self._values = (model_name,)

    def collect(self) -> Iterator[Metric]:
        stats = self._client.stats
        spared = stats.images_hit + stats.images_skipped
        kv_usage = 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0
        totals = msgspec.structs.asdict(stats)
        accepted = CounterMetricFamily(
            f"{DRAFTS}accepted_tokens_per_pos", "guessed tokens that are in answers, by their place in a row", labels=[*LABELS, "position"]
        )
        for position, value in enumerate(totals.pop("accepted_by_position")):
            accepted.add_metric((*self._values, str(position)), value)
        yield accepted
        for name, text, value in (
            ("drafts", "rows that were verified with drafts", stats.drafts),
            ("draft_tokens", "guessed tokens that were verified", stats.draft_tokens),
            ("accepted_tokens", "guessed tokens that are in answers", stats.accepted_draft_tokens),
        ):
            yield self._one(CounterMetricFamily(DRAFTS + name, text, labels=LABELS), value)
        for name, value in totals.items():
            family = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            yield self._one(family(PREFIX + name, TEXTS[name], labels=LABELS), value)
        for name, text, value in (
            (PREFIX + "prefix_cache_hit_rate", "cached share of prompt tokens", stats.cached_prompt_tokens / max(1, stats.prompt_tokens)),
            (PREFIX + "image_cache_hit_rate", "share of images not encoded again", spared / max(1, spared + stats.images_encoded)),
            (PREFIX + "kv_cache_usage_ratio", "share of KV blocks that requests hold", kv_usage),
            (PREFIX + "open_streams", "choices that a client waits for", self._client.num_streams),
            ("vllm:num_requests_running", "requests that run", stats.num_running),
            ("vllm:num_requests_waiting", "requests that wait", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "share of KV blocks that requests hold; 1 is all", kv_usage),
            ("vllm:gpu_cache_usage_perc", "share of KV blocks that requests hold, by its older name", kv_usage),
        ):
            yield self._one(GaugeMetricFamily(name, text, labels=LABELS), value)
        for name, text, value in (
            ("prompt_tokens", "tokens of prompts, cached ones included", stats.prompt_tokens),
            ("generation_tokens", "tokens that were generated", stats.generated_tokens),
            ("num_preemptions", "requests that lost their KV blocks to others", stats.preemptions),
            ("prefix_cache_queries", "tokens that were looked for in the prefix cache", stats.prompt_tokens),
            ("prefix_cache_hits", "tokens that were found in the prefix cache", stats.cached_prompt_tokens),
        ):
            yield self._one(CounterMetricFamily(OF_VLLM + name, text, labels=LABELS), value)

    def _one(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric(self._values, value)
        return family


class Renamed(Collector):
    """What one of our metrics counts, under a name of vLLM's too: its series of the labels `chosen`, without them."""

    def __init__(self, metric: Counter | Histogram, name: str, chosen: dict[str, str] | None = None):
        self._metric, self._name, self._chosen = metric, OF_VLLM + name, (chosen or {}).items()

    def collect(self) -> Iterator[Metric]:
        for ours in self._metric.collect():
            theirs = Metric(self._name, ours.documentation, ours.type)
            for sample in ours.samples:
                if self._chosen <= sample.labels.items():
                    labels = dict(sample.labels.items() - self._chosen)
                    theirs.add_sample(self._name + sample.name.removeprefix(ours.name), labels, sample.value)
            yield theirs


class Metrics:
    """Counters and histograms of finished requests."""

    def __init__(self, client: Client, model_name: str):
        self._registry = CollectorRegistry()
        self._registry.register(StatsCollector(client, model_name))
        self._name = model_name
        self._responses = self._counter("responses", "answers by HTTP status", "status")
        self._refusals = self._counter("refused_requests", "requests that got an error, by its code", "reason")
        self._finished = self._counter("finished_requests", "accepted requests by how they ended", "reason")
        self._ended = Counter(
            OF_VLLM + "request_success", "requests by why they ended", [*LABELS, "finished_reason"], registry=self._registry
        )
        stage = self._stage = self._histogram("stage_seconds", "time of each part of the way to the first text", SECONDS, "stage")
        first_token = self._histogram("time_to_first_token_seconds", "time from the last byte of the body to the first text")
        inter_token = self._histogram("inter_token_seconds", "time between two tokens of a choice", TOKEN_SECONDS)
        request = self._histogram("request_seconds", "time from the last byte of the body to the end of the answer")
        self._first_token, self._inter_token = first_token.labels(model_name), inter_token.labels(model_name)
        self._request = request.labels(model_name)
        for metric, name in (
            (first_token, "time_to_first_token_seconds"), (inter_token, "inter_token_latency_seconds"),
            (inter_token, "time_per_output_token_seconds"), (request, "e2e_request_latency_seconds"),
        ):  # fmt: skip
            self._registry.register(Renamed(metric, name))
        self._registry.register(Renamed(stage, "request_queue_time_seconds", {"stage": "queue"}))
        self._work = {
            name: Histogram(f"{OF_VLLM}request_{name}", text, LABELS, buckets=buckets, registry=self._registry).labels(model_name)
            for name, text, buckets in (
                ("prompt_tokens", "length of all prompts of one request, in tokens", TOKENS),
                ("generation_tokens", "length of all answers of one request, in tokens", TOKENS),
                ("max_num_generation_tokens", "length of the longest answer of one request, in tokens", TOKENS),
                ("prefill_time_seconds", "time from the first plan to the first token", SECONDS),
                ("decode_time_seconds", "time from the first token to the end of the answer", SECONDS),
                ("inference_time_seconds", "time from the first plan to the end of the answer", SECONDS),
            )
        }

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(PREFIX + name, text, [*LABELS, label], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS, *labels: str) -> Histogram:
        return Histogram(PREFIX + name, text, [*LABELS, *labels], buckets=buckets, registry=self._registry)

    def note_response(self, status: int) -> None:
        self._responses.labels(self._name, str(status)).inc()

    def note_refusal(self, info: ErrorInfo) -> None:
        """Also counted as a response."""
        self.note_response(info.status)
        self._refusals.labels(self._name, info.code or str(info.status)).inc()

    def note_finish(self, reason: str, seconds: float) -> None:
        self._finished.labels(self._name, reason).inc()
        self._ended.labels(self._name, ENDINGS.get(reason, reason)).inc()
        self._request.observe(seconds)

    def note_work(self, num_prompt: int, lengths: list[int], stages: Stages, now: float) -> None:
        """Of a request that has generated something: the lengths of its answers."""
        values = {
            "prompt_tokens": num_prompt, "generation_tokens": sum(lengths), "max_num_generation_tokens": max(lengths),
            "prefill_time_seconds": stages.first_token - stages.admitted, "decode_time_seconds": now - stages.first_token,
            "inference_time_seconds": now - stages.admitted,
        }  # fmt: skip
        for name, value in values.items():
            self._work[name].observe(value)

    def note_first_token(self, seconds: float, stages: dict[str, float]) -> None:
        self._first_token.observe(seconds)
        for name, value in stages.items():
            self._stage.labels(self._name, name).observe(value)

    def note_tokens(self, num_tokens: int, seconds: float) -> None:
        """`num_tokens` came `seconds` after the ones before."""
        for _ in range(num_tokens):
            self._inter_token.observe(seconds / num_tokens)

    def render(self) -> bytes:
        return generate_latest(self._registry)
