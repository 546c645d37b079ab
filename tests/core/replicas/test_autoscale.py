"""How many replicas an engine should have: more while requests wait, fewer after a minute in which few are left."""

from __future__ import annotations

import random

from triolet.core.replicas.autoscale import AutoscalePolicy, ReplicaLoad

ROWS = 8


def policy(least: int = 1, most: int = 4) -> AutoscalePolicy:
    """A policy with the documented times: two seconds and a minute."""
    return AutoscalePolicy(least, most, ROWS)


def short(num_living: int) -> ReplicaLoad:
    """A load of which three requests wait for a row."""
    return ReplicaLoad(num_living * ROWS + 3, 3, num_living)


def after(one: AutoscalePolicy, load: ReplicaLoad, from_s: float, to_s: float) -> int:
    """Decide each half second; return the last decision."""
    target, now_s = one.target, from_s
    while now_s <= to_s:
        target, now_s = one.decide(load, now_s), now_s + 0.5
    return target


def test_a_queue_of_two_seconds_asks_for_one_more() -> None:
    one = policy()
    assert after(one, short(1), 0, 1.5) == 1
    assert one.decide(short(1), 2.0) == 2


def test_a_queue_that_was_empty_in_between_asks_for_nothing() -> None:
    one = policy()
    assert after(one, short(1), 0, 1.5) == 1
    assert one.decide(ReplicaLoad(ROWS, 0, 1), 1.75) == 1
    assert after(one, short(1), 2.0, 3.5) == 1


def test_no_second_one_is_asked_for_before_the_first_computes() -> None:
    one = policy()
    assert after(one, short(1), 0, 30) == 2
    assert after(one, short(2), 30.5, 32) == 2
    assert after(one, short(2), 32.5, 33) == 3


def test_a_single_request_that_waits_asks_for_one_more() -> None:
    assert after(policy(), ReplicaLoad(ROWS + 1, 1, 1), 0, 2.0) == 2


def test_a_queue_counts_anew_after_one_more_was_asked_for() -> None:
    one = policy()
    assert after(one, short(1), 0, 2.0) == 2
    assert after(one, short(2), 2.5, 4.0) == 2  # the second computes at once
    assert one.decide(short(2), 4.5) == 3


def test_there_are_never_more_than_the_most_nor_fewer_than_the_least() -> None:
    one, draw, now_s = policy(2, 5), random.Random(4), 0.0
    seen = set()
    for _ in range(20_000):
        now_s += draw.random() * 5
        num_living = draw.randrange(6)
        num_live = draw.randrange(2 * ROWS * 5) if (now_s // 200) % 2 else 0
        seen.add(one.decide(ReplicaLoad(num_live, max(0, num_live - num_living * ROWS), num_living), now_s))
    assert seen == {2, 3, 4, 5}


def test_one_ends_after_a_minute_in_which_the_others_would_have_been_half_full() -> None:
    one = policy()
    assert after(one, short(1), 0, 2) == 2
    assert after(one, ReplicaLoad(4, 0, 2), 2.5, 62) == 2
    assert one.decide(ReplicaLoad(4, 0, 2), 62.5) == 1
    assert after(one, ReplicaLoad(0, 0, 1), 63, 600) == 1


def test_more_than_half_of_the_rows_of_the_others_keeps_it() -> None:
    one = policy()
    assert after(one, short(1), 0, 2) == 2
    assert after(one, ReplicaLoad(5, 0, 2), 2.5, 600) == 2


def test_what_was_asked_for_and_never_came_is_called_off_when_the_queue_is_gone() -> None:
    one = policy()
    assert after(one, short(1), 0, 2) == 2
    assert after(one, ReplicaLoad(0, 0, 1), 2.5, 63) == 1
