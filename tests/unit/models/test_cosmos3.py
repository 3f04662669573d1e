"""The reasoner of Cosmos3 out of a checkpoint in the published layout, made up from Qwen3-VL's tensors and a generator's beside them."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.config.hub import hub_id_of
from models.config.huggingface import read_config
from models.scaffold import SHAPES, write_model_folder
from tests.unit.models.harness import ONE_IMAGE, Prompt, assert_same, load

NEW_NAMES = (
    (r"(self_attn)\.([qkv])_proj", r"\1.to_\2"),
    (r"(self_attn)\.o_proj", r"\1.to_out"),
    (r"(self_attn)\.([qk])_norm", r"\1.norm_\2"),
)
GENERATOR = (
    "layers.0.mlp_moe_gen.gate_proj.weight",
    "layers.0.self_attn.add_q_proj.weight",
    "layers.1.self_attn.to_add_out.weight",
    "layers.1.self_attn.norm_added_k.weight",
    "layers.1.self_attn.to_q.weight_quantizer._amax",
    "proj_in.weight",
    "time_embedder.linear_1.weight",
    "audio_proj_in.weight",
    "action_modality_embed",
)


def write_cosmos3(folder: Path, is_new: bool) -> None:
    write_model_folder(folder, SHAPES["tiny"], weights="random", seed=3)
    tensors: dict[str, dict[str, torch.Tensor]] = {"transformer": {}, "vision_encoder": {}}
    for name, tensor in load_file(folder / "model.safetensors").items():
        part = "vision_encoder" if name.startswith("model.visual.") else "transformer"
        stored = name.removeprefix("model.visual.").removeprefix("model.language_model.")
        for pattern, replacement in NEW_NAMES if is_new and part == "transformer" else ():
            stored = re.sub(pattern, replacement, stored)
        tensors[part][stored] = tensor
    (folder / "model.safetensors").unlink()
    tensors["transformer"] |= {name: torch.ones(2, 2) for name in GENERATOR}
    names = sorted(tensors["transformer"])
    shards = {f"diffusion_pytorch_model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for part in tensors:
        (folder / part).mkdir()
    for file, members in shards.items():
        save_file({name: tensors["transformer"][name] for name in members}, folder / "transformer" / file)
    index = {"weight_map": {name: file for file, members in shards.items() for name in members}}
    (folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    save_file(tensors["vision_encoder"], folder / "vision_encoder" / "model.safetensors")
    (folder / "vae").mkdir()
    save_file({"decoder.weight": torch.ones(1)}, folder / "vae" / "diffusion_pytorch_model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "cosmos3_omni"}))


@pytest.mark.parametrize("is_new", [False, True])
def test_the_reasoner_is_the_model_that_was_stored(tmp_path: Path, is_new: bool) -> None:
    write_cosmos3(tmp_path / "cosmos", is_new)
    write_model_folder(tmp_path / "plain", SHAPES["tiny"], weights="random", seed=3)
    ours, expected = load(tmp_path / "cosmos"), load(tmp_path / "plain")
    assert_same(ours, expected)
    assert Prompt.build(ours.config, ONE_IMAGE).ids == Prompt.build(expected.config, ONE_IMAGE).ids


def test_two_tensors_for_one_place_are_refused(tmp_path: Path) -> None:
    write_cosmos3(tmp_path, is_new=True)
    architecture = read_config(tmp_path).architecture
    with pytest.raises(ValueError, match="twice"):
        architecture.names_of(["layers.0.self_attn.to_q.weight", "layers.0.self_attn.q_proj.weight"])


def test_aliases() -> None:
    assert hub_id_of("Cosmos-Reason2-8B") == "nvidia/Cosmos-Reason2-8B" and hub_id_of("Cosmos3-Nano") == "nvidia/Cosmos3-Nano"
