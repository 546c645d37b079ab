"""A turn of a router is over when its engine owes nothing more."""

from __future__ import annotations

from typing import Any

import pytest

from triolet.router.owed import OwedAnswers

CREATE = {"type": "response.create"}
RESUME = {"type": "response.resume", "response_id": "resp_1", "stream_id": "b"}
STEER, CANCEL = {"type": "response.steer"}, {"type": "response.cancel"}
COMPLETED = {"type": "response.completed", "response": {"status": "completed", "finish_reason": "stop"}}
CANCELLED = {"type": "response.incomplete", "response": {"status": "cancelled", "finish_reason": "abort"}}
TIMED_OUT = {"type": "response.incomplete", "response": {"status": "cancelled", "finish_reason": "deadline"}}
STEER_FAILED = {"type": "response.steer.failed"}
DELTA = {"type": "response.output_text.delta", "delta": "a"}


def refused(code: str, param: str | None = None) -> dict[str, Any]:
    return {"type": "error", "error": {"code": code, "param": param}}


INVALID, DRAINING = refused("invalid_value"), refused("service_unavailable")
TOO_LATE = refused("response_not_found", "response_id")
OF_MARK = refused("missing_required_parameter", "response_id")


@pytest.mark.parametrize(
    ("began", "controls", "events"),
    [
        (CREATE, [], [DELTA, COMPLETED]),
        (CREATE, [], [INVALID]),
        (CREATE, [STEER], [COMPLETED, COMPLETED]),
        (CREATE, [STEER], [COMPLETED, INVALID]),
        (CREATE, [STEER, STEER], [STEER_FAILED, COMPLETED, STEER_FAILED]),
        (CREATE, [CANCEL], [DELTA, CANCELLED]),
        (CREATE, [CANCEL], [COMPLETED, TOO_LATE]),
        (CREATE, [CANCEL], [TIMED_OUT, TOO_LATE]),
        (CREATE, [CANCEL, CANCEL], [CANCELLED, TOO_LATE]),
        (CREATE, [STEER, CANCEL], [COMPLETED, TOO_LATE, COMPLETED]),
        (STEER, [], [STEER_FAILED]),
        (CANCEL, [], [TOO_LATE]),
        ({}, [], [INVALID]),
        (RESUME, [], [DELTA, COMPLETED]),
        (RESUME, [], [TOO_LATE]),
        (RESUME, [], [OF_MARK]),
        (RESUME, [CANCEL], [OF_MARK]),
        (RESUME, [], [DRAINING, DELTA, COMPLETED]),
        (RESUME, [], [DRAINING, DRAINING]),
        ({"type": "response.resume"}, [], [OF_MARK]),
    ],
)
def test_a_turn_is_over_with_the_last_answer_to_its_messages_and_not_before(
    began: dict[str, Any], controls: list[dict[str, Any]], events: list[dict[str, Any]]
) -> None:
    owed = OwedAnswers(began)
    for control in controls:
        owed.add(control)
    for event in events:
        assert not owed.is_over
        if not owed.is_of_mark(event):
            owed.note(event)
    assert owed.is_over


def test_the_client_gets_no_answer_to_the_end_mark_and_every_other_error() -> None:
    owed = OwedAnswers(RESUME)
    assert owed.end_mark == {"type": "response.resume", "stream_id": "b"}
    assert [owed.is_of_mark(event) for event in (DELTA, INVALID, OF_MARK)] == [False, False, True]


@pytest.mark.parametrize(
    "payload", [CREATE, {"type": "response.resume"}, {"type": "response.resume", "response_id": 3}]
)
def test_only_a_resume_that_may_have_no_events_has_an_end_mark(payload: dict[str, Any]) -> None:
    owed = OwedAnswers(payload)
    assert owed.end_mark is None
    assert not owed.is_of_mark(OF_MARK)


def test_an_error_of_a_cancel_that_was_not_waited_for_does_not_end_a_response() -> None:
    owed = OwedAnswers(CREATE)
    owed.note(TOO_LATE)
    assert not owed.is_over
