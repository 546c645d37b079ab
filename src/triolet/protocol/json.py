"""JSON as it comes from strangers: one object, of plain Unicode text and finite numbers, not too deep."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from triolet.protocol.errors import WireError

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_object(raw: str | bytes) -> dict[str, Any]:
    """Read one JSON object.

    Raises:
        WireError: `invalid_json`, with what is wrong and where.
    """
    try:
        text = raw if isinstance(raw, str) else raw.decode()
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
        if _SURROGATE.search(
            text
        ):  # half a pair is no character: no tokenizer takes it and no frame can carry it
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise _invalid("it is nested too deep") from None
    except UnicodeError:
        raise _invalid("it holds something that is not Unicode text") from None
    except ValueError as error:  # also an integer of more digits than Python reads
        raise _invalid(str(error)) from None
    if not isinstance(value, dict):
        raise _invalid(f"it must be an object, got {type(value).__name__}")
    return value


class EncodedList(list[Any]):
    """A list that knows its JSON: what is told several times, and is long, is encoded once.

    Args:
        items: that nobody changes.
    """

    def __init__(self, items: Iterable[Any] = ()) -> None:
        super().__init__(items)
        self._texts = list(map(_dumps, self))

    def add(self, others: EncodedList) -> None:
        """Add the items of another one."""
        super().extend(others)
        self._texts += others._texts

    @property
    def texts(self) -> list[str]:
        """JSON of each item."""
        return self._texts


def encode(value: Mapping[str, Any]) -> str:
    """One line of JSON."""
    pieces: list[str] = []
    _write(value, pieces)
    return "".join(pieces)


def _write(value: Any, pieces: list[str]) -> None:
    """The pieces are joined once: what is long is not copied at every level that it stands in."""
    if isinstance(value, EncodedList):
        pieces += ("[", ",".join(value.texts), "]")
    elif not _holds_encoded(value):
        pieces.append(_dumps(value))
    elif isinstance(value, dict):
        for place, (key, item) in enumerate(value.items()):
            pieces += ("," if place else "{", _dumps(key), ":")
            _write(item, pieces)
        pieces.append("}")
    else:
        for place, item in enumerate(value):
            pieces.append("," if place else "[")
            _write(item, pieces)
        pieces.append("]")


def _holds_encoded(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(isinstance(item, EncodedList) or _holds_encoded(item) for item in items)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is too large a number")
    return number


def _invalid(reason: str) -> WireError:
    return WireError(f"This is not valid JSON: {reason}", code="invalid_json")
