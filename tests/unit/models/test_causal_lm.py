"""Text models against transformers with the same weights, float32 on the CPU, and what their config.json may say."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from models.config.huggingface import read_config
from models.config.types import ModelConfig
from tests.unit.models.harness import PagedRunner, Prompt, every_logit, load, relative
from tests.unit.models.text_checkpoints import KINDS, LLAMA3, write

IDS = [*range(5, 2500, 13)] * 2


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_logits_and_greedy_tokens_equal_the_reference(tmp_path: Path, kind: str) -> None:
    theirs: Any = write(tmp_path, kind)
    ours, prompt = load(tmp_path), Prompt(IDS, [], [])
    expected = theirs(torch.tensor([IDS])).logits[0]
    tokens = theirs.generate(torch.tensor([IDS]), do_sample=False, max_new_tokens=24, min_new_tokens=24, eos_token_id=None)[0, len(IDS) :]
    for chunk in (1 << 30, 64):
        found = every_logit(ours, prompt, chunk)
        assert relative(found, expected) < 1e-5
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert PagedRunner(ours).greedy(prompt, steps=24, chunk=chunk) == tokens.tolist()


def config_of(folder: Path, **changes: object) -> ModelConfig:
    file = folder / "config.json"
    settings = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))
    return read_config(folder)


def test_what_published_files_leave_out(tmp_path: Path) -> None:
    write(tmp_path, "llama3, tied")
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    left_out = dict.fromkeys(("head_dim", "num_key_value_heads", "rope_parameters"))
    text = config_of(tmp_path, **left_out, rope_theta=7e5, rope_scaling=scaling).text
    assert (text.head_dim, text.num_kv_heads, text.rope_theta, text.llama3) == (12, 6, 7e5, (8, 1, 4, 256))
    assert config_of(tmp_path, rope_theta=None, rope_scaling=None).text.rope_theta == 10_000
