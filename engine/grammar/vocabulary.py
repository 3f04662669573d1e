"""The tokens of a checkpoint as xgrammar wants them. Importing it takes seconds and imports torch."""

from pathlib import Path

import xgrammar
from tokenizers import Tokenizer

from models.config import ModelConfig


def read_vocabulary(folder: Path) -> xgrammar.TokenizerInfo:
    """Of a byte-level tokenizer, as Qwen's. Special tokens are no text: no grammar allows one, but for the end."""
    tokenizer, config = Tokenizer.from_file(str(folder / "tokenizer.json")), ModelConfig.from_folder(folder)
    tokens = [""] * config.text.vocab_size
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    for text, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id not in special:
            tokens[token_id] = text
    ends = list(config.eos_token_ids)
    return xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.BYTE_LEVEL, vocab_size=len(tokens), stop_token_ids=ends)
