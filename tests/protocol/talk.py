"""A conversation and its engine's side, both spoken by the test."""

from __future__ import annotations

import itertools
import json
from typing import Any

from tests.protocol.make import NOW, assert_valid, create, output
from triolet import SamplingParams
from triolet.core.request.request import FinishReason
from triolet.protocol.responses import session
from triolet.protocol.responses.output_items import Event
from triolet.protocol.responses.requests import read_event
from triolet.protocol.responses.response import ResponseBuilder
from triolet.protocol.responses.session import Close, Effect, ResponsesContext, Turn
from triolet.protocol.responses.store import ResponseStore


def context(**fields: Any) -> ResponsesContext:
    numbers = itertools.count(1)
    defaults: dict[str, Any] = {
        "models": ("m", "alias"),
        "defaults": SamplingParams(),
        "store": ResponseStore(100, 2**20),
        "new_id": lambda prefix: f"{prefix}_{next(numbers)}",
    }
    return ResponsesContext(**{**defaults, **fields})


class Talk:
    """What was said on one connection; every event is held against the SDK's class for its type."""

    def __init__(self, subject: ResponsesContext | None = None, owner: str | None = None) -> None:
        self.context = subject or context()
        self.conversation = session.Session(self.context, owner)
        self.said: list[Event] = []
        self.started: list[Turn] = []
        self.stopped: list[Turn] = []
        self.closes: list[Close] = []

    def take(self, effects: list[Effect]) -> list[Event]:
        said = []
        for effect in effects:
            match effect:
                case session.Send(event):
                    assert not self.closes, "nothing is said after the close"
                    assert_valid(event)
                    said.append(event)
                case session.Start(turn):
                    self.started.append(turn)
                case session.Stop(turn):
                    self.stopped.append(turn)
                case Close():
                    assert not self.closes
                    self.closes.append(effect)
        self.said += said
        return said

    def hear(self, message: dict[str, Any] | str | bytes) -> list[Event]:
        raw = json.dumps(message) if isinstance(message, dict) else message
        event = read_event(raw, self.context.serves, self.context.planned)
        return self.take(self.conversation.receive(event, NOW))

    def create(self, **fields: Any) -> list[Event]:
        return self.hear({"type": "response.create", **create(**fields)})

    def begin(self, turn: Turn) -> list[Event]:
        return self.take(self.conversation.emit(turn, _answer(turn).begin(), NOW))

    def put(self, turn: Turn, text: str, reason: FinishReason | None = None) -> list[Event]:
        events = _answer(turn).add(output(text, reason), NOW)
        return self.take(self.conversation.emit(turn, events, NOW))

    def finish(self, turn: Turn, text: str = "Hi") -> list[Event]:
        return self.put(turn, text, FinishReason.STOP)


def _answer(turn: Turn) -> ResponseBuilder:
    assert turn.answer is not None
    return turn.answer


def endings(events: list[Event]) -> list[str]:
    """How requests ended, and in which lanes."""
    ends = ("error", "response.completed", "response.incomplete", "response.failed")
    return [f"{event.get('stream_id', '')}:{event['type']}" for event in events if event["type"] in ends]


def code(events: list[Event]) -> str:
    [event] = events
    return str(event["error"]["code"])
