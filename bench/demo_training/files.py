"""The files of the checkpoint folder besides the weights: configuration, tokenizer, chat template, preprocessing. Used by `train`.

`python -m bench.demo_training.files` writes them anew into the checkpoint folder; the tokenizer is trained on the demo's own questions.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models

from models.demo import CHECKPOINT, smalltalk
from models.demo.questions import TASKS
from models.demo.render import IMAGE_GEOMETRY
from models.demo.scenes import COLOURS, SHAPES, WORDS, random_scene
from models.scaffold.tokenizer import NUM_SKIPPED_SPECIALS, SPECIAL_TOKENS, SPLIT_PATTERN, chat_template

VOCAB_SIZE = 768
NUM_BASE_TOKENS = VOCAB_SIZE - len(SPECIAL_TOKENS)
TOKEN_IDS = {token: NUM_BASE_TOKENS + i for i, token in enumerate(SPECIAL_TOKENS)}
VISION_DEPTH = 7


def config_json() -> dict[str, Any]:
    """config.json. The text model's heads are those of the large models (128 wide, two of key and value), the rest is small."""
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "dtype": "bfloat16",
        "image_token_id": TOKEN_IDS["<|image_pad|>"],
        "video_token_id": TOKEN_IDS["<|video_pad|>"],
        "vision_start_token_id": TOKEN_IDS["<|vision_start|>"],
        "vision_end_token_id": TOKEN_IDS["<|vision_end|>"],
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": TOKEN_IDS["<|endoftext|>"],
            "eos_token_id": TOKEN_IDS["<|im_end|>"],
            "dtype": "bfloat16",
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 192,
            "initializer_range": 0.02,
            "intermediate_size": 384,
            "max_position_embeddings": 32768,
            "num_attention_heads": 4,
            "num_hidden_layers": 5,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5_000_000,
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": VOCAB_SIZE,
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "deepstack_visual_indexes": [1, 3, 5],
            "depth": VISION_DEPTH,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 128,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": 512,
            "num_heads": 4,
            "num_position_embeddings": 256,
            "out_hidden_size": 192,
            "patch_size": IMAGE_GEOMETRY.patch_size,
            "spatial_merge_size": IMAGE_GEOMETRY.merge_size,
            "temporal_patch_size": IMAGE_GEOMETRY.temporal_patch_size,
        },
    }


def generation_config_json() -> dict[str, object]:
    """generation_config.json: greedy, because every question has one right answer."""
    return {
        "bos_token_id": TOKEN_IDS["<|endoftext|>"],
        "pad_token_id": TOKEN_IDS["<|endoftext|>"],
        "eos_token_id": [TOKEN_IDS["<|im_end|>"], TOKEN_IDS["<|endoftext|>"]],
        "do_sample": False,
    }


def image_processor_json() -> dict[str, object]:
    """preprocessor_config.json; `size` is an area in pixels."""
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": IMAGE_GEOMETRY.min_pixels, "longest_edge": IMAGE_GEOMETRY.max_pixels},
        "patch_size": IMAGE_GEOMETRY.patch_size,
        "temporal_patch_size": IMAGE_GEOMETRY.temporal_patch_size,
        "merge_size": IMAGE_GEOMETRY.merge_size,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def video_processor_json() -> dict[str, object]:
    """video_preprocessor_config.json; `size` is an area in pixels summed over the frames."""
    return {
        **image_processor_json(),
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": 4096, "longest_edge": 16 * IMAGE_GEOMETRY.max_pixels},
    }


def tokenizer_config_json() -> dict[str, object]:
    """tokenizer_config.json with the chat template."""
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "additional_special_tokens": list(SPECIAL_TOKENS[1:NUM_SKIPPED_SPECIALS]),
        "added_tokens_decoder": {str(NUM_BASE_TOKENS + i): _added_token(i) for i in range(len(SPECIAL_TOKENS))},
        "add_prefix_space": False,
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "split_special_tokens": False,
        "model_max_length": 32768,
        "chat_template": chat_template(),
    }


def _added_token(index: int) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"content": SPECIAL_TOKENS[index], **flags, "special": index < NUM_SKIPPED_SPECIALS}


def train_tokenizer() -> Tokenizer:
    """Byte-level BPE over the demo's phrases, cut into words as Qwen3's is (digits apart), special tokens last."""
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_BASE_TOKENS, min_frequency=2, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    assert tokenizer.get_vocab_size() == NUM_BASE_TOKENS
    for i, token in enumerate(SPECIAL_TOKENS):
        added = AddedToken(token, normalized=False, special=i < NUM_SKIPPED_SPECIALS)
        (tokenizer.add_special_tokens if i < NUM_SKIPPED_SPECIALS else tokenizer.add_tokens)([added])
    return tokenizer


def _corpus() -> Iterator[str]:
    """Questions and answers of every task, and the vocabulary of the scenes."""
    rng = np.random.default_rng(7)
    for _ in range(60):
        yield "system\nuser\nassistant\n"
        yield from (f"{word} {word.capitalize()}" for word in (*WORDS, *COLOURS, *SHAPES))
        yield from (text for phrases, answer in smalltalk.TALK for text in (*phrases, answer, *(p.capitalize() for p in phrases)))
        yield from smalltalk.SYSTEMS
    for _ in range(1500):
        scenes = [random_scene(rng) for _ in range(int(rng.integers(1, 9)))]
        for task in TASKS.values():
            asked = task.ask(rng, scenes)
            if asked:
                yield "\n".join(asked)


def write_files(folder: Path, tokenizer: Tokenizer) -> None:
    """Everything but the weights and the model card."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    for name, value in {
        "config.json": config_json(),
        "generation_config.json": generation_config_json(),
        "preprocessor_config.json": image_processor_json(),
        "video_preprocessor_config.json": video_processor_json(),
        "tokenizer_config.json": tokenizer_config_json(),
    }.items():
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    write_files(CHECKPOINT, train_tokenizer())
