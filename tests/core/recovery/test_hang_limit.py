"""When a step counts as hung."""

from __future__ import annotations

import pytest

from triolet.core.recovery.recovery_state import HangLimit, RareHangLimit, StepKind, step_kind
from triolet.core.step_plan import PlanRow, StepPlan

FACTOR, MIN_LIMIT_S, MIN_STEPS, MEMORY_STEPS = 3.0, 2.0, 32, 4096  # as documented

DECODE, PROMPT = (1, 1, 5), (1, 9, 9)


def plan_of(*rows: tuple[int, int]) -> StepPlan:
    return StepPlan(
        1, (), (), tuple(PlanRow(i, start, num, (), sample=True) for i, (start, num) in enumerate(rows))
    )


def taught(elapsed_s: float, *, kind: StepKind = DECODE, num_steps: int = MIN_STEPS) -> HangLimit:
    limit = HangLimit(60.0)
    for _ in range(num_steps):
        limit.observe(kind, elapsed_s)
    return limit


def test_before_enough_steps_of_a_kind_were_seen_the_limit_is_the_longest() -> None:
    assert HangLimit(60.0).limit_s(DECODE) == 60.0
    assert taught(1.0, num_steps=MIN_STEPS - 1).limit_s(DECODE) == 60.0


def test_the_limit_is_three_times_what_such_steps_take() -> None:
    assert taught(4.0).limit_s(DECODE) == pytest.approx(FACTOR * 4.0)
    assert taught(5.0).limit_s(DECODE) == pytest.approx(FACTOR * 5.0, rel=0.1)


@pytest.mark.parametrize(("elapsed_s", "limit_s"), [(0.0, MIN_LIMIT_S), (0.001, MIN_LIMIT_S), (50.0, 60.0)])
def test_the_limit_is_two_seconds_at_least_and_the_step_timeout_at_most(
    elapsed_s: float, limit_s: float
) -> None:
    assert taught(elapsed_s).limit_s(DECODE) == limit_s


def test_a_step_timeout_below_two_seconds_holds() -> None:
    limit = HangLimit(0.5)
    for _ in range(MIN_STEPS):
        limit.observe(DECODE, 0.001)
    assert limit.limit_s(DECODE) == 0.5


def test_without_a_step_timeout_there_is_no_limit() -> None:
    limit = HangLimit(None)
    limit.observe(DECODE, 1.0)
    assert limit.limit_s(DECODE) is None


def test_short_decodes_say_nothing_of_a_long_prompt() -> None:
    limit = taught(0.01)
    assert (limit.limit_s(DECODE), limit.limit_s(PROMPT)) == (MIN_LIMIT_S, 60.0)


def test_one_step_in_a_thousand_may_be_late_and_two_raise_the_limit() -> None:
    limit = taught(1.0, num_steps=1999)
    limit.observe(DECODE, 8.0)
    assert limit.limit_s(DECODE) == pytest.approx(FACTOR * 1.0)
    for _ in range(2):
        limit.observe(DECODE, 8.0)
    assert limit.limit_s(DECODE) == pytest.approx(FACTOR * 8.0)


def test_slow_steps_of_long_ago_are_forgotten() -> None:
    limit = taught(16.0, num_steps=MIN_STEPS)
    for _ in range(20 * MEMORY_STEPS):
        limit.observe(DECODE, 1.0)
    assert limit.limit_s(DECODE) == pytest.approx(FACTOR * 1.0)


def test_kinds_differ_in_rows_in_tokens_and_in_what_these_attend_to() -> None:
    kinds = [step_kind(plan_of(*rows)) for rows in ([(7, 1)], [(70, 1)], [(0, 8)], [(3, 1), (3, 1)])]
    assert len(set(kinds)) == 4
    assert step_kind(plan_of((4, 1))) == step_kind(plan_of((6, 1)))


def observe(limit: HangLimit, elapsed_s: float, num_steps: int) -> float | None:
    for _ in range(num_steps):
        limit.observe(DECODE, elapsed_s)
    return limit.limit_s(DECODE)


def test_at_4096_steps_of_a_kind_every_count_is_halved_and_single_ones_are_dropped() -> None:
    limit = HangLimit(60.0)
    observe(limit, 8.0, 5)
    assert [observe(limit, 1.0, 4090), observe(limit, 1.0, 1)] == [24.0, 3.0]  # 5 of 4095, then 2 of 2047
    limit = HangLimit(60.0)
    observe(limit, 8.0, 7)
    assert [observe(limit, 1.0, 4089), observe(limit, 1.0, 700)] == [24.0, 24.0]  # 3 of 2748
    limit = HangLimit(60.0)
    observe(limit, 8.0, 2)
    observe(limit, 1.0, 4094)
    assert observe(limit, 8.0, 2) == 24.0  # 3 of 2049


def test_two_late_steps_of_2500_do_not_raise_the_limit() -> None:
    limit = HangLimit(60.0)
    observe(limit, 8.0, 2)
    assert observe(limit, 1.0, 2498) == 3.0


def test_a_time_is_rounded_up_to_an_eighth_of_an_octave() -> None:
    limit = HangLimit(60.0)
    assert observe(limit, 2.0 ** (9.5 / 8), MIN_STEPS) == pytest.approx(3 * 2 ** (10 / 8))


def test_what_is_rare_has_three_times_the_longest_and_at_least_two_seconds() -> None:
    limit = RareHangLimit(60.0)
    assert (limit.limit_s(), RareHangLimit(None).limit_s()) == (60.0, None)
    limit.observe(0.01)
    assert limit.limit_s() == MIN_LIMIT_S
    limit.observe(4.0)
    limit.observe(0.01)
    assert limit.limit_s() == 12.0


def test_what_is_rare_has_twice_the_time_after_each_hang_until_it_succeeds() -> None:
    limit = RareHangLimit(60.0)
    limit.observe(1.0)
    limit.count_hang()
    limit.count_hang()
    assert limit.limit_s() == 12.0
    limit.observe(1.0)
    assert limit.limit_s() == 3.0
