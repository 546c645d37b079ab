"""A sequence by itself: its part of a step, and the endings of its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.core.make import make_request
from tests.core.stage import make_config
from triolet.core.journal import Journal, JournalEntry
from triolet.core.recovery.recovery_state import RecoveryState
from triolet.core.request.grammar_state import Constraint, TokenMask
from triolet.core.request.params import SamplingParams
from triolet.core.request.pooling_params import PoolingParams
from triolet.core.request.repetition_detection import RepetitionDetectionParams
from triolet.core.request.request import FinishReason
from triolet.core.scheduling.budget import SchedulerCounters
from triolet.core.scheduling.sequence import Sequence, ending_of, largest_first
from triolet.core.scheduling.step_planner import SpeculativeDecoding, length_of_run


def sequence_of(num_tokens: int = 3, **fields: Any) -> Sequence:
    entry = Journal().open(make_request(range(num_tokens), **fields))
    return Sequence(entry, (0.0, entry.serial))


def scheduled(num_tokens: int, num_scheduled: int) -> Sequence:
    sequence = sequence_of(num_tokens)
    sequence.begin(0, [], [], 0)
    sequence.schedule(num_scheduled, step_id=1)
    return sequence


def test_a_sequence_is_unserved_while_it_has_a_row_and_no_part_of_the_step() -> None:
    sequence = sequence_of()
    assert (sequence.num_computed_tokens, sequence.last_step, sequence.num_charged_tokens) == (0, 0, 0)
    states = [sequence.is_unserved]
    sequence.begin(0, [], [], 0)
    states.append(sequence.is_unserved)
    sequence.schedule(2, step_id=5)
    assert [*states, sequence.is_unserved] == [False, True, False]
    assert (sequence.last_step, sequence.num_planned_blocks) == (5, 0)


def test_a_mask_is_sent_with_the_part_of_a_step_that_samples_a_token() -> None:
    sequence = sequence_of(3, constraint=Constraint())
    sequence.entry.guidance = TokenMask(0, b"mask")
    sequence.begin(0, [], [], 0)
    sequence.schedule(2, step_id=1)
    assert (sequence.take_row().sample, sequence.take_row().mask) == (False, None)
    sequence.schedule(3, step_id=1)
    assert (sequence.take_row().sample, sequence.take_row().mask) == (True, b"mask")


def test_the_largest_sequences_of_a_step_come_first_and_of_equal_ones_the_longest() -> None:
    small, long, large = scheduled(3, 1), scheduled(9, 1), scheduled(5, 4)
    assert largest_first([small, sequence_of(), long, large]) == [large, long, small]


def answered(*token_ids: int, max_tokens: int = 16, **params: Any) -> JournalEntry:
    asked = SamplingParams(max_tokens=max_tokens, **params)
    entry = Journal().open(make_request(params=asked, max_tokens=max_tokens, eos_token_ids=(9, 8)))
    entry.output_token_ids += token_ids
    return entry


@pytest.mark.parametrize(
    ("token_ids", "params", "ending"),
    [
        ((1, 1, 9), {}, (FinishReason.STOP, None)),
        ((1, 1, 8), {}, (FinishReason.STOP, 8)),
        ((9, 9, 8), {}, (FinishReason.STOP, 8)),
        ((9, 8, 9), {}, (FinishReason.STOP, None)),
        ((9, 9, 1), {}, None),
        ((1, 1, 9), {"ignore_eos": True}, None),
        ((1, 1, 7), {"stop_token_ids": [7]}, (FinishReason.STOP, 7)),
        ((7, 7, 1), {"stop_token_ids": [7]}, None),
        ((1, 1, 1), {"max_tokens": 3}, (FinishReason.LENGTH, None)),
        ((1, 1, 9), {"max_tokens": 3}, (FinishReason.STOP, None)),
    ],
)
def test_an_answer_ends_with_an_ending_token_or_at_its_length(
    token_ids: tuple[int, ...], params: dict[str, Any], ending: tuple[FinishReason, int | None] | None
) -> None:
    assert ending_of(answered(*token_ids, **params)) == ending


@pytest.mark.parametrize(("min_tokens", "is_ended"), [(0, True), (4, True), (5, False)])
def test_an_answer_that_repeats_itself_ends_once_it_is_long_enough(min_tokens: int, is_ended: bool) -> None:
    detection = RepetitionDetectionParams(max_pattern_size=2, min_pattern_size=1, min_count=4)
    ending = ending_of(answered(1, 1, 1, 1, min_tokens=min_tokens, repetition_detection=detection))
    assert ending == ((FinishReason.REPETITION, "repetition_detected") if is_ended else None)
    assert ending_of(answered(1, 2, 3, 4, repetition_detection=detection)) is None


# --------------------------------------------------------------------------- how long they may run


def decoding(num_done: int = 1, **fields: Any) -> Sequence:
    sequence = sequence_of(3, max_tokens=16, **fields)
    sequence.entry.output_token_ids += [7] * num_done
    sequence.begin(0, [], [], 2 + num_done)
    return sequence


@pytest.mark.parametrize(
    ("other", "num_steps"),
    [
        (decoding, 8),
        (lambda: decoding(12), 4),  # tokens that are left
        (lambda: decoding(15), 1),
        (lambda: decoding(16), 1),
        (lambda: decoding(constraint=Constraint()), 1),
        (lambda: decoding(pooling=PoolingParams(task="embed")), 1),
        (lambda: scheduled(3, 3), 1),  # a prompt
    ],
)
def test_rows_run_for_as_many_steps_as_each_of_them_decodes(
    other: Callable[[], Sequence], num_steps: int
) -> None:
    config = make_config(num_scheduler_steps=8)
    assert length_of_run([decoding(), other()], config, RecoveryState()) == num_steps
    assert length_of_run([other(), decoding()], config, RecoveryState()) == num_steps


def test_rows_run_step_by_step_if_one_was_in_a_crash_and_where_drafts_are_made() -> None:
    first, second = decoding(), decoding()
    second.entry.serial = 2
    recovery = RecoveryState()
    recovery.poison_bisection.step_failed({2: 4}, num_rows=2)
    assert length_of_run([first, second], make_config(num_scheduler_steps=8), recovery) == 1
    assert length_of_run([first], make_config(num_scheduler_steps=8), recovery) == 8
    drafting = make_config(num_scheduler_steps=8, num_speculative_tokens=2)
    assert length_of_run([first], drafting, RecoveryState()) == 1


def test_counts_of_drafts_go_on_when_the_scheduler_is_built_anew() -> None:
    counters, config = SchedulerCounters(), make_config(num_speculative_tokens=3)
    for _ in range(2):
        SpeculativeDecoding(config, counters, RecoveryState())
        assert counters.num_accepted_tokens_per_pos == [0, 0, 0]
