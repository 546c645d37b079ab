r"""Regular expressions with ASCII classes, as vLLM's users expect them.

llguidance reads `\d`, `\w` and `\s` as classes of Unicode, in which `\d` has some 700 digits. In JSON Schema (ECMA-262)
and in vLLM's default engine they are those of ASCII; for more there is `\p{Nd}` and the like.
"""

from __future__ import annotations

import re

MEMBERS = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\x0b"}

# A whole class (a bracket that closes right after the opening is a member), an escaped character, or another one.
_PART = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\.|.", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


def ascii_classes(regex: str) -> str:
    r"""Return the expression with `\d`, `\w`, `\s` and their opposites spelled out.

    Raises:
        ValueError: it ends in a backslash.
    """
    # Brackets that hold an opposite are left as they are: they cannot be spelled there.
    return "".join(map(_spelled, _PART.findall(regex)))


def _spelled(part: str) -> str:
    if part == "\\":
        raise ValueError("regex ends in a backslash")
    if part.startswith("\\") and (members := MEMBERS.get(part[1].lower())):
        return f"[^{members}]" if part[1].isupper() else f"[{members}]"
    if len(part) > 1 and part.startswith("[") and not _holds_opposite(part):
        return _ESCAPED.sub(lambda found: MEMBERS.get(found[1], found[0]), part)
    return part


def _holds_opposite(brackets: str) -> bool:
    return any(letter in "DWS" for letter in _ESCAPED.findall(brackets))
