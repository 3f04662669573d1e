"""Vocabulary of a checkpoint in xgrammar's form. Importing xgrammar takes seconds and imports torch."""

from pathlib import Path

import xgrammar
from tokenizers import Tokenizer

from models.config.huggingface import read_config


def read_vocabulary(folder: Path) -> xgrammar.TokenizerInfo:
    """Read a byte-level tokenizer. Grammars allow no special token except the end."""
    tokenizer, config = Tokenizer.from_file(str(folder / "tokenizer.json")), read_config(folder)
    tokens = [""] * config.text.vocab_size
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    for text, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id not in special:
            tokens[token_id] = text
    ends = list(config.eos_token_ids)
    return xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.BYTE_LEVEL, vocab_size=len(tokens), stop_token_ids=ends)
