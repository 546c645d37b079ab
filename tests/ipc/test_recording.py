"""The format of recordings: every record survives the way through a line, and a wrong line is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from triolet import SamplingParams
from triolet.core.request.request import FinishReason
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.errors import RecordingError
from triolet.ipc.recording import (
    Departure,
    EndedAnswer,
    EndRecord,
    EngineRecord,
    Record,
    RequestRecord,
    WeightsRecord,
    decode,
    departure_of,
    encode,
    read_recording,
)
from triolet.ipc.snapshot import SavedAnswer, SavedRequest

ENGINE = EngineRecord(
    format=1, version="0.1.0", architecture="Fake", vocab_size=50, config={"dtype": "float32", "max_n": 8}
)
WEIGHTS = WeightsRecord(version=0, folder="/model", digest="ab12")
REQUEST = RequestRecord(
    number=3,
    weight_version=0,
    request=SavedRequest(
        request_id="a\ud800 \n",
        prompt_token_ids=(1, 2, 49),
        params=SamplingParams(
            n=2,
            temperature=0.7,
            max_tokens=9,
            stop=("end",),
            logit_bias={7: -2.5, 12: 3.0},
            bad_words=("no",),
            repetition_detection={"max_pattern_size": 3, "min_count": 4},
            structured_outputs=StructuredOutputsParams(json={"type": "object"}),
        ),
        answers=(SavedAnswer(seed=-(2**63)), SavedAnswer(seed=2**63 - 1)),
        lora_name="sql",
        lora_int_id=4,
        lora_path="/sql",
        adapter="cd34",
        priority=-1,
    ),
)
END = EndRecord(
    number=3,
    weight_version=0,
    answers=(
        EndedAnswer(token_ids=(4, 5), finish_reason=FinishReason.STOP, stop_reason="end"),
        EndedAnswer(token_ids=(), finish_reason=FinishReason.ABORT),
    ),
    failure="it fell",
)
LINES = [encode(record) for record in (ENGINE, WEIGHTS, REQUEST, END)]


@pytest.mark.parametrize("record", [ENGINE, WEIGHTS, REQUEST, END])
def test_every_record_survives_the_way_through_a_line(record: Record) -> None:
    line = encode(record)
    assert line.count(b"\n") == 1
    assert decode(line, "line") == record


def test_a_recording_is_read_with_what_each_answer_depends_on() -> None:
    [request] = read_recording(LINES)
    assert (request.engine, request.weights, request.begin, request.end) == (ENGINE, WEIGHTS, REQUEST, END)
    assert request.obstacle is None


def test_a_line_that_a_killed_process_left_incomplete_does_not_count() -> None:
    [request] = read_recording([*LINES[:3], LINES[3][:-1]])
    assert (request.end, request.obstacle) == (None, "its end was not recorded")


def test_a_request_that_cannot_be_replayed_says_why() -> None:
    def obstacle(*lines: bytes) -> str:
        [request] = read_recording([LINES[0], *lines])
        return str(request.obstacle)

    assert "the engine ended before it was computed" in obstacle(LINES[2], LINES[3])
    without = encode(WeightsRecord(version=0, folder="/model", problem="FileNotFoundError: /model"))
    assert "no digest of the model is known (FileNotFoundError: /model)" in obstacle(without, *LINES[2:])
    later = encode(EndRecord(number=3, weight_version=2, answers=END.answers))
    assert "the weights changed from version 0 to 2" in obstacle(LINES[1], LINES[2], later)


def changed(line: bytes, **fields: Any) -> bytes:
    return json.dumps({**json.loads(line), **fields}).encode() + b"\n"


def changed_request(**fields: Any) -> bytes:
    return changed(LINES[2], request={**json.loads(LINES[2])["request"], **fields})


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "f: a recording must begin with a record of kind engine"),
        ([b"{}\n"], "f:1: record must be one of engine, weights, request, end; got None"),
        ([b"[1]\n"], "f:1: record must be one of"),
        ([LINES[1]], "f:1: the first record must be of kind engine"),
        ([changed(LINES[0], format=2)], "f:1: format must be 1; got 2"),
        ([LINES[0], changed(LINES[0], format=2)], "f:2: format must be 1; got 2"),
        ([changed(LINES[0], config={"max_n": []})], "f:1: .*config.max_n must be a plain value"),
        ([changed(LINES[0], vocab_size=0)], "vocab_size must be at least 1; got 0"),
        ([LINES[0], b"nonsense\n"], "f:2: a line of a recording must be JSON"),
        ([LINES[0], b"[" * 10**5 + b"\n"], "f:2: a line of a recording must be JSON"),
        ([LINES[0], b"\xff\n"], "f:2: a line of a recording must be JSON"),
        ([LINES[0], changed(LINES[1], surprise=1)], "f:2: .*surprise"),
        ([LINES[0], changed(LINES[1], version="0")], "f:2: .*must be int, got str"),
        ([LINES[0], changed(LINES[1], version=-1)], "version must be at least 0"),
        ([LINES[0], changed(LINES[2], number=True)], "f:2: .*must be int, got bool"),
        ([LINES[0], changed(LINES[2], request=3)], "f:2: fields of a recording must be as they were written"),
        ([LINES[0], changed_request(prompt_token_ids=[])], "f:2: prompt_token_ids must not be empty"),
        ([LINES[0], changed_request(prompt_token_ids=[50])], r"prompt_token_ids must be in \[0, 50\)"),
        ([LINES[0], changed_request(answers=[{"seed": 1}])], r"answers must be 2 \(n\); got 1"),
        ([LINES[0], changed_request(answers=[{"seed": 2**63}] * 2)], "seed must be in"),
        ([LINES[0], LINES[2], LINES[2]], "f:3: number must be unique; got 3"),
        ([LINES[0], LINES[3]], "f:2: number must be that of a request that has not ended; got 3"),
        ([LINES[0], *LINES[2:], LINES[3]], "f:4: number must be that of a request that has not ended"),
        ([*LINES[:3], changed(LINES[3], answers=[])], "f:4: answers must be 2; got 0"),
        (
            [*LINES[:3], LINES[3].replace(b"[4,5]", b"[4,-5]")],
            r"f:4: token_ids must be in \[0, 50\)",
        ),
        ([*LINES[:3], LINES[3].replace(b'"stop"', b'"stopped"')], "f:4: .*stopped"),
    ],
)
def test_a_wrong_line_is_refused_with_its_place_and_the_rule(lines: list[bytes], message: str) -> None:
    with pytest.raises(RecordingError, match=message):
        read_recording(lines, "f")


@pytest.mark.parametrize(
    ("recorded", "reason", "got", "position"),
    [
        ((1, 2, 3), "stop", (1, 2, 3), None),
        ((1, 2, 3), "length", (1, 9, 3), 1),
        ((1, 2, 3), "stop", (1, 2), 2),
        ((1, 2), "stop", (1, 2, 3), 2),
        ((1, 2), "abort", (1, 2, 3), None),
        ((), "error", (), None),
        ((1, 2), "deadline", (1,), 1),
        ((1, 2), "shutdown", (1, 3, 4), 1),
    ],
)
def test_a_departure_is_the_first_difference_and_of_a_cut_answer_the_prefix_counts(
    recorded: tuple[int, ...], reason: str, got: tuple[int, ...], position: int | None
) -> None:
    answer = EndedAnswer(token_ids=recorded, finish_reason=FinishReason(reason))
    found = departure_of(4, answer, got)
    if position is None:
        assert found is None
        return
    tokens = [*recorded, None], [*got, None]
    assert found == Departure(
        answer=4, position=position, expected=tokens[0][position], got=tokens[1][position]
    )
