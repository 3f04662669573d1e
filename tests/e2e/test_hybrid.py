"""A hybrid model behind the API: cached states of conversations, reasoning, two end tokens."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from models.scaffold import SHAPES, write_model_folder
from tests.e2e.serving import Engine, image_part, picture, serve, text_part

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    write_model_folder(folder, SHAPES["3.5-tiny"], weights="random", seed=0)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with serve(folder, "--max-model-len", "4096") as running:
        yield running


def ask(engine: Engine, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields}
    response = engine.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer


@pytest.mark.gate
@pytest.mark.parametrize("thinks", [True, False])
def test_a_next_turn_computes_only_what_is_new(engine: Engine, thinks: bool) -> None:
    pictures = (image_part(picture(seed + 10 * thinks, 448, 448)) for seed in range(4))
    messages = []
    before = 0
    for question in ("Compare them. " * 30, "And what is left of it? " * 3, "Why? " * 5):
        shown = [next(pictures) for _ in range(1 if messages else 2)]
        messages.append({"role": "user", "content": [*shown, text_part(question)]})
        found = ask(engine, messages, chat_template_kwargs={"enable_thinking": thinks})
        usage, message = found["usage"], found["choices"][0]["message"]
        assert bool(message.get("reasoning_content")) == thinks
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached >= 0.95 * before, "most of the previous prompt must be cached"
        before = usage["prompt_tokens"]
        messages.append({"role": "assistant", "content": "It is like this.", "reasoning_content": "I look."})


def test_drafts_change_no_answer(engine: Engine, folder: Path) -> None:
    questions = [f"Count {word}. " * 4 for word in ("up", "down", "stars", "on")]
    asked = [(question, {"temperature": heat, "seed": 3, "max_tokens": 40}) for question in questions for heat in (0, 0.7)]

    def ask_all(engine: Engine, num_streams: int = len(asked)) -> list[str]:
        with ThreadPoolExecutor(num_streams) as pool:
            body = {"cache_salt": "ours", "chat_template_kwargs": {"enable_thinking": False}}
            answers = pool.map(lambda one: ask(engine, [{"role": "user", "content": one[0]}], **one[1], **body), asked)
            return [answer["choices"][0]["message"]["content"] for answer in answers]

    expected = ask_all(engine)
    with serve(folder, "--max-model-len", "4096", "--draft", "mtp", "--tp", "2") as drafting:
        for num_streams in (len(asked), len(asked), 1):
            assert ask_all(drafting, num_streams) == expected
        # alone, a request gets drafts after its first token; the others' are trusted less by then
        assert drafting.metric("vllm:spec_decode_num_draft_tokens_total") >= 3 * len(asked)
