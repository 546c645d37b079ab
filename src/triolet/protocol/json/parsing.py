"""Parse JSON from clients: one object of Unicode text and finite numbers, within limits, without holding the GIL long.

Python's parser is one C call that holds the GIL until its end, so a long body parsed in a thread still stops the event
loop. Therefore a long text is handled in windows of 4 KiB, with a bytecode boundary after each, where another thread
can take the GIL:

* `check_shape` counts values and nesting outside of strings before anything is built. A body of millions of keys is
  refused after one window too many.
* `_LongText` parses the structure in Python and long strings and runs of numbers window by window in C.

Between windows, and between the items of a long list that is structured, `between_windows` is called: a thread that
parses gives way there.

A short text is parsed by `json.loads`: it takes less than a millisecond.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from json.decoder import scanstring  # type: ignore[attr-defined]  # public by name, absent from typeshed
from typing import Any, Final, TypeVar

import attrs

from triolet.core.json_text import PIECE_ITEMS, between_windows, giving_way, release
from triolet.core.untracked import hide_numbers, show
from triolet.errors import TrioletError
from triolet.protocol.errors import WireError

LONG_TEXT: Final = 2**16  # characters; shorter texts take less than a millisecond to parse
# Characters handled in one C call: less than half a millisecond by the slowest pattern. The event loop takes the GIL
# some twenty times for one short request, and each time waits for the call that the parse thread is in.
WINDOW: Final = 2**12
# A prompt is a list of token ids in a body, or in a list or an object in it. Where numbers mean something else, nothing
# needs more of them than of texts: a quarter of a million in a tool held the event loop for up to 25 ms.
MAX_NUMBERS_DEPTH: Final = 3

T = TypeVar("T")

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_BRACKETS = re.compile(r"[^\[\]{}]+")


@attrs.frozen(kw_only=True)
class JsonLimits:
    """Limits on the shape of a JSON text from a client."""

    max_values: int = 2**18  # values and keys in all; a prompt of token ids has one per token
    # Keys of one object, and items of one list: messages, tools, stops. Numbers do not count in a list that is at most
    # MAX_NUMBERS_DEPTH levels deep.
    max_members: int = 2048
    max_depth: int = 128  # objects and lists inside each other


def parse_object(
    raw: str | bytes | Sequence[bytes | bytearray], limits: JsonLimits | None = None
) -> dict[str, Any]:
    """Parse one JSON object.

    Args:
        raw: the text, or its pieces; longer than 64 KiB only in a thread.
        limits: on its shape.
    Raises:
        WireError: `invalid_json` with the position, or `json_too_large`.
    """
    limits = limits or JsonLimits()
    try:
        text = raw if isinstance(raw, str) else _decoded([raw] if isinstance(raw, bytes) else raw)
        check_shape(text, limits)
        value = _parse_short(text, limits) if len(text) < LONG_TEXT else _LongText(text, limits).parse()
    except RecursionError:
        raise _invalid("it is nested too deep") from None
    except UnicodeError:
        raise _invalid("it holds something that is not Unicode text") from None
    except ValueError as error:  # also an integer of more digits than Python reads
        raise _invalid(str(error)) from None
    if not isinstance(value, dict):
        raise _invalid(f"it must be an object, got {type(value).__name__}")
    return value


def structured_object(
    owned: list[dict[str, Any]], structure: Callable[[dict[str, Any]], T], kept: list[Any] | None = None
) -> T:
    """Structure a long JSON object, and free piece by piece what is not kept of it.

    Args:
        owned: the object that was parsed, alone in a list that is the only thing to refer to it; it is emptied.
        structure: makes of the object what is wanted.
        kept: gets the parts that the result refers to, for `release` once it is not used any more.
    Raises:
        TrioletError: what `structure` raises, without the frames where it arose: they refer to the object.
    """
    try:
        return structure(owned[0])
    except TrioletError as error:
        error.__cause__ = error.__context__ = None
        raise error.with_traceback(None) from None
    finally:
        shared = release(owned)
        if kept is not None:
            kept += shared


def _decoded(pieces: Sequence[bytes | bytearray]) -> str:
    decoder = codecs.getincrementaldecoder("utf-8")()
    texts = []
    give_way = between_windows.get()
    for piece in pieces:
        for start in range(0, len(piece), WINDOW):
            texts.append(decoder.decode(bytes(piece[start : start + WINDOW])))
            give_way()
    return "".join([*texts, decoder.decode(b"", final=True)])


def check_shape(text: str, limits: JsonLimits) -> None:
    """Count the values and the nesting of a JSON text before it is parsed.

    Raises:
        WireError: `json_too_large`, or `invalid_json` for the depth.
    """
    num_values = depth = 0
    for outside in _outside_strings(text):
        # One value follows each of these; what a text that is not JSON counts does not matter, it fails later.
        num_values += outside.count(",") + outside.count(":") + outside.count("[") + outside.count("{")
        if num_values > limits.max_values:
            raise _too_large(f"must have at most {limits.max_values} values")
        num_open = outside.count("[") + outside.count("{")
        if depth + num_open > limits.max_depth:
            depth = _checked_depth(outside, depth, limits.max_depth)
        else:
            depth += num_open - outside.count("]") - outside.count("}")


def _checked_depth(outside: str, depth: int, max_depth: int) -> int:
    for bracket in _BRACKETS.sub("", outside):
        depth += 1 if bracket in "[{" else -1
        if depth > max_depth:
            raise _invalid(f"it is nested too deep: more than {max_depth} levels")
    return depth


def _outside_strings(text: str) -> Iterator[str]:
    """Yield what stands outside of strings, window by window."""
    start, is_inside = 0, False
    give_way = between_windows.get()
    while start < len(text):
        stop = min(start + WINDOW, len(text))
        num_backslashes = 0
        while num_backslashes < stop - start and text[stop - 1 - num_backslashes] == "\\":
            num_backslashes += 1
        stop += (
            num_backslashes % 2
        )  # a window never ends between a backslash and the character that it escapes
        window = text[start:stop].replace("\\\\", "").replace('\\"', "")
        parts = window.split('"')
        yield "".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0
        start = stop
        give_way()


def _parse_short(text: str, limits: JsonLimits) -> Any:
    def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(pairs) > limits.max_members:
            raise _too_many_members(limits)
        return dict(pairs)

    value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=checked)
    if _SURROGATE.search(text):
        # Half of a surrogate pair is no character: no tokenizer takes it and no frame can carry it.
        json.dumps(value, ensure_ascii=False).encode()
    # A shorter text has no room for a longer list.
    if len(text) > 2 * limits.max_members and isinstance(value, dict):
        _check_lists(value, limits)
    return value


def _check_lists(value: dict[str, Any], limits: JsonLimits) -> None:
    left: list[tuple[Any, int]] = [(value, 1)]
    while left:
        item, depth = left.pop()
        items = item if isinstance(item, list) else list(item.values())
        if len(items) > limits.max_members and isinstance(item, list):
            num_members = len(items) if depth > MAX_NUMBERS_DEPTH else sum(map(_is_no_number, items))
            if num_members > limits.max_members:
                raise _too_many_members(limits)
        left += [(one, depth + 1) for one in giving_way(items) if isinstance(one, list | dict)]


def _is_no_number(value: Any) -> bool:
    return type(value) not in (int, float)


class _LongText:
    """Parser of one long JSON text, in pure Python around bounded C calls."""

    _SPACE = re.compile(r"[ \t\n\r]*")
    _NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
    _NUMBERS = re.compile(r"[-+.eE0-9, \t\n\r]+")
    # Possessive, as nothing follows that a shorter match could help; plain text is then one step for a whole run.
    _STRING_PIECE = re.compile(r'(?:[^"\\\x00-\x1f]++|\\[^u]|\\u[0-9a-fA-F]{4})*+')
    _HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
    _WORDS: Final[Mapping[str, Any]] = {"true": True, "false": False, "null": None}

    def __init__(self, text: str, limits: JsonLimits) -> None:
        self._text, self._limits = text, limits
        self._keys: dict[str, str] = {}  # one copy of each: thousands of objects may have the same ones
        self._made: list[Any] = []  # all objects and lists so far
        self._depth = 0
        self._give_way = between_windows.get()

    def parse(self) -> Any:
        try:
            value, end = self._value(self._skip(0))
            if self._skip(end) != len(self._text):
                raise json.JSONDecodeError("Extra data", self._text, end)
        except (ValueError, RecursionError, WireError) as error:
            raise error.with_traceback(None) from None  # its frames refer to what has been made
        else:
            self._made.clear()
            return value
        finally:
            self._free_made()

    def _free_made(self) -> None:
        """Free what was made of a text that is wrong, the outer objects first: each call frees few of them."""
        self._made.reverse()
        while self._made:
            del self._made[-PIECE_ITEMS:]
            self._give_way()

    def _skip(self, start: int) -> int:
        while (
            match := self._SPACE.match(self._text, start, start + WINDOW)
        ) and match.end() == start + WINDOW:
            start += WINDOW
        return match.end() if match else start

    def _value(self, start: int) -> tuple[Any, int]:
        self._give_way()
        text = self._text
        first = text[start : start + 1]
        if first == '"':
            return self._string(start + 1)
        if first in ("{", "["):
            self._depth += 1
            made = self._object(start + 1) if first == "{" else self._list(start + 1)
            self._depth -= 1
            return made
        for word, value in self._WORDS.items():
            if text.startswith(word, start):
                return value, start + len(word)
        match = self._NUMBER.match(text, start, start + 5000)  # Python reads integers of 4300 digits at most
        if not match or match.end() == start + 5000:
            raise json.JSONDecodeError("Expecting value", text, start)
        return json.loads(match[0], parse_float=_finite), match.end()

    def _object(self, start: int) -> tuple[dict[str, Any], int]:
        text = self._text
        members: dict[str, Any] = {}
        self._made.append(members)
        place = self._skip(start)
        if text[place : place + 1] == "}":
            return members, place + 1
        num_members = 0
        while True:
            if text[place : place + 1] != '"':
                raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, place)
            num_members += 1
            if num_members > self._limits.max_members:
                raise _too_many_members(self._limits)
            key, place = self._string(place + 1)
            key = self._keys.setdefault(key, key)
            place = self._skip(place)
            if text[place : place + 1] != ":":
                raise json.JSONDecodeError("Expecting ':' delimiter", text, place)
            members[key], place = self._value(self._skip(place + 1))
            place = self._skip(place)
            if text[place : place + 1] == "}":
                return members, place + 1
            if text[place : place + 1] != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", text, place)
            place = self._skip(place + 1)

    def _list(self, start: int) -> tuple[list[Any], int]:
        text = self._text
        items: list[Any] = []
        self._made.append(items)
        num_members = 0
        place = self._skip(start)
        if text[place : place + 1] == "]":
            return items, place + 1
        while True:
            num_before = len(items)
            place = self._numbers(place, items)
            is_number = text[place : place + 1] in "-0123456789"
            if self._depth > MAX_NUMBERS_DEPTH:
                num_members += len(items) - num_before + 1
            elif not is_number:
                num_members += 1
            if num_members > self._limits.max_members:
                raise _too_many_members(self._limits)
            if num_members == 0:
                hide_numbers(items)
            else:
                show(items)
            value, place = self._value(place)
            items.append(value)
            place = self._skip(place)
            if text[place : place + 1] == "]":
                return items, place + 1
            if text[place : place + 1] != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", text, place)
            place = self._skip(place + 1)

    def _numbers(self, start: int, items: list[Any]) -> int:
        """Append a run of numbers to a list, all but its last one; return the place after them."""
        match = self._NUMBERS.match(self._text, start, start + WINDOW)
        while match and (comma := match[0].rfind(",")) > 0:
            run = match[0][:comma]
            try:
                items += json.loads(f"[{run}]", parse_float=_finite)
            except json.JSONDecodeError as error:
                raise json.JSONDecodeError(error.msg, self._text, start + max(error.pos - 1, 0)) from None
            self._give_way()
            start = self._skip(start + comma + 1)
            match = self._NUMBERS.match(self._text, start, start + WINDOW)
        return start

    def _string(self, start: int) -> tuple[str, int]:
        text = self._text
        quote = text.find('"', start, start + WINDOW)
        if quote >= 0 and text.find("\\", start, quote) < 0:
            value, end = scanstring(text, start, True)
            return value, end
        pieces: list[str] = []
        while True:
            limit = start + WINDOW
            match = self._STRING_PIECE.match(text, start, limit)
            stop = match.end() if match else start
            if stop + 12 > limit and self._HIGH_SURROGATE.fullmatch(text, stop - 6, stop):
                stop -= 6  # the second half of the pair is in the next window
            if stop == start:  # the closing quote, or what is wrong here
                value, end = scanstring(text, start, True)
                return "".join([*pieces, value]), end
            value, _ = scanstring(text[start:stop] + '"', 0, True)
            value.encode()  # half of a surrogate pair is no character
            pieces.append(value)
            start = stop
            self._give_way()


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is too large a number")
    return number


def _too_large(rule: str) -> WireError:
    return WireError(f"The JSON {rule}.", code="json_too_large")


def _too_many_members(limits: JsonLimits) -> WireError:
    return _too_large(
        f"must have at most {limits.max_members} keys in an object and items in a list; lists of numbers may be longer "
        f"down to level {MAX_NUMBERS_DEPTH}"
    )


def _invalid(reason: str) -> WireError:
    return WireError(f"This is not valid JSON: {reason}", code="invalid_json")
