"""Table of the requests by replica: each is in one place, follows the lives of the replicas, and suspects stay."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.core.make import make_request, next_token
from tests.core.replicas.some_replicas import BLOCK, Replicas
from triolet.core.journal import JournalEntry
from triolet.core.kv_cache.prefix_cache import DEFAULT_NAMESPACE, CacheNamespace, PrefixCache
from triolet.core.recovery.recovery_state import Candidate
from triolet.core.request.params import SamplingParams
from triolet.core.request.request import FinishReason
from triolet.errors import InvariantViolated


def serials(entries: Sequence[JournalEntry]) -> list[int]:
    return [entry.serial for entry in entries]


# ------------------------------------------------------------------------------------------ placing


def test_a_new_table_has_no_living_replica_and_nothing_that_drains_has_moved_or_is_unplaced() -> None:
    table = Replicas(3, num_living=0).table
    assert (table.living, table.num_moved, table.num_unplaced) == ((), 0, 0)
    assert table.draining == set()
    assert [share.replica for share in table.shares] == [0, 1, 2]


def test_what_arrives_is_placed_once_and_its_replica_is_woken() -> None:
    there = Replicas()
    first = there.add()
    there.table.dispatch()
    second = there.add()
    assert (first.replica, second.replica) == (0, 1)
    assert there.woken == [0, 1]
    assert [list(share) for share in there.shares] == [[first], [second]]
    assert there.table.num_moved == 0


def test_what_no_replica_takes_is_unplaced_and_goes_to_the_first_that_begins_oldest_first() -> None:
    there = Replicas(2, num_living=0)
    entries = [there.add() for _ in range(3)]
    assert [entry.replica for entry in entries] == [None, None, None]
    assert (there.table.num_unplaced, there.woken) == (3, [])
    there.table.begin_life(1)
    assert (there.table.living, there.table.num_unplaced, there.woken) == ((1,), 0, [1, 1, 1])
    assert there.shares[1].untaken == tuple(entries)
    assert there.table.num_moved == 0


def test_the_oldest_request_is_placed_first_also_if_it_became_unplaced_last() -> None:
    there = Replicas(2, num_living=1)
    old = there.add()
    there.table.draining.add(0)
    young = there.add()
    there.end_life(0)
    assert (old.replica, young.replica) == (None, None)
    there.table.draining.clear()
    there.table.begin_life(0)
    there.table.begin_life(1)
    assert (old.replica, young.replica) == (0, 0)
    assert list(there.shares[0]._new) == [old.serial, young.serial]


def test_a_request_that_ends_while_it_is_unplaced_counts_no_longer_and_is_not_placed() -> None:
    there = Replicas(1, num_living=0)
    entry, other = there.add(), there.add()
    there.journal.close(entry)
    assert there.table.num_unplaced == 1
    there.table.begin_life(0)
    assert list(there.shares[0]) == [other]
    assert there.woken == [0]


def test_a_request_that_is_held_for_the_first_token_of_another_is_placed_when_that_comes() -> None:
    there = Replicas(1)
    first = there.add()
    held = there.journal.open(make_request(), after=first)
    there.table.dispatch()
    there.table.check()
    assert held.replica is None
    assert there.shares[0].is_held(held)
    assert not there.shares[0].is_held(first)
    there.commit(first)
    there.table.check()
    assert there.shares[0].take_arrivals() == [first, held]


# --------------------------------------------------------------------------- what the dispatcher is told


def uneven() -> Replicas:
    """The queue of replica 0 takes 0.1 s from time 0 on, that of replica 1 takes 0.06 s, at 0.1 ms a token."""
    there = Replicas()
    assert there.add(1000).replica == 0
    assert there.add(600).replica == 1
    return there


def test_a_request_goes_where_the_queue_is_shorter() -> None:
    assert uneven().add(1).replica == 1


def test_a_replica_with_an_overdue_first_prompt_is_avoided_as_time_goes_on() -> None:
    there = uneven()
    there.table.advance_clock(0.1)  # the one is to be done now, the other is late by 0.04 s
    assert there.add(1).replica == 0


def test_the_clock_does_not_go_back() -> None:
    there = uneven()
    there.table.advance_clock(0.1)
    there.table.advance_clock(0.0)
    assert there.add(1, arrival_s=0.0).replica == 0


def test_the_arrival_of_a_request_advances_the_clock() -> None:
    assert uneven().add(1, arrival_s=0.1).replica == 0


def test_the_time_of_a_token_advances_the_clock() -> None:
    there = uneven()
    [second] = there.shares[1]
    there.commit(second, 0.06)
    assert there.add(800).replica == 1
    assert there.add(1).replica == 0  # 0.04 s are left there, and 0.08 s at the other


def test_a_request_with_a_token_is_queued_no_longer() -> None:
    there = uneven()
    [second] = there.shares[1]
    assert there.commit(second, 0.06)
    there.table.advance_clock(0.085)  # otherwise it would be overdue by 0.025 s, and 0.015 s are left at 0
    assert there.add(1).replica == 1


def test_a_late_token_is_refused_and_its_request_stays_queued() -> None:
    there = uneven()
    [first] = there.shares[0]
    late = next_token(first, 5)
    first.epoch += 1000
    assert not there.shares[0].commit(first, late, 0.0)
    assert first.output_token_ids == []
    assert there.add(1).replica == 1


def test_a_request_that_has_ended_is_in_no_place_and_its_replica_has_room_again() -> None:
    there = uneven()
    [second] = there.shares[1]
    assert there.shares[1].close(second) == [second.serial]
    there.table.check()
    assert (len(there.shares[1]), there.shares[1].untaken) == (0, ())
    assert there.add(800).replica == 1
    assert there.add(1).replica == 1


def test_the_wait_behind_a_request_begins_when_the_one_before_it_ends() -> None:
    there = Replicas(3, num_living=1)
    first, _ = there.add(500), there.add(1000)
    there.table.begin_life(1)
    assert there.add(1000).replica == 1
    there.table.advance_clock(0.05)
    there.shares[0].close(first)  # 0.1 s are left at replica 0, 0.05 s at replica 1
    assert there.add(1).replica == 1


# -------------------------------------------------------------------------------------- prefix caches

KEY = b"secret"


def cached(replicas: Replicas, replica: int, *, num_blocks: int = 8, enabled: bool = True) -> PrefixCache:
    """Give a replica an empty prefix cache."""
    cache = PrefixCache(num_blocks, BLOCK, key=KEY, enabled=enabled)
    replicas.table.follow_cache(replica, cache)
    return cache


def hashes(prompt: Sequence[int], namespace: CacheNamespace = DEFAULT_NAMESPACE) -> list[bytes]:
    """Hashes of the full blocks of a prompt."""
    cache = PrefixCache(1, BLOCK, key=KEY)
    found, parent = [], cache.root(namespace)
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        parent = cache.chain(parent, tuple(prompt[start : start + BLOCK]))
        found.append(parent)
    return found


def publish(cache: PrefixCache, prompt: Sequence[int]) -> None:
    for block_hash in hashes(prompt):
        cache.on_publish(block_hash)


PROMPT = tuple(range(50, 71))  # five blocks and a token


def test_a_prompt_goes_to_the_replica_with_most_of_its_beginning_in_the_cache() -> None:
    there = Replicas(3)
    for replica, num_blocks in ((1, 2), (2, 5)):
        publish(cached(there, replica), PROMPT[: num_blocks * BLOCK])
    assert there.add(PROMPT).replica == 2


def test_blocks_with_tokens_of_the_answer_count_as_well() -> None:
    there = Replicas(3)
    prompt, answer = PROMPT[:20], (5, 5, 5, 5)
    entry = there.add(prompt)
    assert entry.replica == 0
    for _ in range(5):
        there.commit(entry, 0.002)
    publish(cached(there, 1), prompt)
    publish(cached(there, 2), (*prompt, *answer))
    there.end_life(0)
    assert entry.replica == 2


def test_where_a_prompt_is_placed_says_nothing_of_what_a_cache_holds() -> None:
    there = Replicas(2)
    publish(cached(there, 1), PROMPT)
    busy = there.add(PROMPT + tuple(range(1000, 2000)))
    assert busy.replica == 1
    elsewhere = there.add(PROMPT)
    assert elsewhere.replica == 0
    for entry in (busy, elsewhere):
        there.shares[entry.replica or 0].close(entry)
    assert there.add(PROMPT).replica == 1


def test_a_block_that_a_cache_has_forgotten_attracts_nothing() -> None:
    there = Replicas(2)
    cache = cached(there, 1)
    publish(cache, PROMPT)
    for block_hash in hashes(PROMPT):
        cache.on_forget(block_hash)
    assert there.add(PROMPT).replica == 0


def test_a_new_scheduler_has_an_empty_cache() -> None:
    there = Replicas(2)
    publish(cached(there, 1), PROMPT)
    cached(there, 1)
    assert there.add(PROMPT).replica == 0


def test_a_replica_is_taken_to_hold_no_more_blocks_than_its_pool_has() -> None:
    there = Replicas(2)
    cache = cached(there, 1, num_blocks=2)
    publish(cache, PROMPT[:BLOCK])
    publish(cache, range(100, 108))
    assert there.add(PROMPT).replica == 0


def test_a_pool_that_is_just_large_enough_forgets_nothing() -> None:
    there = Replicas(2)
    cache = cached(there, 1, num_blocks=3)
    publish(cache, PROMPT[:BLOCK])
    publish(cache, range(100, 108))
    assert there.add(PROMPT).replica == 1


def test_a_block_that_leaves_no_token_to_compute_is_not_asked_for() -> None:
    there = Replicas(2)
    publish(cached(there, 1), PROMPT)
    assert there.add(PROMPT[:BLOCK]).replica == 0
    assert there.add(PROMPT[: BLOCK + 1]).replica == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"params": SamplingParams(skip_reading_prefix_cache=True)},
        {"params": SamplingParams(prompt_logprobs=1)},
        {"cache_namespace": CacheNamespace(salt="of another client")},
    ],
    ids=lambda fields: next(iter(fields.values())).__class__.__name__,
)
def test_a_request_that_must_not_read_the_blocks_is_placed_without_them(fields: dict[str, object]) -> None:
    there = Replicas(2)
    publish(cached(there, 1), PROMPT)
    assert there.add(PROMPT, **fields).replica == 0


def test_caches_that_are_off_are_not_asked() -> None:
    there = Replicas(2)
    publish(cached(there, 1, enabled=False), PROMPT)
    assert there.add(PROMPT).replica == 0


# -------------------------------------------------------------------------------- lives of the replicas


def test_a_replica_that_lives_already_may_begin_once_more() -> None:
    there = Replicas(2)
    there.table.begin_life(1)
    assert there.table.living == (0, 1)


def test_the_requests_of_a_dead_replica_go_to_another_one_and_late_results_are_refused() -> None:
    there = Replicas(2)
    entry, other = there.add(), there.add()
    epoch, late = entry.epoch, next_token(entry, 5)
    there.woken.clear()
    there.end_life(0)
    assert (entry.replica, there.table.living, there.woken, there.table.num_moved) == (1, (1,), [1], 1)
    assert list(there.shares[1]) == [entry, other]
    assert entry.epoch > epoch
    assert not there.journal.commit(entry, late, 0.0)


@pytest.mark.parametrize(("was_scheduled", "num_moved_tokens"), [(True, 11), (False, 0)])
def test_tokens_count_as_moved_only_if_they_were_computed(was_scheduled: bool, num_moved_tokens: int) -> None:
    there = Replicas(2)
    entry = there.add(10)
    if was_scheduled:
        there.shares[0].scheduled(entry, 0.0)
        there.commit(entry)
    there.end_life(0)
    assert entry.num_moved_tokens == num_moved_tokens


def test_requests_of_the_last_replica_wait_for_any_and_count_as_moved_when_placed() -> None:
    there = Replicas(2, num_living=1)
    entry = there.add()
    there.end_life(0)
    assert (entry.replica, there.table.num_unplaced, there.table.num_moved) == (None, 1, 0)
    there.end_life(0)  # once more does no harm
    there.table.begin_life(1)
    assert (entry.replica, there.table.num_moved) == (1, 1)
    there.table.place_again(1, [entry])
    there.table.dispatch()
    assert there.table.num_moved == 1


def test_a_suspect_stays_with_its_dead_replica_and_the_others_leave() -> None:
    there = Replicas(2)
    suspect = there.add()
    there.add()
    innocent = there.add()
    assert (suspect.replica, innocent.replica) == (0, 0)
    epoch = suspect.epoch
    there.suspect(suspect)
    there.end_life(0)
    assert (suspect.replica, innocent.replica, there.table.num_moved) == (0, 1, 1)
    assert suspect.epoch == epoch
    assert list(there.shares[0]) == [suspect]


def test_a_replica_with_suspects_gets_nothing_else_until_they_are_cleared() -> None:
    there = Replicas(2)
    suspect = there.add()
    there.suspect(suspect)
    there.end_life(0)
    there.table.begin_life(0)
    assert [there.add().replica for _ in range(3)] == [1, 1, 1]
    there.table.bisection(0).step_done({suspect.serial: suspect.num_tokens})
    assert there.add().replica == 0


def test_the_load_of_a_suspect_counts_in_the_next_life_of_its_replica() -> None:
    there = Replicas(2)
    suspect = there.add(30)
    there.suspect(suspect)
    there.end_life(0)
    there.table.begin_life(0)
    there.table.bisection(0).step_done({suspect.serial: suspect.num_tokens})
    assert there.add(20).replica == 1
    there.shares[0].close(suspect)
    assert there.add(1).replica == 0


def test_a_replica_that_is_to_end_gets_nothing_until_that_is_called_off() -> None:
    there = Replicas(2)
    there.table.draining.add(0)
    assert [there.add().replica for _ in range(2)] == [1, 1]
    there.table.draining.discard(0)
    assert there.add().replica == 0


def test_suspects_of_a_replica_that_is_given_up_go_to_another_one_with_what_is_known_of_them() -> None:
    there = Replicas(2)
    suspect = there.add()
    there.suspect(suspect)
    there.end_life(0)
    there.table.give_up(0)
    assert (suspect.replica, there.table.num_moved) == (1, 1)
    assert there.table.bisection(0).suspects == frozenset()
    assert there.table.bisection(1).suspects == {suspect.serial}
    assert there.table.bisection(1).crashed == {suspect.serial}
    # It was in one crash: the second, alone, shows that it is the culprit.
    outcome = there.table.bisection(1).step_failed({suspect.serial: 10}, num_rows=1)
    assert outcome.culprit == suspect.serial


def test_a_replica_that_lives_is_not_given_up() -> None:
    there = Replicas(2)
    entry = there.add()
    there.table.give_up(0)
    assert (entry.replica, entry.epoch) == (0, 1)


def test_suspects_stay_where_they_are_while_no_replica_lives() -> None:
    there = Replicas(2, num_living=1)
    suspect = there.add()
    there.suspect(suspect)
    there.end_life(0)
    there.table.give_up(0)
    assert suspect.replica == 0


def test_a_replica_that_retires_keeps_nothing_and_may_take_requests_when_it_comes_back() -> None:
    there = Replicas(2)
    suspect = there.add()
    there.suspect(suspect)
    there.table.draining.add(0)
    there.end_life(0)
    there.table.retire(0)
    assert (suspect.replica, there.table.draining) == (1, set())
    there.table.begin_life(0)
    assert there.add().replica == 0


def test_what_a_replica_has_not_begun_is_placed_anew_and_may_go_to_one_that_has_come() -> None:
    there = Replicas(2, num_living=1)
    entries = [there.add() for _ in range(4)]
    there.shares[0].take_arrivals()
    young = [there.add(), there.add()]
    epochs = [entry.epoch for entry in entries]
    there.table.begin_life(1)
    there.table.place_again(0, entries[2:])
    assert there.table.num_unplaced == 4  # with those that the replica had not taken yet
    there.table.dispatch()
    there.table.check()
    assert serials(list(there.shares[0])) == [1, 2, 5]
    assert serials(list(there.shares[1])) == [3, 4, 6]
    assert [entry.epoch > epoch for entry, epoch in zip(entries, epochs, strict=True)] == [
        False,
        False,
        True,
        True,
    ]
    assert [entry.replica for entry in young] == [0, 1]
    assert there.table.num_moved == 0


# --------------------------------------------------------------------------------------------- endings


def test_a_request_that_ends_after_a_crash_is_a_suspect_no_longer() -> None:
    there = Replicas(2)
    suspect, other = there.add(), there.add()
    there.suspect(suspect)
    there.table.bisection(1).adopt(other.serial, Candidate(num_internal=1))
    there.shares[0].close(suspect)
    assert there.table.bisection(0).suspects == frozenset()
    assert there.table.bisection(0).crashed == set()
    assert there.table.bisection(1).suspects == {other.serial}
    there.table.note_end([99])  # a request that is in no place
    assert there.table.bisection(1).suspects == {other.serial}


def test_nothing_is_kept_of_a_request_that_ends_while_it_moves() -> None:
    there = Replicas(1)
    entry = there.add()
    there.end_life(0)
    there.table.note_end(there.journal.close(entry))
    assert (there.table.num_unplaced, there.table._unplaced, there.table._moving) == (0, {}, {})


# ----------------------------------------------------------------------------------------------- check


def test_a_request_that_is_in_two_places_violates_the_table() -> None:
    there = Replicas(2)
    entry = there.add()
    there.shares[1].own[entry.serial] = entry
    with pytest.raises(InvariantViolated, match="request 1 is with replica 0; replica 1 has it, too"):
        there.table.check()


def test_a_request_that_is_unplaced_and_with_a_replica_violates_the_table() -> None:
    there = Replicas(2)
    there.add()
    there.table._unplaced[1] = None
    with pytest.raises(InvariantViolated, match="in one place; it is in 2"):
        there.table.check()


def test_a_request_in_no_place_violates_the_table() -> None:
    there = Replicas(2)
    entry = there.add()
    there.shares[0].remove(entry)
    with pytest.raises(InvariantViolated, match="in one place; it is in 0"):
        there.table.check()


def test_a_request_that_is_held_and_with_a_replica_violates_the_table() -> None:
    there = Replicas(2)
    held = there.journal.open(make_request(), after=there.add())
    there.shares[0].add(held)
    with pytest.raises(InvariantViolated, match="request 2 must be in one place"):
        there.table.check()


def test_a_request_that_has_ended_and_is_still_with_a_replica_violates_the_table() -> None:
    there = Replicas(2)
    there.journal.close(there.add())
    with pytest.raises(InvariantViolated, match="request 1 is with replica 0"):
        there.table.check()


def test_a_request_that_has_just_arrived_is_in_one_place() -> None:
    there = Replicas(2)
    there.open()
    there.table.check()
    there.add()
    there.table.check()


def test_the_check_of_a_share_is_that_of_the_journal_and_of_the_table() -> None:
    there = Replicas(2)
    entry = there.add()
    there.shares[1].check()
    entry.finish_reason = FinishReason.STOP
    with pytest.raises(InvariantViolated, match="still live"):
        there.shares[1].check()
    entry.finish_reason = None
    there.shares[0].remove(entry)
    with pytest.raises(InvariantViolated, match="in one place"):
        there.shares[1].check()
