from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from tests.protocol.make import NOW, answer, assert_valid, output, types
from triolet.core.request.request import FinishReason
from triolet.core.tools import plan_tools
from triolet.protocol.errors import WireError
from triolet.protocol.json import encoding
from triolet.protocol.responses.output_items import Event
from triolet.protocol.responses.response import ResponseBuilder

WHOLE = [
    "created",
    "in_progress",
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
    "completed",
]


def told(subject: ResponseBuilder, *outputs: tuple[str, FinishReason | None]) -> list[Event]:
    events = subject.begin()
    for text, reason in outputs:
        events += subject.add(output(text, reason), NOW + 1)
    return events


def check_events(events: list[Event]) -> None:
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        assert_valid(event)


def test_long_parts_that_a_response_repeats_are_encoded_once_where_the_request_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded: list[int] = []

    class Recorder(json.JSONEncoder):
        def iterencode(self, o: Any, _one_shot: bool = False) -> Iterator[str]:
            for text in super().iterencode(o, _one_shot):
                encoded.append(len(text))
                yield text

        def encode(self, o: Any) -> str:
            return "".join(self.iterencode(o))

    monkeypatch.setattr(encoding, "_ENCODER", Recorder(ensure_ascii=False, separators=(",", ":")))
    tool = {"type": "function", "name": "f", "parameters": {"enum": list(range(10_000))}}
    form = {"type": "json_schema", "name": "x", "schema": {"enum": list(range(10_000))}}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}] * 500}
    subject = answer(instructions="x" * 50_000, tools=[tool], text={"format": form}, tool_choice=choice)
    assert sum(encoded) > 150_000
    encoded.clear()
    texts = [encoding.encode(event) for event in told(subject, ("Hi", FinishReason.STOP))]
    assert sum(encoded) < 20_000
    for text in (texts[0], texts[1], texts[-1]):
        response = json.loads(text)["response"]
        assert response["instructions"] == "x" * 50_000
        assert response["tools"] == [{"description": None, "strict": False, **tool}]
        assert (response["text"], response["tool_choice"]) == ({"format": form}, choice)


def test_an_answer_is_told_in_order_and_each_event_is_one_that_the_sdk_knows() -> None:
    events = told(answer(), ("Hi", None), (" there", FinishReason.STOP))
    check_events(events)
    assert types(events) == WHOLE
    response = events[-1]["response"]
    assert response["status"] == "completed" and response["completed_at"] == NOW + 1
    assert response["output"][0]["content"][0]["text"] == "Hi there"
    assert response["output"] == [events[-2]["item"]]
    assert response["finish_reason"] == "stop"
    assert response["metrics"] == {"queue_s": 0.5, "ttft_s": 1.0, "decode_s": 1.0}


def test_the_usage_counts_prompt_cached_and_answer_tokens() -> None:
    subject = answer()
    [*_, last] = subject.add(
        output("Hi", FinishReason.STOP, num_tokens=4, num_cached_tokens=2, num_cache_creation_tokens=1), NOW
    )
    assert last["response"]["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 1},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7,
    }


@pytest.mark.parametrize(
    ("reason", "kind", "status", "details"),
    [
        (FinishReason.STOP, "completed", "completed", None),
        (FinishReason.LENGTH, "incomplete", "incomplete", {"reason": "max_output_tokens"}),
        (FinishReason.REPETITION, "incomplete", "incomplete", None),
        (FinishReason.ABORT, "incomplete", "cancelled", None),
        (FinishReason.DEADLINE, "incomplete", "cancelled", None),
        (FinishReason.SHUTDOWN, "failed", "failed", None),
        (FinishReason.ERROR, "failed", "failed", None),
    ],
)
def test_every_reason_has_its_ending(
    reason: FinishReason, kind: str, status: str, details: dict[str, str] | None
) -> None:
    events = told(answer(), ("Hi", None), ("", reason))
    check_events(events)
    assert events[-1]["type"] == f"response.{kind}"
    response = events[-1]["response"]
    assert (response["status"], response["incomplete_details"]) == (status, details)
    assert response["finish_reason"] == reason.value
    assert (response["error"] is not None) == (kind == "failed")
    assert response["output"][0]["status"] == ("completed" if kind == "completed" else "incomplete")


def test_an_answer_of_nothing_is_a_message_without_text() -> None:
    events = told(answer(), ("", FinishReason.STOP))
    check_events(events)
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


def test_a_cancelled_answer_ends_with_what_was_sent() -> None:
    subject = answer()
    events = told(subject, ("Hi", None)) + subject.cancel(NOW)
    check_events(events)
    assert types(events)[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert events[-1]["response"]["status"] == "cancelled"
    assert events[-1]["response"]["usage"]["output_tokens"] == 1


def test_an_answer_cancelled_before_it_began_still_has_a_beginning_and_an_end() -> None:
    events = answer().cancel(NOW)
    check_events(events)
    assert types(events) == ["created", "in_progress", "incomplete"]
    assert events[-1]["response"]["usage"] is None


def test_a_steered_answer_says_so() -> None:
    subject = answer()
    [*_, last] = told(subject, ("Hi", None)) + subject.cancel(NOW, steered=True)
    assert_valid(last)
    assert last["response"]["incomplete_details"] == {"reason": "steered"}


def test_a_failed_answer_has_an_error_of_the_closed_list_and_no_error_event() -> None:
    subject = answer()
    events = told(subject, ("Hi", None)) + subject.fail(WireError("It broke.", code="whatever"), NOW)
    check_events(events)
    assert types(events)[-1] == "failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "It broke."}
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"


def test_after_its_ending_nothing_is_told_any_more() -> None:
    subject = answer()
    told(subject, ("Hi", FinishReason.STOP))
    assert subject.add(output("more"), NOW) == []
    assert subject.cancel(NOW) == [] and subject.fail(WireError("late"), NOW) == [] and subject.begin() == []
    assert subject.is_over


def test_taking_an_input_in_gives_no_output() -> None:
    events = told(answer(generate=False), ("Hi", FinishReason.LENGTH))
    check_events(events)
    assert types(events) == ["created", "in_progress", "completed"]
    response = events[-1]["response"]
    assert response["output"] == [] and response["usage"]["output_tokens"] == 0
    assert response["usage"]["input_tokens"] == 3


def test_logprobs_come_with_the_deltas_and_again_when_the_text_is_done() -> None:
    subject = answer(include=["message.output_text.logprobs"], top_logprobs=1)
    events = subject.begin()
    events += subject.add(output("", logprobs=True), NOW)  # half a character: its token waits for the text
    events += subject.add(output("Hi", logprobs=True), NOW)
    events += subject.add(output("", FinishReason.STOP, logprobs=True), NOW)
    check_events(events)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [(delta["delta"], len(delta["logprobs"])) for delta in deltas] == [("Hi", 2), ("", 1)]
    [done] = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == [one for delta in deltas for one in delta["logprobs"]]
    assert done["logprobs"][0] == {
        "token": "Hi",
        "bytes": [72, 105],
        "logprob": -0.1,
        "top_logprobs": [{"token": "Hi", "bytes": [72, 105], "logprob": -0.1}],
    }


def test_logprobs_of_a_call_open_no_message_behind_it() -> None:
    forced = {"type": "function", "name": ADD["name"]}
    subject = answer(tools=[ADD], tool_choice=forced, include=["message.output_text.logprobs"])
    subject.add(output('{"a":1}', logprobs=True), NOW)
    subject.add(output("", FinishReason.STOP, logprobs=True), NOW)
    assert [item["type"] for item in subject.response()["output"]] == ["function_call"]


def test_without_being_asked_for_there_are_no_logprobs() -> None:
    events = answer().add(output("Hi", FinishReason.STOP, logprobs=True), NOW)
    assert all(event.get("logprobs", []) == [] for event in events)


ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "add", "arguments": {"x":1}}</tool_call>'


def test_reasoning_and_calls_are_items_of_their_own() -> None:
    plan = plan_tools([ADD], tool_parser="hermes", reasoning_parser="qwen3")
    subject = answer(plan, tools=[ADD])
    pieces = ["<think>Hm", "m</think>", "I call.", CALL[:40], CALL[40:], CALL]
    events = told(subject, *((piece, None) for piece in pieces), ("", FinishReason.STOP))
    check_events(events)
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert [item["status"] for item in output] == ["completed"] * 4
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Hmm"}]
    assert output[2]["call_id"] != output[3]["call_id"]
    assert events[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] == 2
    deltas = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == output[2]["arguments"] + output[3]["arguments"]
    [message] = subject.messages()
    assert message["content"] == "I call."
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"x":1}'}


def test_a_call_that_was_cut_short_is_incomplete() -> None:
    events = told(answer(tools=[ADD]), (CALL[:45], FinishReason.LENGTH))
    check_events(events)
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    ],
    ids=["text", "logprobs"],
)
def test_the_memory_of_a_resumable_response_is_estimated_from_above(fields: dict[str, Any]) -> None:
    answer(resumable=True, **fields).add(output("warm"), NOW)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        built = answer(resumable=True, **fields)
        for number in range(500):
            built.add(output(f"word {number}", logprobs="include" in fields), NOW)
        built.add(output(".", FinishReason.STOP), NOW)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken <= built.num_bytes <= 4 * taken
