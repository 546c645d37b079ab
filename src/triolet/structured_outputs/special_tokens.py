"""Delimiters in a grammar: each may be one special token or spelled from several tokens.

To a grammar a special token is no text, but the parser of the answer sees no difference. So both are allowed wherever a
delimiter stands.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

SpecialToken = Callable[[str], int | None]
"""The id of a text that is one special token, or None."""

TEXT = r"TEXT: /(.|\n)*/"


def delimiter_rule(mark: str, special_token: SpecialToken) -> str:
    """Return the rule of a delimiter."""
    token_id = special_token(mark)
    return json.dumps(mark) if token_id is None else f"({json.dumps(mark)} | <[{token_id}]>)"


def text_until_delimiter(name: str, mark: str, special_token: SpecialToken) -> Iterator[str]:
    """Return a rule of that name: text (`TEXT`) up to a delimiter, and the delimiter."""
    token_id = special_token(mark)
    yield f"{name}_spelled[lazy]: TEXT {json.dumps(mark)}"
    yield f"{name}: {name}_spelled" + ("" if token_id is None else f" | TEXT <[{token_id}]>")
