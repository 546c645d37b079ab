"""Notations of context-free grammars: Lark's, which llguidance reads, and GBNF of llama.cpp, which is converted."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import count

from llguidance.gbnf_to_lark import gbnf_to_lark

_GBNF_RULE = re.compile(r"(?:^|\r)[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)

# A literal, a class or a comment, in which no name stands; or line breaks with comments before them, perhaps amid a
# rule; or a name.
_GBNF_PART = re.compile(
    r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]'
    r"|(?<![ \t])(?:[ \t]*+(?:#[^\r\n]*+)?(?:\r\n?|\n))++[ \t]*+(?P<amid>(?=[^\s#])(?![\w-]+[ \t]*::=))?"
    r"|#[^\r\n]*|(?P<name>[\w-]+)",
    re.DOTALL,
)

_GBNF_CHARACTER = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)|[\r\n]", re.DOTALL)
_LINE_BREAKS = {"\r": r"\r", "\n": r"\n"}


def lark_grammar(grammar: str) -> str:
    """Return a grammar of either notation in Lark's.

    Raises:
        ValueError: it is GBNF with a mistake.
    """
    if _GBNF_RULE.search(grammar) is None:
        return grammar
    names = _converted_names(filter(None, (found["name"] for found in _GBNF_PART.finditer(grammar))))

    def known_to_llguidance(found: re.Match[str]) -> str:
        part = found[0]
        if part[0] in '"[':
            return _GBNF_CHARACTER.sub(_character, part)
        # llama.cpp has line breaks amid a rule in brackets only, and other readers of the notation anywhere.
        return names.get(part, part) if found["amid"] is None else " "

    try:
        return gbnf_to_lark(_GBNF_PART.sub(known_to_llguidance, grammar))
    except Exception as error:  # it raises nothing more special
        raise ValueError(str(error)) from error


def _converted_names(names: Iterable[str]) -> dict[str, str]:
    """Return a name for each name of a rule, such that the conversion keeps them apart."""
    # It takes dashes for underscores, and no notice of case. `root` begins an answer, and is called `start` by it.
    converted: dict[str, str] = {"root": "root"}
    taken = {"root", "start"}
    for name in names:
        plain = name.replace("-", "_").lower()
        if name not in converted and not name.isdigit():  # digits are a number of repetitions
            converted[name] = next(
                other
                for number in count()
                if (other := f"{plain}_{number}" if number else plain) not in taken
            )
            taken.add(converted[name])
    return converted


def _character(found: re.Match[str]) -> str:
    """Return a character that is escaped by its number, or breaks a line, as Lark has it; others as they are."""
    number = found[1] or found[2]
    if number is None:
        return _LINE_BREAKS.get(found[0], found[0])
    code = int(number, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"grammar must escape characters of Unicode, got {found[0]}")
    # A sign could mean something by itself.
    return f"\\x{code:02x}" if code < 0x80 else chr(code)
