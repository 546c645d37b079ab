r"""Regular expressions with ASCII classes, as vLLM's users expect them.

llguidance reads `\d`, `\w` and `\s` as classes of Unicode, in which `\d` has some 700 digits. In JSON Schema (ECMA-262)
and in vLLM's default engine they are those of ASCII; for more there is `\p{Nd}` and the like.
"""

from __future__ import annotations

import re

MEMBERS = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\x0b"}

# The one thing in brackets within a class that both read alike: a class of POSIX.
_POSIX = r"\[:\^?[a-z]+:\]"

# A whole class (a bracket that closes right after the opening is a member), an escaped character, or another one.
_PART = re.compile(rf"\[\^?\]?(?:{_POSIX}|\\.|[^\]\\])*\]|\\.|.", re.DOTALL)

# Within a class: a range, or a single member. A dash between two members of which one is a class makes no range.
_MEMBERS = re.compile(rf"{_POSIX}|(\\.|[^\\])-(\\.|[^\\])|\\.|.", re.DOTALL)

# A class in brackets that may hold control characters.
_HAS_CONTROLS = re.compile(r"\[(?:\^|.*\\(?:x\{?0|u\{?00|0))", re.DOTALL)

# What opens another class in a class or, doubled, combines two: in the patterns of JSON Schema these are members.
_NESTING = re.compile(rf"{_POSIX}|\\.|([\[&~])", re.DOTALL)


def ascii_classes(regex: str) -> str:
    r"""Return the expression with `\d`, `\w`, `\s` and their opposites spelled out.

    Raises:
        ValueError: it ends in a backslash.
    """
    return "".join(map(_spelled, _PART.findall(regex)))


def string_pattern(regex: str) -> str:
    r"""Return the `pattern` of a JSON schema, as `ascii_classes` does, for text that is written between quotes.

    llguidance translates a pattern to the text in JSON, in which a quote is `\"`. A class with all control characters,
    such as `[^"]`, it takes for any character, also for those that the class leaves out. So a class in brackets loses
    one of them, U+0001, which no text is known to need.

    Raises:
        ValueError: it ends in a backslash.
    """
    return "".join(map(_spelled_in_quotes, _PART.findall(regex)))


def _spelled_in_quotes(part: str) -> str:
    if not _is_bracketed(part):
        return _spelled(part)
    members = _NESTING.sub(lambda found: f"\\{found[0]}" if found[1] else found[0], part[1:-1])
    spelled = _spelled(f"[{members}]")
    return rf"[{spelled}&&[^\x01]]" if _HAS_CONTROLS.match(part) else spelled


def _is_bracketed(part: str) -> bool:
    return len(part) > 1 and part.startswith("[")


def _spelled(part: str) -> str:
    if part == "\\":
        raise ValueError("regex ends in a backslash")
    if _is_class(part):
        spelled = _spelled_member(part)
        return spelled if part[1].isupper() else f"[{spelled}]"
    if _is_bracketed(part):
        beginning = 2 if part.startswith("[^") else 1
        return part[:beginning] + _MEMBERS.sub(_spelled_members, part[beginning:-1]) + "]"
    return part


def _spelled_members(found: re.Match[str]) -> str:
    first, last = found.groups()
    if first is None:
        return _spelled_member(found[0])
    is_range = not (_is_class(first) or _is_class(last))
    # Escaped: two dashes would take a set from another.
    ends = (r"\-" if one == "-" else _spelled_member(one) for one in (first, last))
    return ("-" if is_range else r"\-").join(ends)


def _spelled_member(member: str) -> str:
    if not _is_class(member):
        return member
    members = MEMBERS[member[1].lower()]
    return f"[^{members}]" if member[1].isupper() else members


def _is_class(member: str) -> bool:
    return member.startswith("\\") and member[1:].lower() in MEMBERS
