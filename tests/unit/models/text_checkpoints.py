"""Small random checkpoints of text models, made and saved by transformers' own classes."""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from models.scaffold import SHAPES
from models.scaffold.tokenizer import special_token_ids, tokenizer_config_json, tokenizer_json

NUM_BASE_TOKENS = SHAPES["tiny"].num_base_tokens
BOS = "<|endoftext|>"  # the tokenizer puts it before a text, as Llama's
BOS_ID = special_token_ids(NUM_BASE_TOKENS)[BOS]
SIZES = {
    "vocab_size": SHAPES["tiny"].vocab_size, "hidden_size": 72, "intermediate_size": 136, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
LLAMA3 = {  # turns of the 16 pairs of a head lie below, between and above the two factors
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
KINDS = ("llama", "llama3, tied", "qwen3")


def write(folder: Path, kind: str) -> PreTrainedModel:
    model: PreTrainedModel
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=16)).eval()
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32)).eval()
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=32, rope_parameters=LLAMA3, tie_word_embeddings=True)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(generator=generator)
            if parameter.dim() == 1:
                parameter.mul_(0.2).add_(1)
            elif "embed" not in name:
                parameter.mul_(parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)
    begin = {"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    known = {BOS: {"id": BOS, "ids": [BOS_ID], "tokens": [BOS]}}
    framing = {
        "type": "TemplateProcessing",
        "single": begin,
        "pair": [*begin, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": known,
    }
    tokenizer = tokenizer_json(NUM_BASE_TOKENS)
    tokenizer["post_processor"] = {"type": "Sequence", "processors": [tokenizer["post_processor"], framing]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config_json(NUM_BASE_TOKENS)), encoding="utf-8")
    return model
