"""Share of the journal that one replica computes: its own requests, and the counts of the engine."""

from __future__ import annotations

import pytest

from tests.core.make import make_request
from tests.core.replicas.some_replicas import Replicas
from triolet.core.request.grammar_state import Constraint
from triolet.core.request.pooling_params import PoolingParams
from triolet.core.request.request import Request
from triolet.core.step_plan import PooledVectors
from triolet.errors import InvariantViolated


def test_a_share_has_the_requests_of_its_replica_in_the_order_of_their_serials() -> None:
    there = Replicas(2, num_living=0)
    first, second, third = there.open(), there.open(), there.open()
    for entry in (third, first):
        there.shares[0].add(entry)
    share = there.shares[0]
    assert (len(share), list(share), first.replica) == (2, [first, third], 0)
    assert [serial in share for serial in (1, 2, 3)] == [True, False, True]
    assert share.untaken == (first, third)
    assert share.get(2) is second
    assert share.get(4) is None
    assert share.stats is there.journal.stats


def test_arrivals_of_a_share_are_taken_once_and_stay_its_own() -> None:
    there = Replicas(1)
    entries = [there.open(), there.open()]
    assert there.shares[0].take_arrivals() == entries
    assert there.shares[0].take_arrivals() == []
    assert (there.shares[0].untaken, list(there.shares[0])) == ((), entries)


def test_arrivals_are_taken_in_the_order_of_their_serials() -> None:
    there = Replicas(1, num_living=0)
    entries = [there.open(), there.open()]
    there.journal.take_arrivals()
    for entry in reversed(entries):
        there.shares[0].add(entry)
    assert there.shares[0].take_arrivals() == entries


def test_a_request_that_was_given_back_is_in_no_share() -> None:
    there = Replicas(1)
    entry = there.add()
    there.shares[0].remove(entry)
    assert (entry.replica, len(there.shares[0]), there.shares[0].untaken) == (None, 0, ())
    there.shares[0].forget(entry.serial)  # once more does no harm


def test_requests_are_not_opened_in_a_share() -> None:
    there = Replicas(1)
    with pytest.raises(InvariantViolated, match="journal of the engine"):
        there.shares[0].open(make_request())


def test_counts_of_a_share_are_those_of_the_engine() -> None:
    there = Replicas(2)
    entry, other = there.add(30), there.add(20)
    share = there.shares[0]
    assert (share.num_queued_tokens, share.last_serial) == (50, 2)
    share.scheduled(entry, 3.0, 8)
    assert (entry.scheduled_s, entry.num_cached_tokens, share.num_queued_tokens) == (3.0, 8, 20)
    there.shares[1].scheduled(other, 4.0)
    assert other.num_cached_tokens == 0


def test_a_share_asks_for_the_masks_of_its_own_requests() -> None:
    there = Replicas(2)
    first, second = there.add(constraint=Constraint()), there.add(constraint=Constraint())
    for replica, entry in enumerate((first, second)):
        assert there.shares[replica].begin_stay(entry) == entry.epoch == 3 + replica
    assert there.shares[1].take_unmasked() == (second.serial,)
    assert there.shares[1].take_unmasked({first.serial}) == (first.serial,)


def test_a_pooled_result_is_committed_once() -> None:
    there = Replicas(1)
    request: Request = make_request(pooling=PoolingParams(task="embed"))
    entry = there.journal.open(request)
    share = there.shares[0]
    assert share.take_arrivals() == [entry]
    part = PooledVectors(entry.epoch, 0, 1, b"\0\0\0\0", is_last=True)
    assert share.commit_pooled(entry, part)
    assert not share.commit_pooled(entry, part)
    assert entry.pooled == [part]


def test_a_request_and_those_that_were_held_for_it_end_together() -> None:
    there = Replicas(2)
    first = there.add()
    held = there.journal.open(make_request(), after=first)
    assert there.shares[0].close(first) == [first.serial, held.serial]
    assert (len(there.journal), len(there.shares[0])) == (0, 0)
