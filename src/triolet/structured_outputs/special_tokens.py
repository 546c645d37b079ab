"""Marks in a grammar: a text that means something whether it is one token or spelled from several.

To a grammar a special token is no text, and text is no special token; what reads the answer sees no difference. So
either stands wherever a mark does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

SpecialToken = Callable[[str], int | None]
"""The id of a text that is one special token, or None."""

TEXT = r"TEXT: /(.|\n)*/"


def delimiter_rule(mark: str, special_token: SpecialToken) -> str:
    """The mark itself."""
    token_id = special_token(mark)
    return json.dumps(mark) if token_id is None else f"({json.dumps(mark)} | <[{token_id}]>)"


def text_until_delimiter(name: str, mark: str, special_token: SpecialToken) -> Iterator[str]:
    """A rule of that name: text (`TEXT`) up to a mark, and the mark."""
    token_id = special_token(mark)
    yield f"{name}_spelled[lazy]: TEXT {json.dumps(mark)}"
    yield f"{name}: {name}_spelled" + ("" if token_id is None else f" | TEXT <[{token_id}]>")
