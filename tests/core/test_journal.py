from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.make import make_request, next_token
from triolet.core.journal import Journal, JournalEntry
from triolet.core.request.grammar_state import Constraint, TokenMask
from triolet.core.request.params import SamplingParams
from triolet.core.request.pooling_params import PoolingParams
from triolet.core.request.request import FinishReason
from triolet.core.step_plan import PooledVectors, PromptLogprobs, SampledToken, TokenLogprobs
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
    assert journal.num_queued_tokens == 40
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


# ------------------------------------------------------------------------- what an entry says of itself


def entry_of(**fields: object) -> JournalEntry:
    return Journal().open(make_request((1, 2, 3), **fields))  # type: ignore[arg-type]


def test_a_new_entry_counts_nothing_and_was_held_for_none() -> None:
    journal = Journal()
    first = journal.open(make_request())
    assert (first.num_cached_tokens, first.num_cache_creation_tokens, first.num_preemptions) == (0, 0, 0)
    assert [entry.leader_serial for entry in (first, journal.open(make_request(), after=first))] == [
        0,
        first.serial,
    ]
    journal.scheduled(first, 1.0)
    assert first.num_cached_tokens == 0


def test_an_answer_needs_a_place_for_its_next_token_and_a_pooled_request_none() -> None:
    assert entry_of().num_needed_places == 4
    assert entry_of(pooling=PoolingParams(task="embed")).num_needed_places == 3


def test_a_mask_is_awaited_until_the_one_for_the_next_position_is_there() -> None:
    free, bound = entry_of(), entry_of(constraint=Constraint())
    assert (free.awaits_mask, free.mask) == (False, None)
    assert (bound.awaits_mask, bound.mask) == (True, None)
    bound.guidance = TokenMask(0, b"mask")
    assert (bound.awaits_mask, bound.mask) == (False, b"mask")
    bound.output_token_ids.append(7)
    assert bound.awaits_mask


def test_needs_of_masks_are_told_once_each_stay_and_each_token_and_only_of_live_requests() -> None:
    journal = Journal()
    bound, gone = (journal.open(make_request(constraint=Constraint())) for _ in range(2))
    free = journal.open(make_request())
    for entry in (bound, gone, free):
        journal.begin_stay(entry)
    journal.close(gone)
    assert [journal.take_unmasked(), journal.take_unmasked()] == [(bound.serial,), ()]
    bound.guidance = TokenMask(0, b"mask")
    journal.begin_stay(bound)
    assert journal.take_unmasked() == ()
    journal.commit(bound, next_token(bound, 7), 1.0)
    assert journal.take_unmasked() == (bound.serial,)


@pytest.mark.parametrize(
    ("token_ids", "reason", "is_ended"),
    [
        ([5, 5, 9], FinishReason.STOP, True),
        ([9, 9, 5], FinishReason.STOP, False),  # a stop string
        ([5, 9], FinishReason.LENGTH, False),
        ([], FinishReason.STOP, False),
    ],
)
def test_an_answer_is_ended_by_its_last_token_if_that_is_an_ending_one_and_it_stopped(
    token_ids: list[int], reason: FinishReason, is_ended: bool
) -> None:
    entry = entry_of(eos_token_ids=(9,))
    entry.output_token_ids += token_ids
    entry.finish(reason)
    assert entry.ended_by_token is is_ended


def test_the_prefix_cache_is_read_unless_the_request_says_no_or_wants_what_only_computing_gives() -> None:
    assert entry_of().reads_prefix_cache
    assert not entry_of(params=SamplingParams(skip_reading_prefix_cache=True)).reads_prefix_cache
    entry = entry_of(params=SamplingParams(prompt_logprobs=0, skip_reading_prefix_cache=False))
    assert not entry.reads_prefix_cache
    one = TokenLogprobs((1,), (-1.0,), 1)
    entry.add_prompt_logprobs(PromptLogprobs(entry.epoch, 1, (one,)), 0)
    assert entry.wants_prompt_logprobs
    entry.add_prompt_logprobs(PromptLogprobs(entry.epoch, 1, (one, one)), 0)  # again from the beginning
    assert (len(entry.prompt_logprobs), entry.wants_prompt_logprobs, entry.reads_prefix_cache) == (
        2,
        False,
        True,
    )


def test_logprobs_of_a_prompt_are_all_of_the_same_weights() -> None:
    entry = entry_of(params=SamplingParams(prompt_logprobs=0))
    old, new = (TokenLogprobs((1,), (logprob,), 1) for logprob in (-1.0, -2.0))
    entry.add_prompt_logprobs(PromptLogprobs(entry.epoch, 1, (old,)), 3)
    entry.add_prompt_logprobs(PromptLogprobs(entry.epoch, 1, (new,)), 4)  # the prompt is computed again
    assert (entry.prompt_logprobs, entry.wants_prompt_logprobs) == ([new], True)
    entry.add_prompt_logprobs(PromptLogprobs(entry.epoch, 2, (new,)), 4)
    assert (entry.prompt_logprobs, entry.wants_prompt_logprobs) == ([new, new], False)


def test_the_parts_of_a_pooled_result_are_kept_once_and_begin_anew_at_the_first_token() -> None:
    journal = Journal()
    entry = journal.open(make_request((1, 2, 3), pooling=PoolingParams(task="embed")))

    def part(start: int, *, is_last: bool = False, epoch: int = entry.epoch) -> PooledVectors:
        return PooledVectors(epoch, start, 1, b"", is_last)

    assert not journal.commit_pooled(entry, part(0, epoch=entry.epoch + 1))
    assert [journal.commit_pooled(entry, part(start)) for start in (0, 1, 0, 2)] == [True] * 4
    assert [one.start for one in entry.pooled] == [0, 2]
    is_complete = [entry.is_pooled]
    assert [journal.commit_pooled(entry, part(3, is_last=True)) for _ in range(2)] == [True, False]
    assert [*is_complete, entry.is_pooled] == [False, True]
    other = journal.open(make_request((1, 2, 3), pooling=PoolingParams(task="embed")))
    other.finish(FinishReason.ABORT)
    assert journal.commit_pooled(other, part(0, epoch=other.epoch)) is False


def test_times_between_tokens_are_counted_from_the_arrival_and_from_the_token_before() -> None:
    journal = Journal()
    entry = journal.open(make_request((1, 2, 3), arrival_s=2.0))
    journal.scheduled(entry, 3.0, num_cached_tokens=1)
    for now_s in (5.0, 9.0):
        journal.commit(entry, next_token(entry, 7), now_s)
    journal.stats.step(1)
    stats = journal.stats.take()
    assert stats is not None
    assert (stats.times_to_first_token, stats.inter_token_latencies) == ((3.0,), (4.0,))
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (3, 1)


def test_an_answer_of_its_greatest_length_is_in_order() -> None:
    entry = (journal := Journal()).open(make_request(max_tokens=2))
    entry.output_token_ids += [7, 7]
    journal.check()


def test_requests_that_are_held_end_with_the_first_one_or_as_aborted() -> None:
    journal = Journal()
    first = journal.open(make_request())
    held = journal.open(make_request(), after=first)
    assert [journal.is_held(entry) for entry in (first, held)] == [False, True]
    journal.close(first)
    assert held.finish_reason is FinishReason.ABORT


def test_an_answer_has_the_version_of_the_weights_that_computed_its_newest_token() -> None:
    journal, (exchanged, idle) = journal_with(3, 3)
    versions = []
    for version in (3, 4):
        journal.weight_version = version
        journal.commit(exchanged, next_token(exchanged, 7), 1.0)
        versions.append((exchanged.weight_version, idle.weight_version))
    assert versions == [(3, 0), (4, 0)]
