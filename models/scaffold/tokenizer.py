"""Byte-level BPE tokenizer with the splitting, byte alphabet, special tokens and ids of Qwen3-VL. Its merges derive from letter frequencies
instead of a corpus: English words take about as many tokens as with the real tokenizer, but different ones."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from models.config.types import MEDIA_KINDS

TEMPLATES = Path(__file__).parent  # own ChatML templates for Qwen3-VL and Qwen3.5; both begin with render.jinja

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
    "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    *(f"<|{kind}_pad|>" for kind in MEDIA_KINDS),
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
    "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
NUM_SKIPPED_SPECIALS = 14  # the first are skipped when text is decoded, the others are markers of tools and reasoning

# Pre-tokenization of Qwen2 and Qwen3: contractions, words with one leading separator, single digits, punctuation, white space.
SPLIT_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_LETTERS = "etaoinsrhldcumfpgwybvkxjqz"  # by frequency in English
_VOWELS = frozenset("aeiouy")
_SPACE, _NEWLINE = "Ġ", "Ċ"  # the byte alphabet's spelling of 0x20 and 0x0A


def special_token_ids(num_base_tokens: int) -> dict[str, int]:
    return {token: num_base_tokens + i for i, token in enumerate(SPECIAL_TOKENS)}


def tokenizer_json(num_base_tokens: int) -> dict[str, object]:
    """Return tokenizer.json for `tokenizers`. `num_base_tokens` counts 256 bytes and the merges; ValueError if out of range."""
    vocabulary = {token: i for i, token in enumerate(byte_alphabet())}
    merges: list[str] = []
    for left, right in _merge_candidates():
        if len(vocabulary) == num_base_tokens:
            break
        if left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append(f"{left} {right}")
    if len(vocabulary) != num_base_tokens:
        raise ValueError(f"num_base_tokens must be 256 to {len(vocabulary)}, got {num_base_tokens}")
    split = {"type": "Split", "pattern": {"Regex": SPLIT_PATTERN}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [{"id": num_base_tokens + i, **_added_token(i)} for i in range(len(SPECIAL_TOKENS))],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    }


def tokenizer_config_json(num_base_tokens: int, thinks: bool = False) -> dict[str, object]:
    """Return tokenizer_config.json for transformers, with the chat template of Qwen3.5 if it `thinks`."""
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": {str(num_base_tokens + i): _added_token(i) for i in range(len(SPECIAL_TOKENS))},
        "additional_special_tokens": list(SPECIAL_TOKENS[1:NUM_SKIPPED_SPECIALS]),
        "add_prefix_space": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 262_144,
        "chat_template": chat_template(thinks),
    }


def chat_template(thinks: bool = False) -> str:
    """Return the template of Qwen3-VL, or one like that of Qwen3.5, which thinks unless `enable_thinking` is false, and drops reasoning
    before the last user message unless `preserve_thinking`."""
    names = "render.jinja", "thinking.jinja" if thinks else "chat.jinja"
    return "".join((TEMPLATES / name).read_text(encoding="utf-8") for name in names)


def byte_alphabet() -> list[str]:
    """Return one printable character per byte in the order of GPT-2's byte-level BPE ids: printable bytes first, then the others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]


def _added_token(index: int) -> dict[str, object]:
    return {
        "content": SPECIAL_TOKENS[index],
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": index < NUM_SKIPPED_SPECIALS,
    }


def _merge_candidates() -> Iterator[tuple[str, str]]:
    """Yield pairs of tokens, likelier ones in English first."""
    pairs = _letter_pairs()
    capitals = _LETTERS.upper()
    words = [left + right for left, right in pairs]
    starts = [_SPACE + word for word in words]
    yield from ((char * n, char * n) for n in (1, 2, 4, 8) for char in (_SPACE, _NEWLINE, "-", "=", "*", "#"))
    yield from pairs
    yield from product(capitals, _LETTERS)
    yield from product([_SPACE], words)
    yield from product([_SPACE], _LETTERS + capitals + "(\"'<[{")
    yield from product([_SPACE + letter for letter in _LETTERS + capitals], words)
    yield from product(capitals, words)
    yield from product(starts[:180], words[:180])
    yield from product(words[:180], words[:180])
    yield from product(starts, _LETTERS)
    yield from product(words, _LETTERS)
    yield from product(words, words)


def _letter_pairs() -> list[tuple[str, str]]:
    """Return all pairs of letters: frequent letters and pairs of vowel and consonant first."""

    def rank(pair: tuple[str, str]) -> tuple[float, tuple[str, str]]:
        left, right = pair
        mixed = (left in _VOWELS) != (right in _VOWELS)
        return (1 + _LETTERS.index(left)) * (1 + _LETTERS.index(right)) * (1.0 if mixed else 2.5), pair

    return sorted(product(_LETTERS, _LETTERS), key=rank)
