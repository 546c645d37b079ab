"""A stream that another engine goes on with is the one that the first engine would have sent."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from tests.scale import one_in
from triolet.router.chunks import ChunkContinuation, SentChunks
from triolet.router.continuation import (
    MAX_PIECES,
    Continuation,
    Diverged,
    ExpectedText,
    SentEvents,
    SentText,
)

Event = dict[str, Any]
REASONING, ANSWER, ARGUMENTS = (
    "First I think about it.",
    "The answer is forty-two, of course.",
    '{"city": "Paris"}',
)


def pieces_of(text: str, draw: random.Random) -> list[str]:
    """Cut a text at random."""
    cuts = sorted(draw.sample(range(1, len(text)), draw.randrange(len(text) // 2)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def response_events(name: str, draw: random.Random, answer: str = ANSWER) -> list[Event]:
    """Return the events of one response as an engine sends them; ids have the engine's name in them."""
    whole = {"id": f"resp_{name}", "created_at": 100 + len(name), "status": "in_progress"}
    events: list[Event] = [
        {"type": "response.created", "response": whole},
        {"type": "response.in_progress", "response": whole},
    ]
    texts = (("reasoning_text", REASONING), ("output_text", answer), ("function_call_arguments", ARGUMENTS))
    for index, (kind, text) in enumerate(texts):
        item_id = f"item{index}_{name}"
        place = {"item_id": item_id, "output_index": index, "content_index": 0}
        item = {"id": item_id, "type": kind, "call_id": f"call{index}_{name}"}
        events.append({"type": "response.output_item.added", "output_index": index, "item": item})
        for piece in pieces_of(text, draw):
            logprobs = [{"token": char} for char in piece]
            events.append({"type": f"response.{kind}.delta", **place, "delta": piece, "logprobs": logprobs})
        events.append({"type": f"response.{kind}.done", **place, "text": text})
        events.append(
            {"type": "response.output_item.done", "output_index": index, "item": {**item, "text": text}}
        )
    output = [{"id": f"item{index}_{name}"} for index in range(len(texts))]
    events.append(
        {"type": "response.completed", "response": {**whole, "status": "completed", "output": output}}
    )
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


def joined(events: list[Event]) -> list[Event]:
    """Return events with adjacent deltas put together, and without their numbers."""
    found: list[Event] = []
    for event in events:
        event = {name: value for name, value in event.items() if name != "sequence_number"}
        if event["type"].endswith(".delta") and found and found[-1]["type"] == event["type"]:
            last = found[-1]
            found[-1] = {
                **last,
                "delta": last["delta"] + event["delta"],
                "logprobs": last["logprobs"] + event["logprobs"],
            }
        else:
            found.append(event)
    return found


def without_engines(text: str) -> str:
    """Leave out which engine began an item: that is the one that its id is from."""
    return re.sub(r"((?:item|call)\d)_\w+", r"\1", text)


def moved(streams: list[list[Event]], cuts: list[int]) -> list[Event]:
    """Return what a client gets if each engine dies after a number of events, but for the last one."""
    sent, received = SentEvents(), []
    for events, cut in zip(streams, [*cuts, None], strict=True):
        continuation = Continuation(sent) if sent.num_events else None
        for event in events[:cut]:
            followed = event if continuation is None else continuation.follow(event)
            if followed is not None:
                sent.note(followed)
                received.append(followed)
    return received


@pytest.mark.parametrize("seed", one_in(5, range(200)))
def test_a_response_that_is_moved_twice_is_one_whole_response(seed: int) -> None:
    draw = random.Random(seed)
    streams = [response_events(name, draw) for name in ("a", "bb", "ccc")]
    received = moved(streams, [draw.randrange(1, len(streams[0])), draw.randrange(0, len(streams[1]))])
    assert [event["sequence_number"] for event in received] == list(range(len(received)))
    ours, whole = json.dumps(joined(received)), json.dumps(joined(streams[0]))
    ids = set(re.findall(r"(?:item|call)\d_\w+", ours))
    assert len({name.partition("_")[0] for name in ids}) == len(ids), (
        "each part has one id from its begin to its end"
    )
    assert without_engines(ours) == without_engines(whole)


def test_an_answer_that_differs_from_what_was_sent_is_not_continued() -> None:
    draw = random.Random(0)
    first = response_events("a", draw)
    cut = next(i for i, event in enumerate(first) if event["type"] == "response.output_text.done")
    other = response_events("b", draw, answer=ANSWER.replace("forty", "fifty"))
    with pytest.raises(Diverged, match="was sent"):
        moved([first, other], [cut])


def test_an_answer_with_other_parts_is_not_continued() -> None:
    draw = random.Random(0)
    first = response_events("a", draw)
    with pytest.raises(Diverged, match="completed where"):
        moved([first, [*first[:2], first[-1]]], [6])


def test_events_of_the_vendor_are_not_repeated_and_not_numbered() -> None:
    draw = random.Random(1)
    first, second = response_events("a", draw), response_events("b", draw)
    vendor = {"type": "triolet:queue", "position": 1, "response_id": "resp_b"}
    received = moved([first, [*second[:1], vendor, *second[1:-1], vendor, second[-1]]], [5])
    told = [event for event in received if "sequence_number" not in event]
    assert told == [{**vendor, "response_id": "resp_a"}]


def test_answers_to_messages_are_no_events_of_the_response_that_they_are_about() -> None:
    draw = random.Random(1)
    first, second = response_events("a", draw), response_events("b", draw)
    steer = {"type": "response.steer.failed", "sequence_number": 0, "steer": {}}
    error = {"type": "error", "status": 404, "error": {}}
    received = moved([[*first[:4], steer], [second[0], error, *second[1:]]], [5])
    assert [event for event in received if event in (steer, error)] == [steer, error]
    numbers = [event["sequence_number"] for event in received if event not in (steer, error)]
    assert numbers == list(range(len(numbers)))


def test_the_error_that_ends_a_stream_over_http_has_the_number_of_the_event_before_it() -> None:
    draw = random.Random(1)
    first, second = response_events("a", draw), response_events("b", draw)
    error = {"type": "error", "code": "service_unavailable", "sequence_number": 0}
    received = moved([first, [second[0], error]], [5])
    assert received[-1] == {**error, "sequence_number": 4}


def test_the_successor_of_a_steered_response_that_was_moved_has_its_own_numbers_and_time() -> None:
    draw = random.Random(1)
    first, second, next_one = (response_events(name, draw) for name in ("a", "b", "cc"))
    received = moved([first, [*second, *next_one]], [5])
    numbers = [event["sequence_number"] for event in received]
    start = numbers.index(0, 1)
    assert numbers[:start] == list(range(start)) and numbers[start:] == list(range(len(next_one)))
    assert received[start]["response"] == next_one[0]["response"]
    assert received[-1]["response"]["created_at"] == next_one[0]["response"]["created_at"]


def test_a_response_that_ends_with_its_engine_after_a_steering_is_the_successor() -> None:
    sent, draw = SentEvents(), random.Random(0)
    for event in [*response_events("a", draw), *response_events("b", draw)[:4]]:
        sent.note(event)
    failure = sent.failure("server_error", "gone")
    assert (failure["sequence_number"], failure["response"]["id"]) == (4, "resp_b")


def test_a_response_that_no_engine_continues_ends_with_the_next_number() -> None:
    sent = SentEvents()
    for event in response_events("a", random.Random(0))[:4]:
        sent.note(event)
    failure = sent.failure("server_error", "gone")
    assert (failure["type"], failure["sequence_number"]) == ("response.failed", 4)
    assert failure["response"]["id"] == "resp_a"
    assert failure["response"]["error"] == {"code": "server_error", "message": "gone"}


# -------------------------------------------------------------------------------------------------------- chunks


TOOL_CHOICE = "choice 1"


def chat_chunks(name: str, draw: random.Random, *, usage: bool) -> list[Event]:
    """Return the chunks of two choices, one with a tool call, as an engine streams them."""
    head = {
        "id": f"chatcmpl-{name}",
        "created": 100 + len(name),
        "object": "chat.completion.chunk",
        "model": "m",
    }

    def chunk(index: int, finish: str | None = None, **delta: Any) -> Event:
        content = delta.get("content") or ""
        logprobs = {"content": [{"token": char} for char in content]} if content else None
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        if content or finish:  # ids may come with no text of their own
            choice["token_ids"] = [*map(ord, content), *([0] if finish else [])]
        return {**head, "choices": [choice]}

    def call(**fields: Any) -> Event:
        return chunk(1, tool_calls=[{"index": 0, **fields}])

    chunks = [chunk(0, role="assistant", content=""), chunk(1, role="assistant", content="")]
    chunks += [chunk(0, reasoning=piece, reasoning_content=piece) for piece in pieces_of(REASONING, draw)]
    chunks += [chunk(0, content=piece) for piece in pieces_of(ANSWER, draw)]
    chunks.append(call(id=f"call_{name}", type="function", function={"name": "weather", "arguments": ""}))
    chunks += [call(function={"arguments": piece}) for piece in pieces_of(ARGUMENTS, draw)]
    chunks += [chunk(0, "stop"), chunk(1, "tool_calls")]
    if usage:
        chunks.append({**head, "choices": [], "usage": {"total_tokens": 9}})
    return chunks


def message_of(chunks: list[Event]) -> Event:
    """Put chunks together as a client does."""
    found: Event = {
        "ids": {chunk["id"] for chunk in chunks},
        "created": {chunk["created"] for chunk in chunks},
    }
    found["usage"] = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        at = found.setdefault(
            f"choice {choice['index']}",
            {"calls": {}, "roles": [], "ends": [], "logprobs": [], "token_ids": []},
        )
        delta = choice["delta"]
        for name in ("content", "reasoning", "reasoning_content"):
            at[name] = at.get(name, "") + (delta.get(name) or "")
        at["roles"] += [delta["role"]] if "role" in delta else []
        at["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
        at["logprobs"] += (choice.get("logprobs") or {}).get("content", [])
        at["token_ids"] += choice.get("token_ids", [])
        for part in delta.get("tool_calls", ()):
            known = at["calls"].setdefault(part["index"], {"ids": [], "names": [], "arguments": ""})
            function = part.get("function", {})
            known["ids"] += [part["id"]] if "id" in part else []
            known["names"] += [function["name"]] if "name" in function else []
            known["arguments"] += function.get("arguments", "")
    return found


@pytest.mark.parametrize("seed", one_in(5, range(100)))
@pytest.mark.parametrize("usage", [False, True])
def test_chunks_that_another_engine_goes_on_with_are_one_message(seed: int, usage: bool) -> None:
    draw = random.Random(seed)
    first, second = (chat_chunks(name, draw, usage=usage) for name in ("a", "bb"))
    sent, received = SentChunks(), []
    for chunk in first[: draw.randrange(1, len(first))]:
        sent.note(chunk)
        received.append(chunk)
    continuation = ChunkContinuation(sent)
    for chunk in second:
        followed = continuation.follow(chunk)
        if followed is not None:
            sent.note(followed)
            received.append(followed)
    ours, whole = message_of(received), message_of(first)
    # a call that the second engine began has its id
    for one in (ours, whole):
        for known in one[TOOL_CHOICE]["calls"].values():
            known["ids"] = [name[:5] for name in known["ids"]]
    assert ours == whole


def test_ids_of_tokens_come_once_when_another_engine_goes_on() -> None:
    def chunk(name: str, text: str, token_ids: list[int], **more: Any) -> Event:
        choice = {"index": 0, "text": text, "finish_reason": None, "token_ids": token_ids, **more}
        return {"id": name, "created": 1, "choices": [choice]}

    sent = SentChunks()
    sent.note(chunk("a", "Hel", [1, 2], prompt_token_ids=[7]))
    continuation = ChunkContinuation(sent)
    assert continuation.follow(chunk("b", "H", [1], prompt_token_ids=[7])) is None
    # The third token has no text yet.
    assert continuation.follow(chunk("b", "el", [2, 3])) == chunk("a", "", [3])
    assert continuation.follow(chunk("b", "lo", [4])) == chunk("a", "lo", [4])


def test_chunks_with_another_text_are_not_continued() -> None:
    sent = SentChunks()
    sent.note(
        {"id": "a", "created": 1, "choices": [{"index": 0, "text": "Hello there", "finish_reason": None}]}
    )
    other = {"id": "b", "created": 2, "choices": [{"index": 0, "text": "Hello you", "finish_reason": None}]}
    with pytest.raises(Diverged, match="'Hello you' where 'Hello there'"):
        ChunkContinuation(sent).follow(other)


@pytest.mark.parametrize("is_chat", [True, False])
def test_chunks_that_end_before_all_that_was_sent_has_come_again_are_not_continued(is_chat: bool) -> None:
    def chunk(name: str, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        part: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
        return {"id": name, "created": 1, "choices": [{"index": 0, "finish_reason": finish_reason, **part}]}

    sent = SentChunks()
    sent.note(chunk("a", "Hello there"))
    continuation = ChunkContinuation(sent)
    assert continuation.follow(chunk("b", "Hel")) is None
    with pytest.raises(Diverged, match="it ends where ' there' was sent"):
        continuation.follow(chunk("b", "lo", "stop"))


def test_a_text_of_many_pieces_comes_again_as_it_was_sent() -> None:
    pieces = [f"{number} " for number in range(5 * MAX_PIECES + 3)]
    text = SentText()
    for piece in pieces:
        text.add(piece)
    assert text.whole() == "".join(pieces)
    expected = ExpectedText(text.whole())
    assert [expected.rest_of(piece) for piece in pieces] == [""] * len(pieces)
    assert expected.is_here
    assert expected.rest_of("new") == "new"
