"""Adapters in the api: a request's `model` names one in every dialect; routes load and unload them, below a root, behind the key."""

from pathlib import Path
from typing import Any

import pytest

from engine.launch.flags import read_flags
from engine.wire.config import find_problems
from tests.unit.models import adapters
from tests.unit.server.pictures import PLAIN
from tests.unit.server.stack import Stack, StackOf
from tests.unit.server.test_stack import image, uri, user

HELLO = user("hello")
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 9},
    "/v1/responses": {"input": "hello"},
    "/v1/embeddings": {"input": "hello"},
    "/generate": {"text": "hello"},
}
KEY = "secret"


@pytest.fixture(scope="module")
def root(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters, one of the tower, one that is refused, a link to a folder outside, and folders with a link to a file there."""
    root = tmp_path_factory.mktemp("root")
    adapters.write(root / "text", model_folder, 1)
    adapters.write(root / "team" / "both", model_folder, 2, takes=lambda _: True)
    adapters.write(root / "dora", model_folder, 3, use_dora=True)
    outside = adapters.write(tmp_path_factory.mktemp("outside"), model_folder, 4)
    (root / "link").symlink_to(outside)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        file = adapters.write(root / f"linked-{name}", model_folder, 4) / name
        file.unlink()
        file.symlink_to(outside / name)
    return root


@pytest.fixture
def serving(stack_of: StackOf, model_folder: Path, root: Path) -> Stack:
    stack = stack_of(model_folder, lora_root=str(root), api_key=KEY)
    stack.http.headers["authorization"] = f"Bearer {KEY}"
    return stack


def post(stack: Stack, path: str, **body: Any) -> tuple[int, str]:
    response = stack.http.post(path, json=body)
    return response.status_code, response.text


def test_a_model_names_its_adapter(serving: Stack) -> None:
    assert post(serving, "/v1/load_lora_adapter", lora_name="mine", lora_path="text")[0] == 200
    numbers = set()
    for path, body in DIALECTS.items():
        name = "lora_path" if path == "/generate" else "model"
        status, answer = post(serving, path, **body, **{name: "mine"})
        assert status == 200 and (path == "/generate" or '"mine"' in answer), answer
        adapter = serving.last.adapter
        assert adapter is not None and not adapter.has_tower
        numbers.add(adapter.number)
        assert post(serving, path, **body, **{name: "test-model"})[0] == 200 and serving.last.adapter is None
        status, answer = post(serving, path, **body, **{name: "yours"})
        assert status == 404 and "This server has: test-model, other-name, mine." in answer
    assert len(numbers) == 1
    cards = serving.http.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("test-model", None), ("other-name", None), ("mine", "test-model")]
    assert serving.http.get("/v1/models/mine").json()["root"] == "mine"
    assert post(serving, "/v1/unload_lora_adapter", lora_name="mine") == (200, "Success: LoRA adapter 'mine' removed successfully.")
    assert post(serving, "/v1/unload_lora_adapter", lora_name="mine")[0] == 404
    assert post(serving, "/v1/completions", prompt="x", model="mine")[0] == 404


def test_what_is_refused(serving: Stack, root: Path) -> None:
    links = "link", "linked-adapter_config.json", "linked-adapter_model.safetensors"
    for path in ("../x", "/etc", str(root), ".", *links, "\0", "x" * 300):
        status, answer = post(serving, "/v1/load_lora_adapter", lora_name="a", lora_path=path)
        assert status == 400 and "below --lora-root" in answer, path
    for name, path, words, code in (
        ("a", "nothing", "no such folder", 404), ("a", "team", "no adapter_config.json", 400), ("a", "dora", "DoRA", 400),
        ("a", "x" * 5000, "lora_path: ", 400), ("a\nINFO b", "text", "lora_name", 400),
        ("test-model", "text", "is served already", 400), ("", "text", "lora_name: ", 400),
    ):  # fmt: skip
        status, answer = post(serving, "/v1/load_lora_adapter", lora_name=name, lora_path=path)
        assert status == code and words in answer and str(root) not in answer, answer
    assert post(serving, "/v1/load_lora_adapter", lora_name="b", lora_path=str(root / "text"))[0] == 200
    assert post(serving, "/v1/load_lora_adapter", lora_name="b", lora_path="text")[0] == 400
    post(serving, "/v1/completions", prompt="x", model="b")
    before = serving.last.adapter
    assert post(serving, "/v1/load_lora_adapter", lora_name="b", lora_path="text", load_inplace=True)[0] == 200
    post(serving, "/v1/completions", prompt="x", model="b")
    assert before is not None and serving.last.adapter is not None and serving.last.adapter.number > before.number, "cached blocks are old"
    assert post(serving, "/v1/unload_lora_adapter", lora_name="b")[0] == 200
    serving.http.headers["authorization"] = "Bearer other"
    assert {post(serving, f"/v1/{verb}_lora_adapter", lora_name="b", lora_path="text")[0] for verb in ("load", "unload")} == {401}


def test_images_have_keys_of_their_own_if_the_tower_is_adapted(serving: Stack) -> None:
    for name, path in (("text", "text"), ("both", "team/both")):
        assert post(serving, "/v1/load_lora_adapter", lora_name=name, lora_path=path)[0] == 200
    hashes = {}
    for name in ("test-model", "text", "both"):
        assert post(serving, "/v1/chat/completions", model=name, messages=user([image(uri(PLAIN["4:2:0"]))]))[0] == 200
        (span,) = serving.last.images
        hashes[name] = span.hash
        assert name != "both" or not span.source.ticket, "it may have been encoded without the adapter"
    assert hashes["test-model"] == hashes["text"] != hashes["both"]


def test_routes_need_their_flag(stack: Stack) -> None:
    assert stack.http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "b"}).status_code == 404


def test_flags(tmp_path: Path) -> None:
    config, _ = read_flags(["Qwen3-VL-2B", "--lora-modules", "a=x", "b=y"])
    assert (config.model, config.lora_modules) == ("Qwen3-VL-2B", "a=x b=y")
    for words, flags in (
        ("needs --api-key", {"lora_root": str(tmp_path)}),
        ("there is no folder", {"lora_root": str(tmp_path / "none")}),
        ("for a single engine", {"lora_root": str(tmp_path), "dp": 2}),
    ):
        assert any(words in problem for problem in find_problems(type(config)(**flags))), words
