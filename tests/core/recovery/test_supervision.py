from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.core.recovery.supervision import (
    CrashReport,
    Restart,
    RestartIntensity,
    RestartLog,
    Strategy,
    children_to_restart,
    must_restart,
)

CHILDREN = ("journal", "runner", "scheduler", "gateway")

# ---------------------------------------------------------------------------- how often is too often


def allowed(max_restarts: int, period_s: float, times: Sequence[float]) -> list[bool]:
    intensity = RestartIntensity(max_restarts, period_s)
    return [intensity.allow(now_s) for now_s in times]


@pytest.mark.parametrize(
    ("times", "answers"),
    [
        ([0.0, 1.0], [True, True]),
        ([0.0, 1.0, 2.0], [True, True, False]),
        ([0.0, 0.0, 0.0], [True, True, False]),
        ([0.0, 1.0, 5.0], [True, True, False]),  # a restart exactly one period ago still counts, as in OTP
        ([0.0, 1.0, 5.1], [True, True, True]),
        ([0.0, 1.0, 2.0, 9.0], [True, True, False, True]),
        ([0.0, 4.0, 5.5, 8.0], [True, True, True, False]),  # the window slides, it does not start anew
        ([-3.0, 1.0, 2.5], [True, True, True]),
        ([1e9, 1e9 + 1, 1e9 + 2], [True, True, False]),
    ],
)
def test_two_restarts_in_five_seconds_are_allowed_and_no_third(
    times: list[float], answers: list[bool]
) -> None:
    assert allowed(2, 5.0, times) == answers


def test_with_no_restart_allowed_the_first_is_too_many() -> None:
    assert allowed(0, 5.0, [0.0, 100.0]) == [False, False]


@given(
    max_restarts=st.integers(0, 4),
    period_s=st.floats(0.5, 10.0),
    gaps=st.lists(st.floats(0.0, 8.0), max_size=30),
)
def test_a_restart_is_allowed_while_the_window_holds_no_more_than_the_limit(
    max_restarts: int, period_s: float, gaps: list[float]
) -> None:
    times = [sum(gaps[:index]) for index in range(1, len(gaps) + 1)]
    naive = [
        sum(now_s - period_s <= earlier <= now_s for earlier in times[: index + 1]) <= max_restarts
        for index, now_s in enumerate(times)
    ]
    assert allowed(max_restarts, period_s, times) == naive


@pytest.mark.parametrize(("max_restarts", "period_s"), [(-1, 5.0), (1, 0.0), (1, -1.0)])
def test_an_intensity_that_makes_no_sense_is_refused(max_restarts: int, period_s: float) -> None:
    with pytest.raises(ValueError, match="max_restarts" if max_restarts < 0 else "period_s"):
        RestartIntensity(max_restarts, period_s)


# ------------------------------------------------------------------------------ what is mended


@pytest.mark.parametrize(
    ("restart", "crashed", "answer"),
    [
        (Restart.PERMANENT, True, True),
        (Restart.PERMANENT, False, True),
        (Restart.TRANSIENT, True, True),
        (Restart.TRANSIENT, False, False),
        (Restart.TEMPORARY, True, False),
        (Restart.TEMPORARY, False, False),
    ],
)
def test_which_endings_are_mended(restart: Restart, crashed: bool, answer: bool) -> None:
    assert must_restart(restart, crashed=crashed) is answer


@pytest.mark.parametrize(
    ("strategy", "dead", "restarted"),
    [
        (Strategy.ONE_FOR_ONE, "journal", ("journal",)),
        (Strategy.ONE_FOR_ONE, "scheduler", ("scheduler",)),
        (Strategy.ONE_FOR_ALL, "journal", CHILDREN),
        (Strategy.ONE_FOR_ALL, "gateway", CHILDREN),
        (Strategy.REST_FOR_ONE, "journal", CHILDREN),
        (Strategy.REST_FOR_ONE, "runner", ("runner", "scheduler", "gateway")),
        (Strategy.REST_FOR_ONE, "gateway", ("gateway",)),
    ],
)
def test_the_children_that_a_death_takes_along(
    strategy: Strategy, dead: str, restarted: tuple[str, ...]
) -> None:
    assert children_to_restart(strategy, CHILDREN, dead) == restarted


@given(
    strategy=st.sampled_from(Strategy),
    names=st.lists(st.text(max_size=3), min_size=1, max_size=6, unique=True),
    data=st.data(),
)
def test_restarted_children_are_in_start_order_and_the_dead_one_among_them(
    strategy: Strategy, names: list[str], data: st.DataObject
) -> None:
    dead = data.draw(st.sampled_from(names))
    restarted = children_to_restart(strategy, names, dead)
    assert dead in restarted
    assert list(restarted) == [name for name in names if name in restarted]


def test_a_crash_report_has_the_four_fields_of_otp() -> None:
    reason = RuntimeError("no")
    report = CrashReport(supervisor="root", context="child_terminated", reason=reason, offender="runner")
    assert (report.supervisor, report.context, report.reason, report.offender) == (
        "root",
        "child_terminated",
        reason,
        "runner",
    )


def test_a_restart_is_remembered_until_something_was_achieved_since() -> None:
    intensity = RestartIntensity(max_restarts=2, period_s=5.0)
    assert [intensity.allow(now_s, 7) for now_s in (0.0, 60.0, 120.0)] == [True, True, False]
    intensity = RestartIntensity(max_restarts=2, period_s=5.0)
    achieved = ((0.0, 7), (60.0, 7), (120.0, 8), (180.0, 8), (240.0, 8))
    assert [intensity.allow(*each) for each in achieved] == [True, True, True, True, False]


def test_restarts_that_are_explained_do_not_count() -> None:
    intensity = RestartIntensity(max_restarts=1, period_s=5.0)
    assert intensity.allow(0.0)
    assert intensity.allow(1.0, num_uncounted=1)
    assert intensity.allow(2.0, num_uncounted=2)
    assert intensity.allow(3.0)
    assert not intensity.allow(4.0)


def test_the_log_tells_of_every_change_of_the_actors_that_do_not_serve_and_of_no_other() -> None:
    changes: list[set[str]] = []
    log = RestartLog(lambda: changes.append(set(log.restarting)))
    log.note_end(["runner", "scheduler"])
    assert len(changes) == 1
    log.note_end(["runner"])
    log.note_start("journal")
    log.note_start("runner")
    log.note_start("runner")
    assert changes == [{"runner", "scheduler"}, {"scheduler"}]
