"""Grammars of answers, as text and compiled, and the messages about them."""

from typing import Literal

import msgspec

from engine.wire.media import Region


class Grammar(msgspec.Struct, frozen=True):
    """Grammar of an answer. An "ebnf" may be Lark. The answer may follow `otherwise` instead."""

    kind: Literal["json_schema", "regex", "ebnf", "structural_tag"]
    text: str
    otherwise: "Grammar | None" = None


class Compiled(msgspec.Struct, frozen=True):
    """A grammar as serialised by xgrammar, or the reason why it cannot be compiled."""

    data: bytes = b""
    error: str | None = None


class CompiledGrammar(msgspec.Struct, frozen=True, array_like=True):
    """Location in the processor arena. The grammar applies after token `after` (the end of thoughts), if given."""

    region: Region
    after: int | None = None
