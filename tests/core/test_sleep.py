"""Pause and sleep without an engine: what holds requests, when an idle engine falls asleep, and what wakes it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from triolet.core.sleep import (
    KV_CACHE,
    PAUSE,
    SCHEDULING,
    SLEEP,
    WEIGHTS,
    RunnerPhase,
    SleepState,
    check_level,
    check_mode,
    check_tags,
)
from triolet.errors import InvalidRequest

FIRST_SERIAL = 1
AWAY = [RunnerPhase.LEAVING, RunnerPhase.UNLOADED, RunnerPhase.LOADING, RunnerPhase.LOADED]
ALL_TAGS = frozenset((WEIGHTS, KV_CACHE, SCHEDULING))


class Changes:
    """Counts the calls of `on_change`."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> None:
        self.number += 1


def asleep(level: int, phase: RunnerPhase = RunnerPhase.SERVING) -> SleepState:
    """An engine that was put to sleep; its runner has come to this phase."""
    state = SleepState()
    state.sleep(level)
    state.enter(phase)
    return state


# ------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_mode_that_is_known_is_taken(mode: str) -> None:
    assert check_mode(mode) == mode


@pytest.mark.parametrize("mode", ["stop", "", None, 1, ["abort"]])
def test_another_mode_is_refused(mode: object) -> None:
    with pytest.raises(InvalidRequest, match="mode must be abort, wait or keep") as raised:
        check_mode(mode)
    assert (raised.value.field, raised.value.got) == ("mode", mode)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_level_that_is_known_is_taken(level: int) -> None:
    assert check_level(level) == level


@pytest.mark.parametrize("level", [-1, 3, True, False, "1", None, 1.0])
def test_another_level_is_refused(level: object) -> None:
    with pytest.raises(InvalidRequest, match="level must be 0, 1 or 2") as raised:
        check_level(level)
    assert (raised.value.field, raised.value.got) == ("level", level)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        (None, {"weights", "kv_cache", "scheduling"}),
        ("weights", {"weights"}),
        (["kv_cache", "scheduling", "kv_cache"], {"kv_cache", "scheduling"}),
        (iter(["weights"]), {"weights"}),
    ],
)
def test_tags_are_those_that_are_named_and_all_of_them_by_default(
    tags: list[str] | None, expected: set[str]
) -> None:
    assert check_tags(tags) == expected


@pytest.mark.parametrize("tags", [[], (), "", "weight", ["weights", "cache"]])
def test_no_tag_and_an_unknown_one_are_refused(tags: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="weights, kv_cache and scheduling") as raised:
        check_tags(tags)
    assert (raised.value.field, raised.value.got) == ("tags", tags)


# ---------------------------------------------------------------------------------------------- holds


def test_a_new_engine_serves_holds_nothing_and_never_sleeps_by_itself() -> None:
    state = SleepState()
    assert (state.phase, state.level, state.limit, state.due_s) == (
        RunnerPhase.SERVING,
        None,
        math.inf,
        math.inf,
    )
    flags = (state.is_sleeping, state.is_automatic, state.sleeps_when_idle, state.follows_load)
    assert flags == (False, False, False, False)
    assert (state.is_held, state.is_paused, state.wants_unloading) == (False, False, False)


def test_the_least_limit_of_all_holds_is_that_of_the_engine() -> None:
    state = SleepState()
    state.hold(PAUSE, 7)
    state.hold(WEIGHTS, 5)
    assert (state.limit, state.limit_of(PAUSE), state.limit_of(WEIGHTS)) == (5, 7, 5)
    assert state.limit_of(SLEEP) == math.inf
    state.release(WEIGHTS)
    assert (state.limit, state.is_held) == (7, True)
    state.release(PAUSE)
    assert (state.limit, state.is_held) == (math.inf, False)
    state.release(PAUSE)  # once more does no harm
    assert state.limit == math.inf


def test_a_second_hold_of_the_same_name_never_raises_the_limit() -> None:
    state = SleepState()
    state.hold(PAUSE, 7)
    state.hold(PAUSE, 9)
    assert state.limit == 7
    state.hold(PAUSE, 3)
    assert state.limit == 3


def test_a_hold_without_a_limit_lets_no_request_be_computed() -> None:
    state = SleepState()
    state.hold(WEIGHTS)
    assert state.limit < FIRST_SERIAL


def test_only_the_hold_of_a_pause_pauses() -> None:
    state = SleepState()
    state.hold(WEIGHTS)
    assert (state.is_held, state.is_paused) == (True, False)
    state.hold(PAUSE)
    state.release(WEIGHTS)
    assert (state.is_held, state.is_paused) == (True, True)
    state.release(PAUSE)
    assert (state.is_held, state.is_paused) == (False, False)


@pytest.mark.parametrize("phase", AWAY)
def test_requests_are_held_while_the_model_is_away(phase: RunnerPhase) -> None:
    state = SleepState()
    state.enter(phase)
    assert (state.phase, state.is_held, state.limit) == (phase, True, math.inf)
    state.enter(RunnerPhase.SERVING)
    assert not state.is_held


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.hold(PAUSE),
        lambda state: state.release(PAUSE),
        lambda state: state.enter(RunnerPhase.LOADED),
        lambda state: state.set_sleep_after(1.0),
        lambda state: state.sleep_when_idle(),
        lambda state: state.sleep(0),
    ],
    ids=["hold", "release", "enter", "set_sleep_after", "sleep_when_idle", "sleep"],
)
def test_every_change_is_told(change: Callable[[SleepState], None]) -> None:
    changes = Changes()
    state = SleepState(on_change=changes)
    change(state)
    assert changes.number == 1


# ---------------------------------------------------------------------------------------------- sleep


def test_what_one_call_takes_back_leaves_what_others_hold() -> None:
    state, first, second = SleepState(), object(), object()
    state.hold(PAUSE, 7, first)
    state.hold(PAUSE, 9, second)
    state.take_back(PAUSE, first)
    assert (state.limit, state.is_paused) == (9, True)
    state.take_back(PAUSE, first)  # once more does no harm
    state.keep(PAUSE, second)
    state.hold(PAUSE, 8, first)
    state.take_back(PAUSE, second)  # too late
    state.take_back(PAUSE, first)
    assert (state.limit, state.is_paused) == (9, True)
    state.hold(PAUSE, 3, first)
    state.release(PAUSE)  # of all calls
    state.keep(PAUSE, first)
    assert (state.limit, state.is_paused) == (math.inf, False)


def test_a_sleep_that_is_taken_back_leaves_the_level_of_the_others() -> None:
    state, first, second, third = SleepState(), object(), object(), object()
    state.sleep(0, 5, by=first)
    state.sleep(1, 6, by=second)
    state.keep(SLEEP, first)
    assert (state.level, state.wants_unloading, state.limit) == (1, True, 5)
    state.take_back(SLEEP, second)
    assert (state.level, state.wants_unloading, state.limit) == (0, False, 5)
    state.sleep(2, by=third)
    state.sleep(1, by=second)
    state.take_back(SLEEP, third)
    assert (state.level, state.wants_unloading) == (1, True)
    state.wake()
    state.take_back(SLEEP, second)  # too late
    assert (state.level, state.limit) == (None, math.inf)
    state.sleep(1, by=first)
    state.take_back(SLEEP, first)
    assert (state.level, state.wants_unloading, state.limit) == (None, False, math.inf)


def test_a_sleep_that_is_kept_stays_when_a_later_one_of_the_same_call_is_taken_back() -> None:
    state, call = SleepState(), object()
    state.sleep(1, 5, by=call)
    state.keep(SLEEP, call)
    state.sleep(2, 3, by=call)
    assert (state.level, state.limit) == (2, 3)
    state.take_back(SLEEP, call)
    assert (state.level, state.wants_unloading, state.limit) == (1, True, 5)
    state.sleep(2, by=call)
    state.keep(SLEEP, call)
    assert state.level == 2


def test_level_0_holds_requests_and_keeps_the_model() -> None:
    state = asleep(0)
    assert (state.level, state.is_sleeping, state.is_held, state.wants_unloading) == (0, True, True, False)
    assert state.limit < FIRST_SERIAL


@pytest.mark.parametrize("level", [1, 2])
def test_deeper_levels_give_up_the_model_as_well(level: int) -> None:
    state = asleep(level)
    assert (state.level, state.is_sleeping, state.is_held, state.wants_unloading) == (level, True, True, True)


@pytest.mark.parametrize(("first", "second", "level"), [(2, 1, 2), (1, 2, 2), (1, 0, 1), (0, 1, 1)])
def test_an_engine_that_sleeps_more_deeply_keeps_its_level(first: int, second: int, level: int) -> None:
    state = asleep(first)
    state.sleep(second)
    assert (state.level, state.wants_unloading) == (level, True)


def test_sleep_lets_requests_up_to_its_limit_be_computed() -> None:
    state = SleepState()
    state.sleep(1, 4)
    assert (state.limit, state.limit_of(SLEEP)) == (4, 4)


def test_waking_an_engine_that_is_awake_changes_nothing() -> None:
    changes = Changes()
    state = SleepState(on_change=changes)
    state.wake()
    assert (changes.number, state.is_held, state.is_sleeping) == (0, False, False)


def test_a_sleep_of_level_0_ends_only_with_scheduling() -> None:
    state = asleep(0)
    state.wake(frozenset((WEIGHTS, KV_CACHE)))
    assert (state.level, state.is_held) == (0, True)
    state.wake(frozenset((SCHEDULING,)))
    assert (state.level, state.is_held, state.is_sleeping) == (None, False, False)


def test_a_deeper_sleep_ends_when_weights_and_kv_cache_are_both_back() -> None:
    state = asleep(1, RunnerPhase.UNLOADED)
    state.wake(frozenset((WEIGHTS,)))
    assert (state.level, state.wants_unloading) == (1, True)
    state.wake(frozenset((SCHEDULING,)))
    assert (state.level, state.wants_unloading) == (1, True)
    state.wake(frozenset((KV_CACHE,)))
    assert (state.level, state.wants_unloading) == (None, False)


@pytest.mark.parametrize("phase", AWAY)
def test_an_engine_sleeps_until_its_runner_serves_again(phase: RunnerPhase) -> None:
    state = asleep(2, phase)
    state.wake()
    assert (state.level, state.is_sleeping, state.is_held, state.limit) == (None, True, True, math.inf)
    state.enter(RunnerPhase.LOADED)
    assert (state.is_sleeping, state.is_held) == (True, True)
    state.enter(RunnerPhase.SERVING)
    assert (state.is_sleeping, state.is_held) == (False, False)
    state.enter(RunnerPhase.LEAVING)  # for other weights
    assert not state.is_sleeping


def test_an_engine_is_awake_at_once_if_its_runner_has_not_given_up_the_model() -> None:
    state = asleep(1)
    state.wake(ALL_TAGS)
    assert (state.is_sleeping, state.is_held, state.wants_unloading) == (False, False, False)


def test_other_holds_stay_when_sleep_ends() -> None:
    state = SleepState()
    state.hold(PAUSE, 3)
    state.sleep(0)
    state.wake()
    assert (state.limit, state.is_paused, state.is_sleeping) == (3, True, False)


# --------------------------------------------------------------------------------- an engine that is idle


def idle_engine(sleep_after: float | None = 10.0) -> SleepState:
    """An engine without requests since 100 s."""
    state = SleepState(sleep_after=sleep_after)
    state.note_load(0, 100.0)
    return state


def test_the_time_of_sleep_counts_from_the_first_look_without_a_request() -> None:
    state = SleepState(sleep_after=10.0)
    assert state.due_s == math.inf
    state.note_load(0, 100.0)
    state.note_load(0, 105.0)
    assert state.due_s == 110.0
    state.note_load(0, 109.9)
    assert not state.is_sleeping
    state.note_load(0, 110.0)
    assert (state.level, state.is_automatic, state.wants_unloading) == (1, True, True)
    assert state.limit < FIRST_SERIAL
    assert state.due_s == math.inf


def test_a_request_begins_the_time_anew() -> None:
    state = idle_engine()
    state.note_load(1, 109.0)
    assert state.due_s == math.inf
    state.note_load(0, 120.0)
    assert state.due_s == 130.0


def test_an_idle_engine_without_a_time_never_sleeps() -> None:
    state = idle_engine(None)
    assert state.due_s == math.inf
    state.note_load(0, 1e9)
    assert not state.is_sleeping


def test_an_idle_engine_that_is_held_does_not_fall_asleep() -> None:
    state = idle_engine()
    state.hold(PAUSE)
    assert state.due_s == math.inf
    state.note_load(0, 200.0)
    assert not state.is_sleeping


def test_the_next_request_wakes_an_engine_that_fell_asleep_by_itself() -> None:
    state = idle_engine()
    state.note_load(0, 110.0)
    state.enter(RunnerPhase.UNLOADED)
    state.note_load(1, 111.0)
    assert (state.level, state.is_automatic, state.is_sleeping) == (None, False, True)
    state.enter(RunnerPhase.SERVING)
    assert state.due_s == math.inf
    state.note_load(0, 112.0)
    assert state.due_s == 122.0


def test_a_request_does_not_wake_an_engine_that_was_put_to_sleep() -> None:
    state = asleep(1)
    state.note_load(1, 1.0)
    assert (state.level, state.is_automatic) == (1, False)
    state.wake_from_idleness()
    assert state.level == 1


def test_a_call_of_sleep_makes_an_automatic_one_last() -> None:
    state = idle_engine()
    state.note_load(0, 110.0)
    state.sleep(2)
    state.note_load(1, 111.0)
    assert (state.level, state.is_automatic) == (2, False)


def test_the_time_of_idleness_begins_anew_after_a_sleep() -> None:
    state = idle_engine()
    state.note_load(0, 110.0)
    state.wake()
    assert state.due_s == math.inf
    state.note_load(0, 150.0)
    assert state.due_s == 160.0


def test_an_engine_that_is_told_to_sleep_when_idle_does_so_once() -> None:
    state = idle_engine(None)
    state.sleep_when_idle()
    assert (state.due_s, state.is_sleeping) == (100.0, False)
    state.note_load(0, 100.0)
    assert (state.level, state.is_automatic, state.sleeps_when_idle) == (1, True, False)
    state.note_load(1, 101.0)
    state.note_load(0, 102.0)
    assert (state.level, state.due_s) == (None, math.inf)


def test_sleep_when_idle_waits_for_the_live_requests_and_goes_before_the_usual_time() -> None:
    state = SleepState(sleep_after=10.0)
    state.sleep_when_idle()
    state.note_load(1, 100.0)
    assert not state.is_sleeping
    state.note_load(0, 101.0)
    assert state.due_s == 101.0


def test_sleep_when_idle_does_nothing_to_an_engine_that_sleeps() -> None:
    state = asleep(1)
    state.sleep_when_idle()
    assert not state.sleeps_when_idle


def test_the_number_of_requests_matters_only_where_it_can_put_an_engine_to_sleep_or_wake_it() -> None:
    state, seen = SleepState(), []
    changes: tuple[Callable[[], None], ...] = (
        lambda: state.set_sleep_after(5.0),
        lambda: state.set_sleep_after(None),
        state.sleep_when_idle,
        lambda: state.note_load(0, 0.0),
        lambda: state.note_load(0, 0.0),  # asleep now
        lambda: state.note_load(1, 0.0),  # and awake
        lambda: state.sleep(1),
    )
    for change in changes:
        change()
        seen.append(state.follows_load)
    assert seen == [True, False, True, True, True, False, False]
