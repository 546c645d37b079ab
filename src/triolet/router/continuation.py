"""Continuation of a stream of events by another engine: pure, events in and events out.

An engine that dies takes its streams with it. The same request gives the same tokens on another engine, since each
token is a function of the request, its seed and the position. So the other engine computes the answer once more, what
the client has is left out, and what comes is made to fit: with ids, times and sequence numbers of the first engine.

How an answer is cut into deltas depends on the load, so deltas are compared by their text. All other events must come
in the same order. A difference ends the stream with an error (`Diverged`), and never continues it with another answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from triolet.errors import TrioletError

Event = dict[str, Any]

TERMINAL_TYPES: Final = ("response.completed", "response.failed", "response.incomplete")
# Answers to a message, and no events of the response: they are told at once, and never compared.
_ASIDE: Final = ("error", "response.steer.failed")
_DELTA: Final = ".delta"
_PLACES: Final = ("output_index", "content_index", "summary_index")


MAX_PIECES: Final = 256  # of a text before they are joined: a piece of one character takes 50 bytes


class Diverged(TrioletError):
    """Another engine gives another answer to the same request."""


@attrs.define(eq=False)
class SentText:
    """Text that was sent piece by piece, which costs no more than its pieces."""

    _joined: list[str] = attrs.field(factory=list)
    _pieces: list[str] = attrs.field(factory=list)

    def add(self, piece: str) -> None:
        """Add what was sent next."""
        self._pieces.append(piece)
        if len(self._pieces) >= MAX_PIECES:
            self._joined.append("".join(self._pieces))
            self._pieces.clear()

    def whole(self) -> str:
        """Return all that was sent."""
        return "".join((*self._joined, *self._pieces))


@attrs.define(eq=False)
class ExpectedText:
    """Text that comes again from another engine, cut otherwise: it is compared with what was sent.

    Args:
        whole: what was sent.
    """

    whole: str
    num_chars: int = 0  # that have come again

    @property
    def is_here(self) -> bool:
        """True if all has come again."""
        return self.num_chars == len(self.whole)

    def rest_of(self, text: str) -> str:
        """Return what of a piece follows on all that was sent.

        Raises:
            Diverged: it differs from what was sent.
        """
        num_old = min(len(text), len(self.whole) - self.num_chars)
        if not self.whole.startswith(text[:num_old], self.num_chars):
            missing = self.whole[self.num_chars : self.num_chars + 40]
            raise Diverged(f"it writes {text[:40]!r} where {missing!r} was sent")
        self.num_chars += num_old
        return text[num_old:]


@attrs.define(eq=False)
class _Unit:
    """One event without text, or adjacent deltas of one text."""

    key: tuple[Any, ...]  # type and places
    ids: tuple[str, ...] = ()
    text: SentText | None = None  # None for an event that is no delta
    num_logprobs: int = 0

    def add(self, event: Event) -> None:
        """Add a delta."""
        assert self.text is not None
        self.text.add(event["delta"])
        self.num_logprobs += len(event.get("logprobs") or ())


@attrs.define(eq=False)
class SentEvents:
    """Events of one response that a client has been sent."""

    num_events: int = 0  # with a sequence number
    response: Mapping[str, Any] | None = None  # as its first event told it; after a steering the successor
    _units: list[_Unit] = attrs.field(factory=list)

    def note(self, event: Event) -> None:
        """Note that an event was sent."""
        if "sequence_number" not in event or event["type"] in _ASIDE:
            return
        self.num_events = event["sequence_number"] + 1
        if "response" in event and (self.response is None or event["type"] == "response.created"):
            self.response = event["response"]
        key, last = _key(event), self._units[-1] if self._units else None
        if not event["type"].endswith(_DELTA):
            self._units.append(_Unit(key, _ids(event)))
        elif last is not None and last.key == key:
            last.add(event)
        elif event["delta"] or event.get("logprobs"):
            self._units.append(_Unit(key, _ids(event), SentText()))
            self._units[-1].add(event)

    @property
    def units(self) -> tuple[_Unit, ...]:
        """Return what was sent, without the cuts between deltas."""
        return tuple(self._units)

    def failure(self, code: str, message: str) -> Event:
        """Return the event that ends the response with an error; it must have begun."""
        assert self.response is not None
        error = {"code": code, "message": message}
        return {
            "type": "response.failed",
            "sequence_number": self.num_events,
            "response": {**self.response, "status": "failed", "error": error},
        }


@attrs.define(eq=False)
class Continuation:
    """Makes the events of another engine those that follow on what was sent."""

    sent: SentEvents
    _units: tuple[_Unit, ...] = attrs.field(init=False)
    _place: int = 0  # of the unit that comes next
    _expected: ExpectedText | None = None  # its text, once a piece of it came again
    _num_logprobs: int = 0
    _ids: dict[str, str] = attrs.field(factory=dict)  # of the first engine, by those of this one

    def __attrs_post_init__(self) -> None:
        self._units = self.sent.units

    def original_id(self, text: str) -> str:
        """Return the id that the client knows for one of this engine."""
        return self._ids.get(text, text)

    def new_id(self, text: str) -> str:
        """Return the id of this engine for one that the client knows."""
        return next((new for new, old in self._ids.items() if old == text), text)

    @property
    def response_id(self) -> str | None:
        """Id of this engine for the response; None before it has told it."""
        known = None if self.sent.response is None else self.sent.response["id"]
        return next((new for new, old in self._ids.items() if old == known), None)

    @property
    def has_caught_up(self) -> bool:
        """True if all that was sent has come again."""
        return self._place == len(self._units)

    def follow(self, event: Event) -> Event | None:
        """Return what the client is to be sent for an event of this engine; None for what it has.

        Raises:
            Diverged: the event differs from the one that was sent.
        """
        if event["type"] in _ASIDE:
            return self._told_aside(event)
        if "sequence_number" not in event:  # of the vendor: tells of now, and is not repeated
            return self._fitted(event) if self.has_caught_up else None
        if self.has_caught_up:
            return self._numbered(event)
        unit = self._units[self._place]
        if _key(event) != unit.key:
            raise Diverged(f"it sends {event['type']} where {unit.key[0]} was sent")
        if unit.text is None:
            self._learn(event, unit)
            self._next_unit()
            return None
        if self._expected is None:
            self._expected = ExpectedText(unit.text.whole())
        return self._delta(event, unit, self._expected)

    def _delta(self, event: Event, unit: _Unit, expected: ExpectedText) -> Event | None:
        new, logprobs = expected.rest_of(event["delta"]), event.get("logprobs") or []
        num_old = min(len(logprobs), unit.num_logprobs - self._num_logprobs)
        self._learn(event, unit)
        self._num_logprobs += num_old
        if not expected.is_here:
            return None
        is_last = self._place == len(self._units) - 1
        self._next_unit()
        if not new and num_old == len(logprobs):
            return None
        if not is_last:
            raise Diverged(f"it writes {new[:40]!r} where nothing followed")
        rest = {**event, "delta": new}
        return self._numbered({**rest, "logprobs": logprobs[num_old:]} if "logprobs" in event else rest)

    def _next_unit(self) -> None:
        self._place += 1
        self._expected, self._num_logprobs = None, 0

    def _learn(self, event: Event, unit: _Unit) -> None:
        self._ids.update(zip(_ids(event), unit.ids, strict=False))

    def _numbered(self, event: Event) -> Event:
        fitted = self._fitted(event)
        # The successor of a steered response has numbers of its own.
        is_successor = event["type"] == "response.created" and self.sent.num_events
        return fitted if is_successor else {**fitted, "sequence_number": self.sent.num_events}

    def _told_aside(self, event: Event) -> Event:
        fitted = self._fitted(event)
        # The error that ends a stream over HTTP has the number of the event before it.
        is_last = event["type"] == "error" and "sequence_number" in event
        return {**fitted, "sequence_number": self.sent.num_events - 1} if is_last else fitted

    def _fitted(self, event: Event) -> Event:
        fitted: Event = _replaced(event, self._ids)
        known = self.sent.response
        if "response" in fitted and known is not None and fitted["response"]["id"] == known["id"]:
            fitted["response"]["created_at"] = known["created_at"]
        return fitted


def _key(event: Event) -> tuple[Any, ...]:
    return (event["type"], *(event.get(place) for place in _PLACES))


def _ids(event: Event) -> tuple[str, ...]:
    """Return the ids in an event, always in the same order."""
    item, response = event.get("item") or {}, event.get("response") or {}
    found = (response.get("id"), item.get("id"), item.get("call_id"), event.get("item_id"))
    return tuple(one if isinstance(one, str) else "" for one in found)


def _replaced(value: Any, ids: Mapping[str, str]) -> Any:
    match value:
        case str():
            return ids.get(value) or value
        case dict():
            return {name: _replaced(one, ids) for name, one in value.items()}
        case list():
            return [_replaced(one, ids) for one in value]
    return value
