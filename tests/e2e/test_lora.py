"""Adapters behind the API of the whole engine, on two ranks with one slot: answers are those of a model with merged weights."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from models.scaffold import SHAPES, write_model_folder
from tests.e2e.serving import serve
from tests.unit.models import adapters
from tests.unit.models.harness import PagedRunner, Prompt, load

pytestmark = pytest.mark.e2e

IDS = list(range(40, 90))
NUM_TOKENS = 12


def merged_tokens(folder: Path, adapter: Path | None) -> list[int]:
    model = load(folder)
    if adapter is not None:
        adapters.merge_(model, adapter)
    return PagedRunner(model).greedy(Prompt.build(model.config, [IDS]), NUM_TOKENS)


def test_adapters_take_turns_in_one_slot(tmp_path: Path) -> None:
    folder, root = tmp_path / "model", tmp_path / "adapters"
    write_model_folder(folder, SHAPES["tiny"], weights="random", seed=3)
    names = ["a", "b", "c", "late"]
    folders = {name: adapters.write(root / name, folder, seed, rank=4 + 4 * seed) for seed, name in enumerate(names)}
    expected = {name: merged_tokens(folder, folders.get(name)) for name in ("base", *names)}
    assert len({tuple(tokens) for tokens in expected.values()}) == 5
    modules = [f"{name}={folders[name]}" for name in names[:3]]
    flags = ["--tp", "2", "--max-loras", "1", "--lora-root", str(root), "--api-key", "k"]
    with serve(folder, *flags, "--served-model-name", "base", "--lora-modules", *modules) as engine, ThreadPoolExecutor(12) as pool:
        engine.client.headers["authorization"] = "Bearer k"

        def tokens_of(name: str) -> list[int]:
            body = {"model": name, "prompt": IDS, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            answer = engine.client.post("/v1/completions", json=body).json()
            return list(answer["choices"][0]["token_ids"])

        asked = ["a", "base", "b", "c"] * 3
        assert list(pool.map(tokens_of, asked)) == [expected[name] for name in asked]
        loaded = engine.client.post("/v1/load_lora_adapter", json={"lora_name": "late", "lora_path": "late"})
        assert loaded.status_code == 200, loaded.text
        assert [tokens_of(name) for name in ("late", "a", "base")] == [expected[name] for name in ("late", "a", "base")]
