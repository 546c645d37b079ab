"""The prefix index names the replicas that hold a beginning, and stays within its bound."""

from __future__ import annotations

import random

from triolet.core.dispatch.prefix_index import PrefixIndex

A, B, C, D = b"a", b"b", b"c", b"d"


def test_a_replica_counts_only_the_blocks_from_the_first_on() -> None:
    index = PrefixIndex()
    index.touch(0, [A, B, C])
    index.touch(1, [A])
    index.touch(2, [B, C])  # the middle without the first block is of no use
    assert index.leading([A, B, C, D]) == {0: 3, 1: 1}


def test_a_hole_ends_what_a_replica_holds() -> None:
    index = PrefixIndex()
    index.touch(0, [A, B, C])
    index.touch(1, [A, B, C])
    index.discard(0, B)
    assert index.leading([A, B, C]) == {0: 1, 1: 3}


def test_a_chain_that_no_replica_holds_gives_nothing() -> None:
    index = PrefixIndex()
    assert index.leading([A, B]) == {}
    assert index.leading([]) == {}
    index.touch(0, [A])
    assert index.leading([B, A]) == {}


def test_a_replica_that_is_forgotten_leaves_the_others_what_they_hold() -> None:
    index = PrefixIndex()
    index.touch(0, [A, B])
    index.touch(63, [A])
    index.forget(0)
    assert index.leading([A, B]) == {63: 1}
    assert (len(index), index.num_blocks(0), index.num_blocks(63)) == (1, 0, 1)


def test_a_single_block_is_noted_until_it_is_discarded() -> None:
    index = PrefixIndex()
    index.add(1, A)
    assert (A in index, B in index) == (True, False)
    assert index.leading([A]) == {1: 1}
    index.discard(1, A)
    assert A not in index


def test_discarding_what_is_not_held_changes_nothing() -> None:
    index = PrefixIndex()
    index.touch(0, [A])
    index.discard(0, B)
    index.discard(1, A)
    assert index.leading([A]) == {0: 1}


def test_the_block_used_least_recently_goes_first_and_of_a_chain_the_last() -> None:
    index = PrefixIndex(max_blocks=3)
    index.touch(0, [A, B, C])
    index.touch(0, [D])  # one too many: the end of the chain goes, its beginning stays of use
    assert index.leading([A, B, C]) == {0: 2}
    assert index.leading([D]) == {0: 1}


def test_a_bound_holds_for_each_replica_alone() -> None:
    index = PrefixIndex(max_blocks=2)
    index.touch(0, [A, B])
    index.touch(1, [C, D])
    assert (index.num_blocks(0), index.num_blocks(1), len(index)) == (2, 2, 4)
    index.resize(0, 1)
    assert index.leading([A, B]) == {0: 1}
    assert index.leading([C, D]) == {1: 2}


def test_a_bound_of_its_own_ends_with_the_replica() -> None:
    index = PrefixIndex(max_blocks=2)
    index.resize(0, 1)
    index.forget(0)
    index.touch(0, [A, B])
    assert index.num_blocks(0) == 2


def test_random_calls_agree_with_lists_of_lists() -> None:
    dice = random.Random(0)
    index, oracle = (
        PrefixIndex(max_blocks=5),
        {replica: list[bytes]() for replica in range(3)},
    )  # oldest first
    names = [bytes([number]) for number in range(9)]
    for _ in range(3000):
        replica, chain = dice.randrange(3), dice.sample(names, dice.randrange(1, 5))
        match dice.randrange(10):
            case 0:
                index.forget(replica)
                oracle[replica] = []
            case 1 | 2:
                index.discard(replica, chain[0])
                oracle[replica] = [each for each in oracle[replica] if each != chain[0]]
            case _:
                index.touch(replica, chain)
                others = [each for each in oracle[replica] if each not in chain]
                oracle[replica] = [*others, *reversed(chain)][-5:]
        asked = dice.sample(names, 4)
        depths = {
            replica: next((depth for depth, each in enumerate(asked) if each not in held), 4)
            for replica, held in oracle.items()
        }
        assert index.leading(asked) == {replica: depth for replica, depth in depths.items() if depth}
        assert len(index) == len({each for held in oracle.values() for each in held})
