from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.make import make_request, next_token
from triolet.core.journal import Journal, JournalEntry
from triolet.core.request.request import FinishReason
from triolet.core.step_plan import SampledToken, TokenLogprobs
from triolet.errors import InvariantViolated


def journal_with(*lengths: int) -> tuple[Journal, list[JournalEntry]]:
    """A journal with one request per prompt length."""
    journal = Journal()
    return journal, [journal.open(make_request(range(length))) for length in lengths]


# ------------------------------------------------------------------------------- exactly once


def test_tokens_are_committed_in_order() -> None:
    journal, (entry,) = journal_with(3)
    assert [journal.commit(entry, next_token(entry, token_id), 1.0) for token_id in (7, 8)] == [True, True]
    assert entry.output_token_ids == [7, 8]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda token: token, id="the same once more"),
        pytest.param(lambda token: attrs.evolve(token, position=0), id="an earlier position"),
        pytest.param(lambda token: attrs.evolve(token, position=2), id="a later position"),
        pytest.param(lambda token: attrs.evolve(token, position=-1), id="no position at all"),
        pytest.param(
            lambda token: attrs.evolve(token, position=1, epoch=token.epoch - 1), id="an earlier stay"
        ),
        pytest.param(
            lambda token: attrs.evolve(token, position=1, epoch=token.epoch + 1), id="a stay to come"
        ),
    ],
)
def test_a_token_that_belongs_elsewhere_changes_nothing(
    change: Callable[[SampledToken], SampledToken],
) -> None:
    journal, (entry,) = journal_with(3)
    journal.begin_stay(entry)
    token = next_token(entry, 7)
    journal.commit(entry, token, 1.0)
    assert journal.commit(entry, change(token), 2.0) is False
    assert entry.output_token_ids == [7]
    assert entry.last_token_s == 1.0


def test_a_result_of_an_earlier_stay_is_late_even_if_its_position_fits() -> None:
    journal, (entry,) = journal_with(3)
    late = next_token(entry, 7)
    journal.begin_stay(entry)
    assert journal.commit(entry, late, 1.0) is False
    assert journal.commit(entry, next_token(entry, 8), 1.0) is True
    assert entry.output_token_ids == [8]


@pytest.mark.parametrize("reason", FinishReason)
def test_an_ended_answer_does_not_grow(reason: FinishReason) -> None:
    journal, (entry,) = journal_with(3)
    entry.finish(reason)
    assert journal.commit(entry, next_token(entry, 7), 1.0) is False
    assert (entry.output_token_ids, entry.first_token_s) == ([], None)


@given(
    deliveries=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), max_size=40),
    moves=st.sets(st.integers(0, 39)),
)
def test_whatever_is_delivered_how_often_the_answer_grows_one_position_at_a_time(
    deliveries: list[tuple[int, int]], moves: set[int]
) -> None:
    journal, (entry,) = journal_with(2)
    committed: list[int] = []
    for index, (epoch, position) in enumerate(deliveries):
        if index in moves:
            journal.begin_stay(entry)
        belongs = epoch == entry.epoch and position == len(committed)
        token_id = 10 * epoch + position
        assert journal.commit(entry, SampledToken("r", epoch, position, token_id), 0.0) is belongs
        if belongs:
            committed.append(token_id)
        assert entry.output_token_ids == committed


def test_epochs_and_serials_are_never_used_again() -> None:
    journal = Journal()
    epochs, serials = set(), set()
    for _ in range(5):
        entry = journal.open(make_request())  # always the same request id
        serials.add(entry.serial)
        epochs |= {entry.epoch, journal.begin_stay(entry), journal.begin_stay(entry)}
        journal.close(entry)
    assert (len(serials), len(epochs)) == (5, 15)


def test_begin_stay_returns_the_epoch_that_counts() -> None:
    journal, (entry,) = journal_with(3)
    assert journal.begin_stay(entry) == entry.epoch


# -------------------------------------------------------------------------------- what is written


def test_times_are_those_of_the_first_and_the_latest_token() -> None:
    journal, (entry,) = journal_with(3)
    assert (entry.first_token_s, entry.last_token_s) == (None, None)
    for now_s in (1.0, 2.0, 5.0):
        journal.commit(entry, next_token(entry, 7), now_s)
    assert (entry.first_token_s, entry.last_token_s) == (1.0, 5.0)


def test_a_first_token_at_time_zero_is_a_first_token() -> None:
    journal, (entry,) = journal_with(3)
    for now_s in (0.0, 1.0):
        journal.commit(entry, next_token(entry, 7), now_s)
    assert (entry.first_token_s, entry.last_token_s) == (0.0, 1.0)


def test_logprobs_are_kept_beside_their_tokens() -> None:
    journal, (entry,) = journal_with(3)
    logprobs = TokenLogprobs((7, 8), (-0.5, -1.0), 1)
    journal.commit(entry, next_token(entry, 7, logprobs), 1.0)
    assert journal.commit(entry, attrs.evolve(next_token(entry, 7, logprobs), position=0), 1.0) is False
    assert entry.output_logprobs == [logprobs]


def test_the_first_reason_stays() -> None:
    _, (entry,) = journal_with(3)
    entry.finish(FinishReason.STOP, 7)
    entry.finish(FinishReason.ABORT)
    assert (entry.finish_reason, entry.stop_reason) == (FinishReason.STOP, 7)


@pytest.mark.parametrize("num_output", [0, 1, 4])
def test_any_stretch_of_prompt_and_answer_can_be_read(num_output: int) -> None:
    journal, (entry,) = journal_with(3)
    for token_id in range(3, 3 + num_output):
        journal.commit(entry, next_token(entry, token_id), 0.0)
    whole = tuple(range(3 + num_output))
    assert entry.num_tokens == len(whole)
    for start in range(len(whole) + 1):
        for end in range(start, len(whole) + 1):
            assert entry.tokens(start, end) == whole[start:end]


# ---------------------------------------------------------------------------------- live requests


def test_the_journal_holds_live_requests_in_order_of_admission() -> None:
    journal, entries = journal_with(1, 2, 3)
    journal.close(entries[1])
    assert list(journal) == [entries[0], entries[2]]
    assert len(journal) == 2
    assert [entry.serial in journal for entry in entries] == [True, False, True]
    assert [journal.get(entry.serial) for entry in entries] == [entries[0], None, entries[2]]


def test_arrivals_are_told_once_and_only_if_still_live() -> None:
    journal, entries = journal_with(1, 2, 3)
    journal.close(entries[1])
    assert journal.take_arrivals() == [entries[0], entries[2]]
    assert journal.take_arrivals() == []
    late = journal.open(make_request())
    assert journal.take_arrivals() == [late]


def test_queued_tokens_are_those_of_prompts_never_scheduled() -> None:
    journal, (first, second, third) = journal_with(10, 20, 40)
    assert journal.num_queued_tokens == 70
    journal.scheduled(first, 1.0)
    assert journal.num_queued_tokens == 60
    journal.scheduled(first, 2.0)  # again, after a preemption
    journal.close(first)
    assert journal.num_queued_tokens == 60
    journal.close(second)  # while it was waiting
    journal.close(second)
    assert journal.num_queued_tokens == 40
    journal.begin_stay(third)
    assert journal.num_queued_tokens == 40
    journal.check()


def test_the_first_scheduling_is_the_one_remembered() -> None:
    journal, (entry,) = journal_with(3)
    journal.scheduled(entry, 0.0)
    journal.scheduled(entry, 2.0)
    assert entry.scheduled_s == 0.0


def test_answer_tokens_are_never_queued_tokens() -> None:
    journal, (entry,) = journal_with(10)
    journal.commit(entry, next_token(entry, 7), 1.0)
    assert journal.num_queued_tokens == 10
    journal.check()


# -------------------------------------------------------------------------------- our own mistakes


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda entry: setattr(entry, "scheduled_s", 1.0), "queued tokens must be 0; counted 3"),
        (lambda entry: entry.finish(FinishReason.STOP), r"entry 1 has ended \(stop\) and is still live"),
        (lambda entry: entry.output_token_ids.extend(range(17)), "entry 1 is longer than its 16 tokens"),
    ],
)
def test_a_count_that_is_wrong_is_found(corrupt: Callable[[JournalEntry], object], message: str) -> None:
    journal, (entry,) = journal_with(3)
    journal.check()
    corrupt(entry)
    with pytest.raises(InvariantViolated, match=message):
        journal.check()
