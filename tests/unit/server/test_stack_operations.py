"""What operators and their tools see: ids, log lines, metrics, small endpoints, pages of other origins."""

import http.client
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from engine.wire.messages import RequestOutput
from server.api.http.middleware import POLLS
from tests.eventually import HANG_GUARD_S, eventually
from tests.unit.server.pictures import PLAIN
from tests.unit.server.stack import Stack, StackOf, hold, hold_silently
from tests.unit.server.test_stack import ids_of, image, uri, user
from tests.unit.server.test_stack_fields import ended, tell


def test_every_answer_has_an_id(stack: Stack) -> None:
    """A client's own id is returned unless it could forge a line of the log."""
    for path in ("/v1/models", "/health", "/nowhere", "/v1/chat/completions"):
        ids = [stack.http.get(path, headers={"x-request-id": given}).headers["x-request-id"] for given in ("abc-123", "", "x" * 200, "a b")]
        assert ids[0] == "abc-123" and not {"", "x" * 200, "a b"} & {*ids} and len({*ids}) == 4, path
    assert re.fullmatch("[0-9a-f]{32}", stack.chat("x", stream=True).headers["x-request-id"])
    answer = stack.http.post("/v1/messages", json={}, headers={"x-request-id": "mine"})  # Anthropic's client looks for its own name
    assert answer.status_code == 400 and answer.headers["request-id"] == answer.headers["x-request-id"] == "mine"


def test_one_line_per_request(stack_of: StackOf, model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for access_log in (True, False):
        caplog.clear()
        stack = stack_of(model_folder, access_log=access_log)
        body = {"messages": user([image(uri(PLAIN["4:2:0"]))])}
        chat, own = "/v1/chat/completions", {"x-request-id": "first"}
        for path, value, status in ((chat, body, 200), (chat, {"messages": 5}, 400), ("/tokenize", body, 200)):
            assert stack.http.post(path, json=value, headers=own).status_code == status
        for path in POLLS:
            stack.http.get(path)
        stack.settle()
        lines = [record.getMessage() for record in caplog.records if record.name == "server.api.http.middleware"]
        if access_log:
            answered, refused, counted = lines
            assert re.search(r"first 127.0.0.1 POST '/v1/chat/\S+' 200, \d+ ms$", answered)
            assert re.search(r" 400, \d+ ms, '.*messages", refused) and "/tokenize' 200, " in counted
    assert not lines


def test_the_wrong_method_or_path(stack: Stack) -> None:
    for method, path, allowed in (("GET", "/v1/chat/completions", {"POST"}), ("POST", "/v1/models", {"GET", "HEAD"})):
        response = stack.http.request(method, path)
        assert response.status_code == 405 and {*response.headers["allow"].split(", ")} == allowed
    for path in ("/v1/models/", "/health/", "/v1/chat/completions/", "/nowhere"):
        response = stack.http.post(path, json={})
        assert response.status_code in (404, 405) and response.json()["error"].keys() == {"message", "type", "param", "code"}, path
    assert stack.http.get("/v1/models/").json() == stack.http.get("/v1/models").json()


def test_pages_of_other_origins(stack: Stack, stack_of: StackOf, model_folder: Path) -> None:
    assert "access-control-allow-origin" not in stack.http.get("/v1/models", headers={"Origin": "https://a.example"}).headers
    open_to = stack_of(model_folder, allowed_origins="https://a.example, https://b.example", api_key="key")
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    for origin in ("https://a.example", "https://b.example", "https://c.example"):
        response = open_to.http.options("/v1/chat/completions", headers={"Origin": origin, **asks})
        assert (response.headers.get("access-control-allow-origin") == origin) == (origin != "https://c.example")
    response = open_to.http.get("/v1/models", headers={"Origin": "https://a.example"})
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (401, "https://a.example")


def test_behind_a_proxy(stack_of: StackOf, model_folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}")
    stack = stack_of(model_folder, root_path="/llm", api_key="key", chat_template=str(file))
    assert stack.http.get("/health").status_code == 200
    assert stack.http.get("/v1/models").status_code == 401
    stack.http.headers["Authorization"] = "Bearer key"
    assert stack.chat("hello").status_code == 200
    assert tokenizer.decode(stack.prompt()) == "user: hello\n"
    stack.script = tell(ended(tokenizer, "so"))


def test_models(stack: Stack) -> None:
    cards = stack.http.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["test-model", "other-name"]
    for card in cards:
        assert stack.http.get(f"/v1/models/{card['id']}").json() == card and (card["root"], card["max_model_len"]) == ("demo", 4096)
        assert stack.chat("x", model=card["id"]).json()["model"] == card["id"]
    assert stack.http.get("/v1/models/another/name").status_code == 404


def test_tokens(stack: Stack, tokenizer: Tokenizer) -> None:
    """Red if what is counted is not what a request would be, or anything is left behind (fixture)."""
    content = [image(uri(PLAIN["4:2:0"])), {"type": "text", "text": "Grüße"}]
    assert stack.chat(content).status_code == 200
    prompt, num_requests = stack.prompt(), len(stack.scheduler.requests)

    def count(path: str = "/tokenize", **body: object) -> dict[str, Any]:
        return dict(stack.http.post(path, json=body).json())

    counted = count(messages=user(content))
    assert counted == {"count": len(prompt), "max_model_len": 4096, "tokens": prompt, "token_strs": None}
    assert count(prompt="Grüße")["tokens"] == ids_of(tokenizer, "Grüße") and count(prompt="word " * 9000)["count"] > 4096
    text = tokenizer.decode(prompt, skip_special_tokens=False)
    padding = 4095  # an id of the model's that the tokenizer has no token for
    assert count("/detokenize", tokens=prompt) == count("/detokenize", tokens=[*prompt, padding]) == {"prompt": text, "text": text}
    assert len(stack.scheduler.requests) == num_requests
    assert stack.http.post("/v1/completions", json={"prompt": [*prompt[:3], padding]}).status_code == 200
    for tokens in ([1 << 20], ["x"], None):
        assert stack.http.post("/detokenize", json={"tokens": tokens}).status_code == 400
    for body in ({"prompt": ["a", 5]}, {"prompt": 5}, {"messages": user([image(uri(b"bad"))])}):
        assert stack.http.post("/tokenize", json=body).status_code in (400, 422)


def test_what_is_only_counted_has_the_limits_of_what_is_answered(stack_of: StackOf, model_folder: Path) -> None:
    counting = stack_of(model_folder, allow_private_media=True, download_timeout=900)
    with socket.create_server(("127.0.0.1", 0)) as site:
        site.settimeout(HANG_GUARD_S)
        part = image(f"http://127.0.0.1:{site.getsockname()[1]}/a.png")
        response = counting.http.post("/tokenize", json={"messages": user([part] * 2000)})
        assert response.status_code == 400 and "2000 images, the limit is" in response.text
        asking = ask(counting, "/tokenize", {"messages": user([part])})
        download, _ = site.accept()
        asking.close()
        with download:
            download.settimeout(HANG_GUARD_S)
            while download.recv(4096):  # until it is given up
                pass
    counting.settle()


def ask(stack: Stack, path: str, body: object) -> http.client.HTTPConnection:
    asking = http.client.HTTPConnection(stack.url.removeprefix("http://"))
    asking.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return asking


def test_what_the_server_reports_of_itself(stack_of: StackOf, model_folder: Path) -> None:
    stack = stack_of(model_folder, api_key="very-secret")
    stack.http.headers["Authorization"] = "Bearer very-secret"
    info = stack.http.get("/server_info")
    assert info.json()["settings"]["max_num_seqs"] == 128 and "very-secret" not in info.text
    assert stack.http.get("/load").json() == {"server_load": 0}
    assert stack.http.post("/ping").status_code == stack.http.get("/ping", headers={"Authorization": ""}).status_code == 200


LONG = "word " * 9000
LONG_CHAT = {"messages": user(LONG)}
TOO_LONG: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", LONG_CHAT, "messages"), ("/v1/completions", {"prompt": LONG}, "prompt"),
    ("/v1/completions", {"prompt": [5] * 5000}, "prompt"), ("/v1/responses", {"input": LONG}, "input"),
    ("/v1/embeddings", {"input": ["x", LONG]}, "input"), ("/v1/embeddings", LONG_CHAT, "messages"),
    ("/rerank", {"query": "x", "documents": ["x", LONG]}, "documents"),
    ("/score", {"text_1": "x", "text_2": LONG}, "text_2"),
]  # fmt: skip
BAD_IMAGE: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": user([image(uri(b"bad"))])}, "messages"),
    ("/v1/responses", {"input": user([{"type": "input_image", "image_url": uri(b"bad")}])}, "input"),
    ("/score", {"text_1": "x", "text_2": {"content": [image(uri(b"bad"))]}}, "text_2"),
]


def test_errors_name_the_field_of_the_dialect(stack: Stack) -> None:
    """Libraries tell a prompt that is too long from other errors by the code, or by these words."""
    for path, fields, param in TOO_LONG:
        error = stack.http.post(path, json=fields).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param), path
        assert "maximum context length is 4096 tokens" in error["message"] and "prompt is too long" in error["message"], path
        is_counted = fields.get("prompt") == [5] * 5000
        assert ("more than 4096 tokens" in error["message"]) != is_counted, error  # a text is not tokenized to its end
    for path, fields, param in BAD_IMAGE:
        response = stack.http.post(path, json=fields)
        assert (response.status_code, response.json()["error"]["param"]) == (422, param), path


def families_of(stack: Stack) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(stack.http.get("/metrics").text)}


def test_metrics_are_as_prometheus_has_them(stack: Stack) -> None:
    families = families_of(stack)
    for family in families.values():
        assert family.name.startswith(("engine_", "vllm:")) and family.documentation
        assert all(sample.labels["model_name"] == "test-model" for sample in family.samples)
    kinds = "drafts", "draft_tokens", "accepted_tokens"
    samples = [sample for kind in kinds for sample in families[f"vllm:spec_decode_num_{kind}"].samples]
    assert [sample.value for sample in samples] == [3, 9, 5]


LATENCIES = "e2e_request_latency_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds"
# Series that vLLM's dashboard (examples/observability/prometheus_grafana/grafana.json) reads.
SHOWN = [
    *(f"{name}_{part}" for name in LATENCIES for part in ("bucket", "sum", "count")),
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
    "generation_tokens_total", "request_success_total", "num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
    "request_max_num_generation_tokens_sum", "request_prompt_tokens_bucket", "request_generation_tokens_bucket",
    *(f"request_{name}_time_seconds_sum" for name in ("queue", "prefill", "decode")),
]  # fmt: skip


def test_vllms_dashboard_shows_this_engine(stack: Stack) -> None:

    def values() -> dict[str, float]:
        return {sample.name: sample.value for family in families_of(stack).values() for sample in family.samples}

    before = values()
    for _ in range(3):
        assert stack.chat("x").status_code == 200
    after = values()
    assert {f"vllm:{name}" for name in SHOWN} <= after.keys()
    assert after["engine_stage_seconds_count"] > 0 and after["vllm:request_success_total"] > 0
    for name in (*LATENCIES[:2], "request_prompt_tokens", "request_prefill_time_seconds", "request_queue_time_seconds"):
        assert after[f"vllm:{name}_count"] - before.get(f"vllm:{name}_count", 0) == 3, name
    assert after["vllm:request_generation_tokens_sum"] - before.get("vllm:request_generation_tokens_sum", 0) == 36
    stack.script, name = hold, "vllm:inter_token_latency_seconds_count"
    with stack.http.stream("POST", "/v1/chat/completions", json={"messages": user("x"), "stream": True}) as response:
        lines = response.iter_lines()
        next(line for line in lines if '"content":"b"' in line)  # the second token comes after the first one
        stack.scheduler.send([RequestOutput(stack.last.rid, [65], "stop")], [stack.last.rid])
        assert [*lines] and values()[name] > after.get(name, 0)


def test_a_client_that_leaves_before_its_numbers(stack: Stack) -> None:
    stack.script = hold_silently
    stack.scheduler.aborted.clear()
    known = len(stack.scheduler.requests)
    asking = ask(stack, "/v1/embeddings", {"input": ["a", "b", "c"]})
    eventually(lambda: len(stack.scheduler.requests) == known + 3)
    asking.close()
    eventually(lambda: len(stack.scheduler.aborted) == 3 == len(stack.scheduler.requests) - known)


def test_a_span_for_every_request(stack_of: StackOf, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    monkeypatch.setattr("opentelemetry.exporter.otlp.proto.http.trace_exporter.OTLPSpanExporter", lambda endpoint: memory)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")  # ms, in which spans gather
    stack = stack_of(model_folder, otlp_traces_endpoint="http://collector/v1/traces")
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    stack.http.headers["traceparent"] = f"00-{trace_id}-b7ad6b7169203331-01"
    assert stack.chat("x", stream=True).status_code == stack.http.get("/v1/models").status_code == 200
    eventually(lambda: len(memory.get_finished_spans()) >= 2, "the spans")
    spans = memory.get_finished_spans()
    assert sorted(span.name for span in spans) == ["GET /v1/models", "POST /v1/chat/completions"]
    assert {span.context.trace_id for span in spans} == {int(trace_id, 16)}
