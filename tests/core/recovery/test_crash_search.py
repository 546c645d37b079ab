"""What a crash of the runner says about the requests of its step, alone, together, and from outside."""

from __future__ import annotations

import signal

import pytest

from tests.core.make import make_request
from triolet.core.recovery.recovery_state import (
    Candidate,
    CrashOutcome,
    HangLimit,
    OomBackoff,
    PoisonBisection,
    RareHangLimit,
    RecoveryState,
    crashes_the_runner,
    is_external,
    step_kind,
)
from triolet.core.step_plan import PlanRow, StepPlan
from triolet.errors import RequestFailed, ResourceShortage, RunnerDied

UNKNOWN = CrashOutcome(None, 0)


def crashed_twice(*serials: int) -> PoisonBisection:
    """A search after two crashes of one step with these requests."""
    search = PoisonBisection()
    for _ in range(2):
        assert search.step_failed(dict.fromkeys(serials, 5), num_rows=len(serials)) == UNKNOWN
    return search


def allowed(search: PoisonBisection, *serials: int) -> list[int]:
    return [serial for serial in serials if search.may_run(serial)]


def test_a_request_that_crashes_alone_twice_is_the_culprit_and_explains_both() -> None:
    search = PoisonBisection()
    assert search.step_failed({1: 5}, num_rows=1) == UNKNOWN
    assert search.step_failed({1: 5}, num_rows=1) == CrashOutcome(1, 2)
    assert not search.is_bisecting


def test_a_crash_alone_that_something_outside_caused_convicts_no_request() -> None:
    search = PoisonBisection()
    assert search.step_failed({1: 5}, num_rows=1, is_external=True) == UNKNOWN
    assert search.suspects == frozenset()
    assert search.step_failed({1: 5}, num_rows=1) == UNKNOWN
    assert search.suspects == {1}
    assert search.step_failed({1: 5}, num_rows=1) == CrashOutcome(1, 3)


def test_two_crashes_from_outside_make_suspects_and_one_of_its_own_does_at_once() -> None:
    search = PoisonBisection()
    search.step_failed({1: 5, 2: 5}, num_rows=2, is_external=True)
    search.step_failed({1: 5}, num_rows=2, is_external=True)
    search.step_failed({3: 5}, num_rows=2)
    assert search.suspects == {1, 3}
    assert search.crashed == {1, 2, 3}


@pytest.mark.parametrize(("num_requests", "older"), [(2, [1]), (3, [1]), (4, [1, 2]), (5, [1, 2])])
def test_after_the_second_crash_the_older_half_runs(num_requests: int, older: list[int]) -> None:
    search = crashed_twice(*range(num_requests, 0, -1))
    assert search.is_bisecting
    assert allowed(search, *range(1, num_requests + 2)) == older


def test_a_crash_in_the_search_is_explained_and_halves_what_is_left() -> None:
    search = crashed_twice(1, 2, 3, 4)
    assert search.step_failed({1: 5, 2: 5}, num_rows=2) == CrashOutcome(None, 1)
    assert allowed(search, 1, 2, 3, 4) == [1]
    assert search.step_failed({1: 5}, num_rows=1) == CrashOutcome(1, 3)
    assert allowed(search, 2, 3, 4) == [2, 3, 4]


def test_a_half_that_is_cleared_is_followed_by_the_older_half_of_the_other() -> None:
    search = crashed_twice(1, 2, 3, 4)
    search.step_done({1: 5})
    assert allowed(search, 1, 2, 3, 4) == [2]
    search.step_done({2: 5})
    assert allowed(search, 1, 2, 3, 4) == [3]


def test_the_mark_is_the_furthest_that_a_crashed_step_would_have_come() -> None:
    search = PoisonBisection()
    search.step_failed({1: 9}, num_rows=2)
    search.step_done({1: 8})
    search.step_failed({1: 5}, num_rows=2, is_external=True)
    search.step_done({1: 8})
    assert search.suspects == {1}
    search.step_done({1: 9})
    assert search.suspects == frozenset()


def test_after_the_culprit_the_others_explain_no_crash_again() -> None:
    search = crashed_twice(1, 2)
    assert search.step_failed({1: 5}, num_rows=1) == CrashOutcome(1, 3)
    assert search.step_failed({2: 5}, num_rows=1) == UNKNOWN
    assert search.step_failed({2: 5}, num_rows=1) == CrashOutcome(2, 2)


def test_a_request_goes_on_elsewhere_with_what_is_known_of_it() -> None:
    search = crashed_twice(1, 2, 3)
    candidate = search.release(1)
    assert candidate == Candidate(mark=5, num_crashes=2, num_alone=0, num_counted=2, num_internal=2)
    assert search.crashed == search.suspects == {2, 3}
    assert allowed(search, 2, 3) == [2]
    assert search.release(9) is None
    other = PoisonBisection()
    assert candidate is not None
    other.adopt(7, candidate)
    assert other.crashed == other.suspects == {7}
    assert not other.is_bisecting
    assert other.step_failed({7: 5}, num_rows=1) == UNKNOWN
    assert other.step_failed({7: 5}, num_rows=1) == CrashOutcome(7, 1 + 2 + 1)


def test_a_request_that_is_new_to_a_search_knows_of_no_crash() -> None:
    assert Candidate() == Candidate(mark=0, num_crashes=0, num_alone=0, num_counted=0, num_internal=0)
    assert not Candidate().is_suspect
    assert not Candidate(num_crashes=1).is_suspect
    assert Candidate(num_crashes=2).is_suspect


def test_a_request_that_ended_is_forgotten_whether_or_not_it_was_in_a_crash() -> None:
    search = PoisonBisection()
    search.step_failed({1: 5}, num_rows=2)
    search.ended(1)
    search.ended(2)
    assert (search.crashed, search.suspects) == (set(), frozenset())


def test_requests_that_were_in_no_crash_are_nothing_to_clear() -> None:
    search = PoisonBisection()
    search.step_failed({1: 5}, num_rows=2)
    search.step_done({1: 4, 99: 100})
    assert search.suspects == {1}


# ---------------------------------------------------------------------------------- what was outside


@pytest.mark.parametrize(
    ("error", "external"),
    [
        (RunnerDied("was killed", -signal.SIGKILL), True),
        (RunnerDied("was ended", -signal.SIGTERM), True),
        (RunnerDied("crashed", -signal.SIGSEGV), False),
        (RunnerDied("has ended", 1), False),
        (RunnerDied("has ended", 9), False),
        (RunnerDied("hung", -signal.SIGKILL, is_hang=True), False),
        (RunnerDied("is lost", None, is_lost=True), True),
        (RunnerDied("has ended", None), False),
        (ValueError("no process"), False),
        (ResourceShortage("memory", "a step"), True),
    ],
)
def test_a_kill_a_shortage_or_a_lost_machine_is_outside_and_a_hang_or_a_crash_is_not(
    error: Exception, external: bool
) -> None:
    assert is_external(error) is external


@pytest.mark.parametrize(("parent_id", "named"), [(None, "r"), ("p", "p")])
def test_the_error_of_a_culprit_names_what_the_caller_knows_and_has_the_crash_as_its_cause(
    parent_id: str | None, named: str
) -> None:
    cause = RunnerDied("crashed", -11)
    error = crashes_the_runner(make_request(parent_id=parent_id), cause)
    assert isinstance(error, RequestFailed) and error.request_id == named
    assert error.__cause__ is cause
    assert "crashes the model runner, also when computed alone" in str(error)
    assert "process crashed" in str(error)


def test_the_error_of_a_request_that_lacks_a_resource_each_time_is_typed() -> None:
    cause = ResourceShortage("memory", "a step of one token")
    error = crashes_the_runner(make_request(parent_id="p"), cause)
    assert isinstance(error, ResourceShortage)
    assert (error.resource, error.purpose) == ("memory", "request p, also when computed alone")
    assert error.__cause__ is cause


def test_a_crash_for_lack_of_a_resource_explains_no_counted_restart_and_the_next_runner_is_unlimited() -> (
    None
):
    shortage = ResourceShortage("memory", "a step of one token")
    state = RecoveryState()
    state.memory.step_did_not_fit([4, 4])
    outcomes = [state.step_failed({1: 5}, num_rows=1, error=shortage) for _ in range(3)]
    assert outcomes == [UNKNOWN, UNKNOWN, CrashOutcome(1, 0)]  # the supervisor has counted none of them
    assert state.num_uncounted == 0
    assert limits(state.memory) == limits(OomBackoff())


def test_a_counted_crash_of_a_culprit_is_explained_and_its_shortages_were_not_counted() -> None:
    state = RecoveryState()
    state.step_failed({1: 5}, num_rows=1, error=ResourceShortage("memory", "a step of one token"))
    assert state.step_failed({1: 5}, num_rows=1, error=ValueError("planted")) == UNKNOWN
    assert state.step_failed({1: 5}, num_rows=1, error=ValueError("planted")) == CrashOutcome(1, 2)
    assert state.num_uncounted == 2


def test_nothing_is_learned_at_the_start() -> None:
    state = RecoveryState()
    assert (state.num_uncounted, state.has_runner_failed, state.poison_bisection.is_bisecting) == (
        0,
        False,
        False,
    )
    assert state.memory.max_tokens(10**9) == 10**9
    assert RareHangLimit(5.0).is_learned is False


# ------------------------------------------------------------------------------------ smaller steps


def limits(backoff: OomBackoff) -> tuple[int, int]:
    return backoff.max_rows(1000), backoff.max_tokens(1000)


def test_limits_double_after_64_steps_that_fit_and_end_with_those_of_the_configuration() -> None:
    backoff = OomBackoff()
    assert backoff.step_did_not_fit([40, 2, 2]) == 1
    sizes = []
    for _ in range(2 * 64 + 1):
        sizes.append(limits(backoff))
        backoff.step_done(8, 16)
    assert sizes == [(2, 4)] * 64 + [(4, 8)] * 64 + [(1000, 1000)]


def test_limits_stay_until_both_are_those_of_the_configuration() -> None:
    backoff = OomBackoff()
    backoff.step_did_not_fit([40, 2, 2])
    for _ in range(64):
        backoff.step_done(4, 9)
    assert limits(backoff) == (4, 8)
    for _ in range(64):
        backoff.step_done(9, 16)
    assert limits(backoff) == (8, 16)


def test_each_step_that_does_not_fit_doubles_the_calm_that_is_asked_for() -> None:
    backoff = OomBackoff()
    backoff.step_did_not_fit([40, 2, 2])
    for _ in range(63):
        backoff.step_done(8, 64)
    assert backoff.step_did_not_fit([2, 2]) == 1
    for _ in range(127):
        backoff.step_done(8, 64)
    assert limits(backoff) == (1, 2)
    backoff.step_done(8, 64)
    assert limits(backoff) == (2, 4)


def test_the_calm_that_is_asked_for_is_at_most_4096_steps() -> None:
    backoff = OomBackoff()
    for _ in range(20):
        backoff.step_done(8, 64)
        backoff.step_did_not_fit([8])
    for _ in range(4095):
        backoff.step_done(8, 64)
    assert limits(backoff) == (1, 4)
    backoff.step_done(8, 64)
    assert limits(backoff) == (2, 8)


@pytest.mark.parametrize(
    ("rows", "answer", "after"), [([1], None, (1000, 1000)), ([2], 0, (1, 1)), ([1, 1], 1, (1, 1))]
)
def test_the_smallest_steps_are_one_token_alone(
    rows: list[int], answer: int | None, after: tuple[int, int]
) -> None:
    backoff = OomBackoff()
    assert backoff.step_did_not_fit(rows) == answer
    assert limits(backoff) == after


def test_one_row_at_least_stays_however_often_a_step_did_not_fit() -> None:
    backoff = OomBackoff()
    assert [backoff.step_did_not_fit([3, 3]) for _ in range(4)] == [1, 1, 1, 1]
    assert limits(backoff) == (1, 3)


def test_after_a_step_that_fitted_one_row_leaves_again() -> None:
    backoff = OomBackoff()
    rows = [3, 1, 1, 1, 1, 1]
    assert [backoff.step_did_not_fit(rows) for _ in range(3)] == [1, 2, 4]
    backoff.step_done(8, 64)
    assert backoff.step_did_not_fit(rows) == 1


# ---------------------------------------------------------------------------------------- hang limits


def plan_of(*rows: tuple[int, int]) -> StepPlan:
    return StepPlan(
        1, (), (), tuple(PlanRow(i, start, num, (), sample=True) for i, (start, num) in enumerate(rows))
    )


def test_the_kind_of_a_step_is_its_rows_its_tokens_and_the_tokens_attended_to_in_bits() -> None:
    assert step_kind(plan_of((0, 3))) == (1, 2, 2)
    assert step_kind(plan_of((4, 3), (8, 1))) == (2, 3, 5)
    assert step_kind(plan_of((0, 8), (100, 8), (0, 0))) == (2, 5, 7)


def test_a_limit_doubles_ten_times_at_most() -> None:
    limit = RareHangLimit(60.0)
    limit.observe(4.0)
    assert limit.is_learned
    for _ in range(10):
        limit.count_hang()
    assert limit.limit_s() == 12.0 * 1024
    limit.count_hang()
    assert limit.limit_s() == 12.0 * 1024
    limit.observe(1.0)
    assert limit.limit_s() == 12.0


def test_before_a_success_hangs_do_not_lengthen_the_limit() -> None:
    limit = RareHangLimit(60.0)
    limit.count_hang()
    assert limit.limit_s() == 60.0


def test_a_time_too_short_to_measure_counts_as_a_microsecond() -> None:
    limit = HangLimit(60.0)
    for _ in range(32):
        limit.observe((1, 1, 1), 0.0)
    assert limit.limit_s((1, 1, 1)) == 2.0
