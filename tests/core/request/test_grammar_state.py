"""Requests that are bound to a form: they sit out while it is not known what may come next, and others go on."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from triolet.core.journal import Journal, JournalEntry
from triolet.core.request.grammar_state import (
    Constraint,
    Thinking,
    ThinkingRules,
    TokenMask,
    all_but,
    only,
    with_token,
)
from triolet.core.request.params import SamplingParams
from triolet.core.request.request import FinishReason, Request
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.scheduling.scheduler import Scheduler, SchedulerConfig
from triolet.core.step_plan import SampledToken, StepPlan, StepResult

FORM = Constraint(grammar=StructuredOutputsParams(regex="a+"))


class Story:
    """A scheduler whose runner says 7, and nothing else."""

    def __init__(self, **limits: int) -> None:
        settings: dict[str, Any] = {"num_blocks": 20, "block_size": 4, "max_num_seqs": 4}
        settings |= {"max_num_batched_tokens": 32, **limits}
        self.journal = Journal()
        self.scheduler = Scheduler(SchedulerConfig(max_model_len=64, **settings), self.journal)

    def add(self, name: str, *, is_bound: bool, num_prompt_tokens: int = 3) -> JournalEntry:
        request = Request(
            request_id=name,
            prompt_token_ids=tuple(range(1, num_prompt_tokens + 1)),
            params=SamplingParams(),
            seed=0,
            max_tokens=5,
            constraint=FORM if is_bound else None,
        )
        entry = self.journal.open(request)
        self.scheduler.add_arrivals()
        return entry

    def plan(self) -> StepPlan | None:
        return self.scheduler.plan_step(0.0)

    def done(self, plan: StepPlan, *entries: JournalEntry) -> None:
        tokens = [SampledToken(e.request.request_id, e.epoch, len(e.output_token_ids), 7) for e in entries]
        self.scheduler.apply(StepResult(plan.step_id, tuple(tokens)), 0.0)
        self.scheduler.check()


def test_a_request_waits_for_its_form_and_others_overtake_it() -> None:
    story = Story()
    bound, free = story.add("bound", is_bound=True), story.add("free", is_bound=False)
    assert story.journal.take_unmasked() == (bound.serial,)
    assert story.journal.take_unmasked() == ()  # named once
    plan = story.plan()
    assert plan is not None
    assert [start.request_id for start in plan.starts] == ["free"]
    story.done(plan, free)
    assert bound.scheduled_s is None
    story.scheduler.guide(bound.serial, TokenMask(0, b"\x80"))
    plan = story.plan()
    assert plan is not None
    assert [start.request_id for start in plan.starts] == ["bound"]
    assert [row.mask for row in plan.rows] == [None, b"\x80"]


def test_a_request_sits_out_until_its_last_token_has_been_followed() -> None:
    story = Story()
    bound = story.add("bound", is_bound=True)
    story.scheduler.guide(bound.serial, TokenMask(0, b"\x80"))
    plan = story.plan()
    assert plan is not None
    story.done(plan, bound)
    assert story.journal.take_unmasked() == (bound.serial,)
    assert story.plan() is None
    story.scheduler.guide(bound.serial, TokenMask(0, b"\x01"))  # of an answer that has grown since
    assert story.plan() is None
    story.scheduler.guide(bound.serial, TokenMask(1, b"\x02"))
    plan = story.plan()
    assert plan is not None
    assert plan.rows[0].mask == b"\x02"


def test_a_request_that_sits_a_step_out_keeps_its_share_of_the_steps_to_come() -> None:
    story = Story(max_num_batched_tokens=1)
    bound = story.add("bound", is_bound=True, num_prompt_tokens=1)
    story.scheduler.guide(bound.serial, TokenMask(0, b"\x80"))
    plan = story.plan()
    assert plan is not None
    story.done(plan, bound)
    story.add("free", is_bound=False, num_prompt_tokens=1)
    assert story.plan() is None  # let in now, it would hold blocks and have no token in the steps after that
    story.scheduler.guide(bound.serial, TokenMask(1, b"", is_over=True))
    assert story.plan() is not None
    story.scheduler.check()


def test_a_prompt_in_pieces_brings_its_mask_with_the_last_one() -> None:
    story = Story(max_num_batched_tokens=4)
    bound = story.add("bound", is_bound=True, num_prompt_tokens=6)
    story.scheduler.guide(bound.serial, TokenMask(0, b"\x80"))
    first = story.plan()
    assert first is not None
    assert (first.rows[0].sample, first.rows[0].mask) == (False, None)
    story.done(first)
    second = story.plan()
    assert second is not None
    assert (second.rows[0].sample, second.rows[0].mask) == (True, b"\x80")


def test_an_answer_that_is_all_that_its_form_allows_is_over() -> None:
    story = Story()
    bound = story.add("bound", is_bound=True)
    story.scheduler.guide(bound.serial, TokenMask(0, b"\x80"))
    plan = story.plan()
    assert plan is not None
    story.done(plan, bound)
    story.scheduler.guide(bound.serial, TokenMask(1, b"", is_over=True))
    assert (bound.finish_reason, bound.stop_reason) == (FinishReason.STOP, None)
    assert not bound.ended_by_token  # so its text is shown
    story.scheduler.check()
    assert story.scheduler.pool.num_in_use == 0


def test_a_form_that_can_not_be_followed_fails_its_request_alone() -> None:
    story = Story()
    bound, free = story.add("bound", is_bound=True), story.add("free", is_bound=False)
    story.scheduler.guide(bound.serial, TokenMask(0, problem="too complex"))
    assert (bound.finish_reason, bound.failure) == (FinishReason.ERROR, "too complex")
    assert free.finish_reason is None
    assert story.plan() is not None


def test_a_preempted_request_needs_no_new_guidance() -> None:
    story = Story(num_blocks=17, max_num_batched_tokens=64)
    first = story.add("first", is_bound=False, num_prompt_tokens=40)
    bound = story.add("bound", is_bound=True, num_prompt_tokens=26)
    story.scheduler.guide(bound.serial, TokenMask(0, b"\x80"))
    for position in range(3):
        plan = story.plan()
        assert plan is not None
        entries = [e for e in (first, bound) if e.epoch in {s.epoch for s in plan.starts} or position]
        story.done(plan, *entries)
        story.scheduler.guide(bound.serial, TokenMask(len(bound.output_token_ids), b"\x80"))
    story.scheduler.abort(first.serial)
    assert bound.mask == b"\x80"
    assert not bound.awaits_mask


def test_a_new_scheduler_asks_for_what_is_not_known() -> None:
    story = Story()
    known, unknown = story.add("known", is_bound=True), story.add("unknown", is_bound=True)
    story.scheduler.guide(known.serial, TokenMask(0, b"\x80"))
    story.journal.take_unmasked()
    reborn = Scheduler(story.scheduler.config, story.journal, story.scheduler.counters)
    for entry in (known, unknown):
        reborn.add(entry)
    assert story.journal.take_unmasked() == (unknown.serial,)
    plan = reborn.plan_step(0.0)
    assert plan is not None
    assert [start.request_id for start in plan.starts] == ["known"]


# ------------------------------------------------------------------------------------------- thinking


def rules(*, is_open: bool = False, budget: int | None = None) -> ThinkingRules:
    return ThinkingRules(opening_token_ids=(8, 9), closing_token_ids=(5, 6), is_open=is_open, budget=budget)


@pytest.mark.parametrize(
    ("is_open", "answer", "ended"),
    [
        (True, [1, 2, 5, 6, 3], 4),
        (True, [1, 5, 1, 6], None),
        (False, [8, 9, 1, 5, 6], 5),
        (False, [5, 6, 5, 6], 0),  # which did not begin with reasoning
        (False, [1, 8, 9, 5, 6], 0),
        (True, [], None),
    ],
)
def test_reasoning_ends_behind_its_closing_mark(is_open: bool, answer: list[int], ended: int | None) -> None:
    whole, piecewise = (Thinking(rules(is_open=is_open), is_bound=True) for _ in range(2))
    whole.follow(answer)
    for length in range(len(answer) + 1):
        piecewise.follow(answer[:length])
    assert whole.ended == piecewise.ended == ended


def test_without_reasoning_the_form_begins_at_once() -> None:
    thinking = Thinking(None, is_bound=True)
    assert (thinking.ended, thinking.optional_token_id) == (0, None)


def test_a_bound_answer_begins_with_its_form_or_with_reasoning() -> None:
    thinking = Thinking(rules(), is_bound=True)
    assert (thinking.ended, thinking.optional_token_id) == (None, 8)
    thinking.follow([8])
    assert (thinking.optional_token_id, thinking.forced_token_id([8])) == (None, 9)  # half a mark is none
    thinking.follow([8, 9])
    assert (thinking.ended, thinking.forced_token_id([8, 9])) == (None, None)
    assert Thinking(rules(is_open=True), is_bound=True).optional_token_id is None
    assert with_token(b"\x01", 9) == b"\x01\x02"


@pytest.mark.parametrize("num_bytes", range(10))
def test_a_mask_that_ends_before_a_token_is_lengthened_to_the_byte_of_the_token(num_bytes: int) -> None:
    token_id = 8 * num_bytes + 3
    assert with_token(b"", token_id) == bytes(num_bytes) + b"\x08"
    assert with_token(b"\x01" * (num_bytes + 1), token_id) == b"\x01" * num_bytes + b"\x09"


def test_an_answer_without_a_form_may_begin_to_think_when_it_likes() -> None:
    thinking = Thinking(rules(budget=1), is_bound=False)
    answer = [1, 8, 9, 2]
    thinking.follow(answer)
    assert thinking.forced_token_id(answer) == 5


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("budget", range(5))
def test_a_spent_budget_ends_the_reasoning(is_open: bool, budget: int) -> None:
    rng = Random(f"{is_open} {budget}")
    answer = [] if is_open else [8, 9]
    thinking = Thinking(rules(is_open=is_open, budget=budget), is_bound=True)
    while thinking.ended is None:
        thinking.follow(answer)
        if thinking.ended is None:
            forced = thinking.forced_token_id(answer)
            answer.append(rng.choice([1, 2, 3]) if forced is None else forced)
    assert answer[-2:] == [5, 6]
    assert len(answer) == (0 if is_open else 2) + budget + 2


def test_the_end_of_a_budget_is_not_said_twice() -> None:
    thinking = Thinking(rules(is_open=True, budget=2), is_bound=True)
    answer = [1, 5]  # the model has begun to close by itself
    thinking.follow(answer)
    assert thinking.forced_token_id(answer) == 6


def harmony(*, budget: int | None = None) -> ThinkingRules:
    """Rules of reasoning in messages: 1 ends one, 2 3 begins the next, 5 6 7 is the header of the last one."""
    return ThinkingRules(
        opening_token_ids=(5, 8, 7),
        closing_token_ids=(5, 6, 7),
        is_open=True,
        budget=budget,
        num_certain=2,
        lead_token_ids=(1, 2, 3),
        freeing_token_ids=((5, 6), (5, 9)),
    )


@pytest.mark.parametrize(
    ("answer", "forced"),
    [([], None), ([5], None), ([5, 8, 7, 0], None), ([5, 6], 7), ([5, 8, 7, 0, 5, 6], 7)],
)
def test_the_rest_of_a_closing_mark_follows_its_certain_beginning(
    answer: list[int], forced: int | None
) -> None:
    thinking = Thinking(harmony(), is_bound=True)
    thinking.follow(answer)
    assert (thinking.ended, thinking.forced_token_id(answer)) == (None, forced)


@pytest.mark.parametrize(
    ("answer", "whole"),
    [
        ([], [5, 6, 7]),  # the prompt ends with what stands before the mark
        ([5, 8, 7, 0], [5, 8, 7, 0, 1, 2, 3, 5, 6, 7]),
        ([5, 8, 7, 0, 1], [5, 8, 7, 0, 1, 2, 3, 5, 6, 7]),
        ([5, 8, 7, 0, 1, 2, 3], [5, 8, 7, 0, 1, 2, 3, 5, 6, 7]),
    ],
)
def test_a_spent_budget_writes_what_stands_before_the_closing_mark(
    answer: list[int], whole: list[int]
) -> None:
    thinking, said = Thinking(harmony(budget=0), is_bound=True), list(answer)
    thinking.follow(said)
    while thinking.ended is None:
        forced = thinking.forced_token_id(said)
        assert forced is not None
        said.append(forced)
        thinking.follow(said)
    assert said == whole


@pytest.mark.parametrize(("is_bound", "ended"), [(True, None), (False, 6)])
def test_a_call_ends_the_reasoning_of_an_answer_without_a_form(is_bound: bool, ended: int | None) -> None:
    thinking, answer = Thinking(harmony(budget=9), is_bound=is_bound), [5, 8, 7, 0, 5, 9, 7, 0]
    thinking.follow(answer)
    assert thinking.ended == ended


def test_a_mask_of_all_but_some_tokens_lacks_those_of_the_vocabulary() -> None:
    assert all_but((9, 0, 20, 999), 20) == b"\xfe\xfd\xff"


def test_a_mask_of_one_token_has_one_bit() -> None:
    assert only(9, 20) == b"\x00\x02\x00"
