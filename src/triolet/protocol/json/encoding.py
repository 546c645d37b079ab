"""Write JSON for clients; what is sent several times, or is long, is encoded in parts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import attrs

from triolet.core import json_text
from triolet.core.json_text import between_windows
from triolet.protocol.json.parsing import WINDOW

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class EncodedList(list[Any]):
    """List that keeps the JSON of its items: a long list that is sent several times is encoded once.

    Args:
        items: never changed afterwards.
    """

    def __init__(self, items: Iterable[Any] = ()) -> None:
        super().__init__(items)
        self._texts = list(map(_dumps, self))

    def add(self, others: EncodedList) -> None:
        """Append the items of another list."""
        super().extend(others)
        self._texts += others._texts

    @property
    def texts(self) -> list[str]:
        """The JSON of each item."""
        return self._texts


@attrs.frozen
class EncodedItems:
    """JSON of the items of a list, in place of the items: for what is only sent, and several times.

    Long items are encoded piece by piece, for a thread.
    """

    texts: tuple[str, ...]

    @classmethod
    def of(cls, items: Iterable[Any]) -> Self:
        """Encode items, which are not kept."""
        return cls(tuple(json_text.encode(_ENCODER, item) for item in items))

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def num_chars(self) -> int:
        """Length of all texts together, characters."""
        return sum(map(len, self.texts))


@attrs.frozen
class EncodedObject:
    """JSON of an object, in place of the object: for what is only sent, and several times.

    A long object is encoded piece by piece, for a thread.
    """

    json: str

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Self:
        """Encode an object, which is not kept."""
        return cls(json_text.encode(_ENCODER, value))


class EncodedText(str):
    """Text that keeps its JSON: a long text that is sent several times is encoded once, window by window."""

    __slots__ = ("json",)
    json: str

    def __new__(cls, text: str) -> Self:
        made = super().__new__(cls, text)
        made.json = _text_of(text)
        return made


def encode(value: Mapping[str, Any]) -> str:
    """Return one line of JSON."""
    pieces: list[str] = []
    _write(value, pieces)
    return "".join(pieces)


def encode_long(value: Mapping[str, Any]) -> bytes:
    """Return an object with long texts and long lists of numbers as JSON, made window by window for a thread."""
    members = []
    for key, item in value.items():
        if not isinstance(item, str | list | tuple) or len(item) <= WINDOW:
            text = _dumps(item)
        elif isinstance(item, str):
            text = _text_of(item)
        else:
            text = f"[{','.join(_windows(item))}]"
        members.append(f"{_dumps(key)}:{text}".encode())
    return b"{%s}" % b",".join(members)


def _text_of(text: str) -> str:
    """Return the JSON of a text, made window by window; it is copied once, in one C call."""
    return "".join(['"', *_windows(text), '"'])


def _windows(value: Sequence[Any]) -> Iterator[str]:
    """Yield the JSON of a text or a list, without its quotes or brackets, window by window."""
    give_way = between_windows.get()
    for start in range(0, len(value), WINDOW):
        yield _dumps(value[start : start + WINDOW])[1:-1]
        give_way()


_ENCODED = (EncodedList, EncodedItems, EncodedObject, EncodedText)


def _write(value: Any, pieces: list[str]) -> None:
    # The pieces are joined once, so a long text is not copied at every level of nesting.
    if isinstance(value, EncodedList | EncodedItems):
        pieces += ("[", ",".join(value.texts), "]")
    elif isinstance(value, EncodedText | EncodedObject):
        pieces.append(value.json)
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
    return any(isinstance(item, _ENCODED) or _holds_encoded(item) for item in items)


def _dumps(value: Any) -> str:
    return _ENCODER.encode(value)
