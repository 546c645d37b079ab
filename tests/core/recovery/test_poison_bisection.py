"""A request that makes the runner crash is found by bisection, and no other request is failed."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.core.recovery.recovery_state import CrashOutcome, PoisonBisection, RecoveryState

MARK = 10


@attrs.define
class Trial:
    """A runner that crashes whenever it is given a culprit, and every request that it is asked to compute."""

    crashes: Callable[[Collection[int]], bool]
    live: set[int]
    poison_bisection: PoisonBisection = attrs.field(factory=PoisonBisection)
    convicted: list[int] = attrs.field(factory=list)
    num_crashes: int = 0
    num_counted: int = 0
    num_rows_of_crashes: list[int] = attrs.field(factory=list)
    most_rows: int = 10**9
    draw: random.Random = attrs.field(factory=lambda: random.Random(0))

    def step(self) -> None:
        rows = sorted(serial for serial in self.live if self.poison_bisection.may_run(serial))
        rows = sorted(self.draw.sample(rows, min(self.most_rows, len(rows))))
        if not self.crashes(rows):
            self.poison_bisection.step_done(dict.fromkeys(rows, MARK))
            return
        self.num_rows_of_crashes.append(len(rows))
        outcome = self.poison_bisection.step_failed(dict.fromkeys(rows, MARK), num_rows=len(rows))
        self.num_crashes += 1
        self.num_counted = max(0, self.num_counted + 1 - outcome.num_uncounted)
        if outcome.culprit is not None:
            self.convicted.append(outcome.culprit)
            self.live.discard(outcome.culprit)
            self.poison_bisection.ended(outcome.culprit)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8, 16, 33, 64, 256])
def test_one_culprit_is_found_in_one_retry_and_a_bisection(num_rows: int) -> None:
    for culprit in {0, num_rows // 3, num_rows // 2, num_rows - 1}:
        trial = Trial({culprit}.issubset, set(range(num_rows)))
        while culprit in trial.live:
            trial.step()
        assert trial.convicted == [culprit]
        num_retries = trial.num_crashes - 1
        assert num_retries <= 1 + num_rows.bit_length() - 1  # 1 + log2(n)
        assert trial.num_counted == 0


def test_a_newcomer_is_found_with_two_retries_and_no_restart_for_the_others() -> None:
    trial = Trial(lambda rows: 15 in rows, set(range(16)))
    while 15 in trial.live:
        trial.step()
    assert trial.num_rows_of_crashes == [16, 16, 1]


@given(
    num_rows=st.integers(1, 40),
    culprits=st.sets(st.integers(0, 39), max_size=5),
    most_rows=st.integers(1, 40),
    seed=st.integers(0, 10_000),
)
def test_every_culprit_is_found_and_no_other_request(
    num_rows: int, culprits: set[int], most_rows: int, seed: int
) -> None:
    culprits &= set(range(num_rows))
    trial = Trial(lambda rows: bool(culprits & set(rows)), set(range(num_rows)), most_rows=most_rows)
    trial.draw = random.Random(seed)
    for _ in range(1000):
        trial.step()
        if trial.draw.random() < 0.02:  # a client leaves
            gone = trial.draw.randrange(num_rows)
            trial.live.discard(gone)
            trial.poison_bisection.ended(gone)
    assert set(trial.convicted) <= culprits
    assert not culprits & trial.live
    assert trial.num_crashes <= len(culprits) * (3 + num_rows.bit_length())
    assert trial.num_counted <= len(culprits) * 2


def test_a_single_crash_holds_no_request_back_and_a_success_clears() -> None:
    poison_bisection = PoisonBisection()
    for _ in range(50):
        assert poison_bisection.step_failed({1: 5, 2: 7}, num_rows=2) == CrashOutcome(None, 0)
        assert not poison_bisection.is_bisecting
        poison_bisection.step_done({1: 5, 2: 7})


def test_a_success_short_of_the_mark_clears_no_request() -> None:
    poison_bisection = PoisonBisection()
    poison_bisection.step_failed({1: 8, 2: 8}, num_rows=2)
    poison_bisection.step_done({1: 7, 2: 8})
    poison_bisection.step_failed({1: 8, 2: 9}, num_rows=2)
    assert [poison_bisection.may_run(serial) for serial in (1, 2, 3)] == [True, False, False]


def test_a_request_that_failed_beside_one_that_has_left_is_tried_alone_before_it_is_blamed() -> None:
    poison_bisection = PoisonBisection()
    assert poison_bisection.step_failed({1: 8}, num_rows=2).culprit is None
    assert poison_bisection.step_failed({1: 8}, num_rows=2).culprit is None
    assert poison_bisection.is_bisecting
    assert poison_bisection.step_failed({1: 8}, num_rows=1) == CrashOutcome(1, 3)


def test_chance_that_strikes_first_many_and_then_one_of_them_alone_convicts_no_request() -> None:
    poison_bisection = PoisonBisection()
    poison_bisection.step_failed({1: 8, 2: 8}, num_rows=2)
    assert poison_bisection.step_failed({1: 6}, num_rows=1) == CrashOutcome(None, 0)
    assert [poison_bisection.may_run(serial) for serial in (1, 2)] == [True, False]
    poison_bisection.step_done({1: 8})
    assert not poison_bisection.is_bisecting


def test_when_all_on_trial_have_left_the_next_half_is_tried() -> None:
    poison_bisection = PoisonBisection()
    for _ in range(2):
        poison_bisection.step_failed(dict.fromkeys((1, 2, 3, 4), 8), num_rows=4)
    for serial in (1, 2):
        assert poison_bisection.may_run(serial)
        poison_bisection.ended(serial)
    assert [poison_bisection.may_run(serial) for serial in (3, 4)] == [True, False]
    poison_bisection.ended(3)
    poison_bisection.ended(4)
    assert not poison_bisection.is_bisecting and poison_bisection.may_run(5)


def test_a_crash_of_the_company_and_not_of_one_convicts_no_request_and_counts() -> None:
    trial = Trial(lambda rows: len(rows) > 4, set(range(8)))
    for _ in range(40):
        trial.step()
    assert trial.convicted == []
    assert trial.num_counted > 10


def test_requests_of_a_crash_are_remembered_until_they_end() -> None:
    poison_bisection = PoisonBisection()
    poison_bisection.step_failed({1: 8, 2: 8}, num_rows=2)
    poison_bisection.step_done({1: 8, 2: 8, 3: 8})
    assert poison_bisection.crashed == {1, 2}
    poison_bisection.ended(1)
    assert poison_bisection.crashed == {2}


def test_requests_that_were_in_no_crash_change_nothing_of_a_bisection() -> None:
    poison_bisection = PoisonBisection()
    for _ in range(2):
        poison_bisection.step_failed({1: 8, 2: 8}, num_rows=2)
    poison_bisection.step_done({99: 100})
    assert [poison_bisection.may_run(serial) for serial in (1, 2)] == [True, False]


def test_a_request_that_left_is_not_in_the_next_half() -> None:
    poison_bisection = PoisonBisection()
    for _ in range(2):
        poison_bisection.step_failed(dict.fromkeys((1, 2, 3, 4), 8), num_rows=4)
    poison_bisection.ended(3)
    poison_bisection.step_done({1: 8, 2: 8})
    assert poison_bisection.may_run(4)


def test_crashes_that_several_culprits_were_in_are_taken_off_the_restart_limit_once() -> None:
    poison_bisection = PoisonBisection()
    for _ in range(2):
        poison_bisection.step_failed({1: 8, 2: 8}, num_rows=2)
    assert poison_bisection.step_failed({1: 8}, num_rows=1) == CrashOutcome(1, 3)
    assert poison_bisection.step_failed({2: 8}, num_rows=1) == CrashOutcome(None, 0)
    assert poison_bisection.step_failed({2: 8}, num_rows=1) == CrashOutcome(2, 2)


def test_a_recovery_state_begins_with_nothing_learned() -> None:
    state = RecoveryState()
    assert (state.num_uncounted, state.has_runner_failed, state.poison_bisection.crashed) == (0, False, set())
