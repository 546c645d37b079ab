from __future__ import annotations

import json
from itertools import count
from typing import Any

import attrs
import pytest

from tests.protocol.make import NOW, create, output
from triolet import SamplingParams
from triolet.core.output.outputs import RequestOutput
from triolet.core.request.request import FinishReason
from triolet.errors import SnapshotError
from triolet.protocol.responses.output_items import Event
from triolet.protocol.responses.requests import CreateResponse
from triolet.protocol.responses.response import ResponseBuilder
from triolet.protocol.responses.session import ResponsesContext
from triolet.protocol.responses.snapshot import ReplaySkipper, SavedResponse, from_bytes, to_bytes
from triolet.protocol.responses.store import ResponseStore

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
STORIES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("Once there was a fox.", {"metadata": {"a": "b"}, "stop": ["z"], "temperature": 0.5, "seed": 3}),
    "logprobs": ("Once there was", {"include": ["message.output_text.logprobs"], "top_logprobs": 1}),
    "calls": (f"Let me see. {CALL}\n{CALL}", {"tools": [WEATHER], "text": {"format": {"type": "text"}}}),
    "thoughts": ("<think>A fox?</think>Yes, a fox.", {"reasoning": {"effort": "low"}}),
}
EARLIER = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello ✓"})


def context(**fields: Any) -> ResponsesContext:
    numbers = count(1)
    known: dict[str, Any] = {
        "models": ("m",),
        "defaults": SamplingParams(),
        "store": ResponseStore(8, 2**20),
        "new_id": lambda prefix: f"{prefix}_{next(numbers)}",
        "tool_parser": "hermes",
        "reasoning_parser": "qwen3",
        "saves_snapshot": True,
    }
    return ResponsesContext(**{**known, **fields})


def begun(ours: ResponsesContext, **fields: Any) -> ResponseBuilder:
    request = CreateResponse.of(create(resumable=True, **fields))
    return ours.answer(request, ours.planned(request), EARLIER, NOW)


def outputs_of(text: str, *, logprobs: bool) -> list[RequestOutput]:
    """A character each, of which some have two tokens."""
    outputs = [output(char, num_tokens=1 + place % 2, logprobs=logprobs) for place, char in enumerate(text)]
    return [*outputs, output("", FinishReason.STOP, logprobs=logprobs, num_cached_tokens=2)]


def joined(outputs: list[RequestOutput]) -> RequestOutput:
    """As an engine that goes on brings what it had."""
    first, *others = attrs.evolve(outputs[0]), *outputs[1:]  # `add` changes it
    for other in others:
        first = first.add(other, aggregate=True)
    return first


def told(subject: ResponseBuilder, outputs: list[RequestOutput]) -> list[Event]:
    return [event for one in outputs for event in subject.add(one, NOW + 1)]


def through_a_file(
    subject: ResponseBuilder, engine: str | None, next_one: ResponsesContext
) -> tuple[ResponseBuilder, SavedResponse]:
    history = subject.history()
    assert history is not None
    data, num_kept = to_bytes([SavedResponse.of(subject, history, "owner", engine)])
    assert num_kept == 1
    [kept] = from_bytes(data)
    assert kept.owner == "owner" and kept.engine == engine
    return kept.answer(next_one), kept


@pytest.mark.parametrize("story", STORIES)
def test_an_answer_goes_on_in_another_server_as_if_nothing_had_been(story: str) -> None:
    text, fields = STORIES[story]
    outputs = outputs_of(text, logprobs=story == "logprobs")
    unbroken = begun(context(), **fields)
    events = [*unbroken.begin(), *told(unbroken, outputs)]
    for place in range(len(outputs)):
        ours = context()
        first = begun(ours, **fields)
        before = [*first.begin(), *told(first, outputs[:place])]
        second, kept = through_a_file(first, "engine", attrs.evolve(ours, saves_snapshot=False))
        assert second.events_after(-1) == before
        rest = ReplaySkipper.after(kept.history())
        # The engine has gone one output further than the first server told.
        news = [new for one in [joined(outputs[: place + 1]), *outputs[place + 1 :]] if (new := rest.of(one))]
        assert before + told(second, news) == events
        assert second.stored("owner") == unbroken.stored("owner")


@pytest.mark.parametrize("story", STORIES)
def test_an_answer_that_is_over_can_be_read_again_in_another_server(story: str) -> None:
    text, fields = STORIES[story]
    first = begun(context(), **fields)
    events = [*first.begin(), *told(first, outputs_of(text, logprobs=story == "logprobs"))]
    second, _ = through_a_file(first, None, context())
    assert second.is_over and second.events_after(-1) == events
    assert second.stored(None) == first.stored(None)


def test_what_a_server_can_not_finish_is_left_without_a_last_event() -> None:
    subject = begun(context())
    subject.add(output("Hi"), NOW)
    assert subject.add(output(" there", FinishReason.SHUTDOWN), NOW) == []
    assert subject.is_handed_over and not subject.is_over
    history = subject.history()
    assert history is not None and [piece.text for piece in history.pieces] == ["Hi"]


@pytest.mark.parametrize("saves_snapshot", [True, False])
def test_what_is_not_resumable_or_not_handed_over_fails_with_the_server(saves_snapshot: bool) -> None:
    ours = context(saves_snapshot=saves_snapshot)
    request = CreateResponse.of(create(resumable=not saves_snapshot))
    subject = ours.answer(request, ours.planned(request), (), NOW)
    assert subject.add(output("", FinishReason.SHUTDOWN), NOW)[-1]["type"] == "response.failed"


def test_what_was_cancelled_or_has_not_begun_is_not_kept() -> None:
    subject = begun(context())
    assert subject.history() is None
    subject.begin()
    subject.cancel(NOW)
    assert subject.history() is None


def test_what_would_make_the_file_too_long_is_left_out() -> None:
    kept, ours = [], context()
    for length in (10, 10_000, 20):
        subject = begun(ours, input="x" * length)
        subject.begin()
        history = subject.history()
        assert history is not None
        kept.append(SavedResponse.of(subject, history, None, "engine"))
    data, num_kept = to_bytes(kept, max_bytes=5000)
    assert num_kept == 2 and len(data) <= 5000
    assert [one.chat[-1]["content"] for one in from_bytes(data)] == ["x" * 10, "x" * 20]


def a_file(**changes: Any) -> bytes:
    subject = begun(context())
    subject.add(output("Hi"), NOW)
    history = subject.history()
    assert history is not None
    data, _ = to_bytes([SavedResponse.of(subject, history, None, "engine")])
    head, line, end = data.split(b"\n")
    return b"\n".join([head, json.dumps({**json.loads(line), **changes}).encode(), end])


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "JSON"),
        (b"\x80\xff\n", "JSON"),
        (b'{"a": 1}\n', "something else"),
        (a_file().replace(b'"version": 1', b'"version": 7'), "version 1; got 7"),
        (a_file()[:-10], "1 whole lines; got 0"),
        (a_file() + b"{}\n", "1 whole lines; got 2"),
        (a_file(pieces="Hi"), "pieces must be a list"),
        (a_file(created_at="now"), "created_at must be a whole number"),
        (a_file(pieces=[{"text": "a", "num_tokens": 1, "logprobs": [1]}]), "list of objects"),
        (
            a_file().replace(b'"num_responses": 1', b'"num_responses": 2') + a_file().split(b"\n")[1] + b"\n",
            "once",
        ),
    ],
)
def test_bytes_that_no_server_wrote_are_refused_with_the_reason(data: bytes, problem: str) -> None:
    with pytest.raises(SnapshotError, match=problem):
        from_bytes(data)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"request": {"model": "m", "top_logprobs": -2}}, "top_logprobs must be non-negative or -1"),
        ({"finish_reason": "stop"}, "either it has ended"),
        ({"finish_reason": "boredom", "engine": None}, "boredom"),
        ({"output": None}, "no output"),
    ],
)
def test_a_response_that_can_not_have_been_is_refused_with_the_reason(
    changes: dict[str, Any], problem: str
) -> None:
    [kept] = from_bytes(a_file(**changes))
    with pytest.raises(SnapshotError, match=problem):
        kept.answer(context())


def test_the_tools_of_a_response_are_planned_once_in_each_life_of_the_server(
    count_plans: list[str | None],
) -> None:
    subject = begun(context(), tools=[WEATHER])
    subject.begin()
    assert count_plans == ["hermes"]
    through_a_file(subject, "engine", context())
    assert count_plans == ["hermes", "hermes"]
