"""Notations of context-free grammars: Lark's, which llguidance reads, and GBNF of llama.cpp, which is converted."""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)

# A literal, a class or a comment, in which no name stands; or a name.
_GBNF_PART = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|[\w-]+', re.DOTALL)

_GBNF_CHARACTER = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def lark_grammar(grammar: str) -> str:
    """Return a grammar of either notation in Lark's.

    Raises:
        ValueError: it is GBNF with a mistake.
    """
    if _GBNF_RULE.search(grammar) is None:
        return grammar
    # The conversion takes dashes for underscores, and no notice of case.
    names = {part.replace("-", "_").lower() for part in _GBNF_PART.findall(grammar)}
    # The rule that begins an answer is `root`, and gets this name.
    start = next(name for number in range(len(names) + 1) if (name := f"start_{number}") not in names)

    def known_to_llguidance(found: re.Match[str]) -> str:
        part = found[0]
        if part.startswith("#"):
            return part
        if part[0] in '"[':
            return _GBNF_CHARACTER.sub(_character, part)
        return start if part == "start" else part

    try:
        return gbnf_to_lark(_GBNF_PART.sub(known_to_llguidance, grammar))
    except Exception as error:  # it raises nothing more special
        raise ValueError(str(error)) from error


def _character(found: re.Match[str]) -> str:
    """Return a character that is escaped by its number, which the conversion spells as Lark does not; others as is."""
    number = found[1] or found[2]
    if number is None:
        return found[0]
    code = int(number, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"grammar must escape characters of Unicode, got {found[0]}")
    # A sign could mean something by itself.
    return f"\\x{code:02x}" if code < 0x80 else chr(code)
