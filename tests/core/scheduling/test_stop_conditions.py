"""Every way out of the scheduler, from every state, and what is left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from tests.core.make import make_request
from tests.core.stage import Stage
from triolet.core.journal import JournalEntry
from triolet.core.request.request import FinishReason
from triolet.core.step_plan import StepPlan

INF = float("inf")
EOS, STOP_ID = 4, 6

# --------------------------------------------------------------------- the states of a request


@attrs.frozen
class Scene:
    """Request `x` in some state; with `plan`, while a step is in flight."""

    stage: Stage
    entry: JournalEntry
    plan: StepPlan | None = None


def not_yet_queued(**fields: Any) -> Scene:
    stage = Stage()
    return Scene(stage, stage.journal.open(make_request(range(6), request_id="x", **fields)))


def waiting(**fields: Any) -> Scene:
    stage = Stage()
    return Scene(stage, stage.add("x", 6, **fields))


def prefilling(**fields: Any) -> Scene:
    stage = Stage()
    entry = stage.add("x", 20, **fields)
    stage.step()
    return Scene(stage, entry)


def decoding(**fields: Any) -> Scene:
    scene = waiting(**fields)
    scene.stage.step()
    scene.stage.step()
    return scene


def preempted(**fields: Any) -> Scene:
    stage = Stage(num_blocks=4, max_num_batched_tokens=16, max_model_len=16)
    stage.add("a", 7)
    entry = stage.add("x", 7, **fields)
    while not entry.num_preemptions:
        stage.step()
    stage.scheduler.abort(1)
    return Scene(stage, entry)


def prefilling_in_flight(**fields: Any) -> Scene:
    scene = waiting(**fields)
    return attrs.evolve(scene, plan=scene.stage.in_flight())


def decoding_in_flight(**fields: Any) -> Scene:
    scene = decoding(**fields)
    return attrs.evolve(scene, plan=scene.stage.in_flight())


def preempted_in_flight(**fields: Any) -> Scene:
    """It has lost its blocks; another's step is in flight."""
    stage = Stage(num_blocks=4, max_num_batched_tokens=16, max_model_len=16)
    stage.add("a", 7)
    entry = stage.add("x", 7, **fields)
    plan = stage.in_flight()
    while not entry.num_preemptions:
        stage.end(plan)
        plan = stage.in_flight()
    return Scene(stage, entry, plan)


STATES = [
    not_yet_queued,
    waiting,
    prefilling,
    decoding,
    preempted,
    prefilling_in_flight,
    decoding_in_flight,
    preempted_in_flight,
]
every_state = pytest.mark.parametrize("state", STATES)
MakeScene = Callable[..., Scene]


# ------------------------------------------------------------------------------------- abort


@every_state
def test_an_aborted_request_is_gone_from_every_state(state: MakeScene) -> None:
    scene = state()
    scheduler, serial = scene.stage.scheduler, scene.entry.serial
    scheduler.take_progress()
    scheduler.abort(serial)
    scheduler.check()
    assert scene.entry.finish_reason is FinishReason.ABORT
    assert serial not in scene.stage.journal
    assert scheduler.take_progress() == (serial,)
    scheduler.abort(serial)  # again, and by a caller that comes late
    scheduler.abort(serial, FinishReason.SHUTDOWN)
    scheduler.check()
    assert scene.entry.finish_reason is FinishReason.ABORT
    assert scheduler.take_progress() == ()


@every_state
def test_its_blocks_are_free_at_once_or_when_the_step_in_flight_ends(state: MakeScene) -> None:
    scene = state()
    stage, pool = scene.stage, scene.stage.pool
    num_held = pool.num_in_use
    is_in_step = scene.plan is not None and any(stage.name(row) == "x" for row in scene.plan.rows)
    stage.scheduler.abort(scene.entry.serial)
    if is_in_step:
        assert num_held > 0
        assert (pool.num_quarantined, pool.num_in_use) == (num_held, 0)
    else:
        assert pool.num_quarantined == 0
    if scene.plan is not None:
        stage.end(scene.plan)
    for entry in list(stage.journal):
        stage.scheduler.abort(entry.serial)
    assert pool.num_available == pool.num_blocks


@every_state
def test_nothing_is_computed_for_it_any_more(state: MakeScene) -> None:
    scene = state()
    answer = list(scene.entry.output_token_ids)
    scene.stage.scheduler.abort(scene.entry.serial)
    if scene.plan is not None:
        scene.stage.end(scene.plan)
    scene.stage.scheduler.add_arrivals()
    assert "x" not in [name for name, _, _ in scene.stage.step()]
    assert scene.entry.output_token_ids == answer


def test_an_unknown_request_is_ignored() -> None:
    stage = Stage()
    stage.scheduler.abort(99)
    assert stage.scheduler.take_progress() == ()


def test_an_abort_may_bring_its_reason() -> None:
    scene = decoding()
    scene.stage.scheduler.abort(scene.entry.serial, FinishReason.SHUTDOWN)
    assert scene.entry.finish_reason is FinishReason.SHUTDOWN


def test_the_others_in_the_step_go_on() -> None:
    stage = Stage()
    a, b = stage.add("a", 3), stage.add("b", 3)
    plan = stage.in_flight()
    stage.scheduler.abort(a.serial)
    stage.end(plan, {"a": 7, "b": 8})
    assert (a.output_token_ids, b.output_token_ids) == ([], [8])
    assert stage.step() == [("b", 3, 1)]


def test_what_an_aborted_request_was_computing_is_never_found() -> None:
    stage = Stage(max_num_batched_tokens=16)
    entry = stage.add("a", range(9))
    plan = stage.in_flight()
    stage.scheduler.abort(entry.serial)
    stage.end(plan)
    assert stage.pool.num_cached == 0
    stage.add("b", range(9))
    assert stage.step() == [("b", 0, 9)]


def test_what_it_had_computed_before_is_found_once_the_step_has_ended() -> None:
    stage = Stage(max_num_batched_tokens=9)
    entry = stage.add("a", range(9))
    stage.step()
    plan = stage.in_flight()
    stage.scheduler.abort(entry.serial)
    assert (stage.pool.num_quarantined, stage.pool.num_cached) == (3, 0)
    stage.end(plan)
    assert (stage.pool.num_quarantined, stage.pool.num_cached) == (0, 2)
    stage.add("b", range(9))
    assert stage.step() == [("b", 8, 1)]


def test_blocks_shared_with_a_neighbour_stay_the_neighbours() -> None:
    stage = Stage(max_num_batched_tokens=16)
    a = stage.add("a", range(9))
    stage.step()
    stage.add("b", range(9))
    plan = stage.in_flight()
    stage.scheduler.abort(a.serial)
    assert (stage.pool.num_quarantined, stage.pool.num_in_use) == (
        1,
        3,
    )  # a's third block; b has 2 of a's and its own
    stage.end(plan)
    assert stage.step() == [("b", 9, 1)]


def test_the_row_of_an_aborted_request_is_named_before_it_is_filled_again() -> None:
    stage = Stage(max_num_seqs=1)
    a = stage.add("a", 3)
    stage.add("b", 3)
    plan = stage.in_flight()
    stage.scheduler.abort(a.serial)
    stage.end(plan)
    second = stage.in_flight()  # the stage refuses to fill a row that was not named
    assert second.ended == (plan.rows[0].row_id,)
    assert [start.request_id for start in second.starts] == ["b"]


def test_a_step_that_is_not_computed_any_more_holds_nothing_and_gives_nothing() -> None:
    stage = Stage()
    a, b = stage.add("a", 3), stage.add("b", range(4))
    plan = stage.in_flight()
    stage.scheduler.abort(a.serial)
    stage.scheduler.abandon_step()
    stage.scheduler.abandon_step()  # there is none left
    assert (stage.pool.num_quarantined, stage.scheduler.is_step_in_flight) == (0, False)
    stage.end(plan, {"b": 7})
    assert b.output_token_ids == []
    stage.scheduler.abort(b.serial)
    assert stage.pool.num_free == stage.pool.num_blocks


# ------------------------------------------------------------------------- what ends an answer


def ended(*tokens: int, max_tokens: int = 32, eos: tuple[int, ...] = (EOS,), **params: Any) -> JournalEntry:
    """A request after it has been given these tokens, one a step."""
    stage = Stage()
    entry = stage.add("a", 3, max_tokens=max_tokens, params=params, eos_token_ids=eos)
    for token_id in tokens:
        stage.step(a=token_id)
    if entry.finish_reason is not None:
        assert stage.pool.num_in_use == 0
        assert entry.serial not in stage.journal
        assert stage.step() == []
    return entry


@pytest.mark.parametrize(
    ("tokens", "fields", "reason", "stop_reason"),
    [
        ((7, 8), {}, None, None),
        ((7, EOS), {}, FinishReason.STOP, None),
        ((EOS,), {}, FinishReason.STOP, None),
        ((7, 4), {"eos": (4, 5)}, FinishReason.STOP, None),
        ((7, 5), {"eos": (4, 5)}, FinishReason.STOP, 5),
        ((7, STOP_ID), {"stop_token_ids": [STOP_ID]}, FinishReason.STOP, STOP_ID),
        ((7, 8), {"max_tokens": 2}, FinishReason.LENGTH, None),
        ((7,), {"max_tokens": 1}, FinishReason.LENGTH, None),
        ((7, EOS), {"max_tokens": 2}, FinishReason.STOP, None),
        ((7, STOP_ID), {"max_tokens": 2, "stop_token_ids": [STOP_ID]}, FinishReason.STOP, STOP_ID),
        ((EOS,), {"stop_token_ids": [EOS]}, FinishReason.STOP, None),
        ((EOS, 7), {"ignore_eos": True}, None, None),
        ((7, EOS), {"ignore_eos": True, "max_tokens": 2}, FinishReason.LENGTH, None),
        ((EOS,), {"ignore_eos": True, "stop_token_ids": [EOS]}, FinishReason.STOP, EOS),
        ((7, EOS), {"eos": ()}, None, None),
    ],
    ids=[
        "nothing yet",
        "end of sequence",
        "at once",
        "the first of several ends",
        "another one of several ends is told like a stop token, as in vLLM",
        "stop token",
        "length",
        "length of one",
        "an end at the last token is a stop",
        "a stop token at the last token, too",
        "the end of sequence comes before the stop token",
        "ignored",
        "ignored to the last",
        "ignored, but asked for as a stop token",
        "a model without ends",
    ],
)
def test_why_an_answer_ends(
    tokens: tuple[int, ...], fields: dict[str, Any], reason: FinishReason | None, stop_reason: int | None
) -> None:
    entry = ended(*tokens, **fields)
    assert (entry.finish_reason, entry.stop_reason) == (reason, stop_reason)
    assert entry.output_token_ids == list(tokens)


def test_a_finished_request_makes_room_at_the_next_step() -> None:
    stage = Stage(max_num_seqs=1)
    stage.add("a", 3, max_tokens=1)
    stage.add("b", 3)
    assert [stage.step(), stage.step()] == [[("a", 0, 3)], [("b", 0, 3)]]


# ---------------------------------------------------------------------------------- a row fails


def test_a_row_that_fails_fails_alone() -> None:
    stage = Stage(max_num_batched_tokens=16)
    a, b = stage.add("a", 3), stage.add("b", 3)
    stage.end(stage.in_flight(), {"b": 8}, failing=["a"])
    assert (a.finish_reason, a.failure, a.output_token_ids) == (FinishReason.ERROR, "planted", [])
    assert (b.finish_reason, b.output_token_ids) == (None, [8])
    assert stage.scheduler.take_progress() == (b.serial, a.serial)
    assert stage.step() == [("b", 3, 1)]


def test_what_a_failed_row_has_just_computed_is_never_found() -> None:
    stage = Stage(max_num_batched_tokens=16)
    stage.add("a", range(9))
    stage.end(stage.in_flight(), failing=["a"])
    assert (stage.pool.num_cached, stage.pool.num_free) == (0, 16)
    stage.add("b", range(9))
    assert stage.step() == [("b", 0, 9)]


def test_a_failure_of_an_aborted_row_is_no_failure() -> None:
    stage = Stage()
    entry = stage.add("a", 3)
    plan = stage.in_flight()
    stage.scheduler.abort(entry.serial)
    stage.end(plan, failing=["a"])
    assert (entry.finish_reason, entry.failure) == (FinishReason.ABORT, None)


# ----------------------------------------------------------------------------------- deadlines


@pytest.mark.parametrize("state", [state for state in STATES if state is not not_yet_queued])
@pytest.mark.parametrize("now_s", [10.0, 11.0])
def test_a_deadline_ends_a_request_in_every_state(state: MakeScene, now_s: float) -> None:
    scene = state(deadline_s=10.0)
    stage = scene.stage
    answer = list(scene.entry.output_token_ids)
    assert stage.scheduler.next_deadline() == 10.0
    stage.scheduler.expire(9.9)
    assert scene.entry.serial in stage.journal
    stage.scheduler.expire(now_s)
    stage.scheduler.check()
    assert scene.entry.finish_reason is FinishReason.DEADLINE
    assert stage.scheduler.next_deadline() == INF
    if scene.plan is not None:
        stage.end(scene.plan)
    assert scene.entry.output_token_ids == answer  # what there was stays
    assert "x" not in [name for name, _, _ in stage.step()]


@pytest.mark.parametrize(
    ("state", "is_ended"),
    [
        (waiting, True),
        (prefilling, False),
        (prefilling_in_flight, False),
        (decoding, False),
        (preempted, False),  # it waits again, but it was scheduled in time
        (preempted_in_flight, False),
    ],
)
def test_a_queue_deadline_ends_only_what_was_never_scheduled(state: MakeScene, is_ended: bool) -> None:
    scene = state(queue_deadline_s=10.0)
    scene.stage.scheduler.expire(10.0)
    assert (scene.entry.finish_reason is FinishReason.DEADLINE) is is_ended
    assert scene.stage.scheduler.next_deadline() == INF
    scene.stage.scheduler.check()


def test_after_the_queue_deadline_the_other_one_still_counts() -> None:
    scene = decoding(queue_deadline_s=5.0, deadline_s=10.0)
    scheduler = scene.stage.scheduler
    assert scheduler.next_deadline() == 5.0
    scheduler.expire(5.0)
    assert (scene.entry.finish_reason, scheduler.next_deadline()) == (None, 10.0)
    scheduler.expire(10.0)
    assert scene.entry.finish_reason is FinishReason.DEADLINE


def test_a_deadline_before_the_queue_deadline_comes_first() -> None:
    scene = waiting(queue_deadline_s=10.0, deadline_s=5.0)
    assert scene.stage.scheduler.next_deadline() == 5.0
    scene.stage.scheduler.expire(5.0)
    assert scene.entry.finish_reason is FinishReason.DEADLINE


def test_without_deadlines_nothing_expires() -> None:
    scene = decoding()
    assert scene.stage.scheduler.next_deadline() == INF
    scene.stage.scheduler.expire(1e12)
    assert scene.entry.finish_reason is None


def test_the_deadlines_of_ended_requests_are_forgotten() -> None:
    stage = Stage()
    entries = [
        stage.add(name, 3, deadline_s=deadline_s) for name, deadline_s in (("a", 5.0), ("b", 7.0), ("c", 6.0))
    ]
    stage.scheduler.abort(entries[0].serial)
    assert stage.scheduler.next_deadline() == 6.0
    stage.scheduler.expire(6.5)
    assert [entry.finish_reason for entry in entries] == ["abort", None, "deadline"]
    assert stage.scheduler.next_deadline() == 7.0


def test_all_requests_out_of_time_end_together() -> None:
    stage = Stage()
    entries = [stage.add(name, 3, deadline_s=5.0) for name in "abc"]
    stage.scheduler.expire(5.0)
    assert [entry.finish_reason for entry in entries] == ["deadline"] * 3
    assert stage.begin() is None


def test_a_request_that_comes_too_late_is_never_started() -> None:
    stage = Stage()
    entry = stage.add("a", 3, deadline_s=-1.0)
    stage.scheduler.expire(0.0)
    assert entry.finish_reason is FinishReason.DEADLINE
    assert entry.scheduled_s is None
    assert stage.journal.num_queued_tokens == 0
