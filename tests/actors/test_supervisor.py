"""The supervisor does what OTP's does: against a reference of its rules, and what Trio adds, one story each."""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.actors.harness import Panic
from tests.actors.otp import ENDINGS, Nursery, Reference
from triolet.actors.supervisor import ChildSpec, Supervisor, SupervisorGaveUp, root_cause
from triolet.core.recovery.supervision import CrashReport, Restart, RestartIntensity, Strategy
from triolet.errors import ResourceShortage

NAMES = ("a", "b", "c")


@pytest.fixture(autouse=True)
def no_tracebacks_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """There are thousands of planted deaths here."""
    caplog.set_level(logging.CRITICAL, "triolet.supervisor")


def supervisor(nursery: Nursery, children: Sequence[ChildSpec], **fields: object) -> Supervisor:
    chosen = {"strategy": Strategy.ONE_FOR_ONE, "max_restarts": 2, "period_s": 10.0, **fields}
    return Supervisor("boss", children, on_report=nursery.report, **chosen)  # type: ignore[arg-type]


async def start_and(boss: Supervisor, *acts: Callable[[], None]) -> None:
    """Run a supervisor, do one thing after the other to its children, and wait for its end."""
    async with trio.open_nursery() as tasks:
        await tasks.start(boss.run)
        for act in acts:
            act()
            await wait_all_tasks_blocked()


# -------------------------------------------------------------------------------- the rules of OTP


@attrs.frozen
class Death:
    """A child ends by itself `after_s`; the next starts of some children fail."""

    name: str
    ending: str
    after_s: float
    failing: tuple[str, ...] = ()


deaths = st.builds(
    Death,
    st.sampled_from(NAMES),
    st.sampled_from(sorted(ENDINGS)),
    st.sampled_from([0.0, 1.0, 4.0, 9.0]),
    st.lists(st.sampled_from(NAMES), max_size=2).map(tuple),
)


async def live_through(
    supervisor: Supervisor, nursery: Nursery, reference: Reference, story: list[Death]
) -> None:
    """Have it happen to both, and compare after every death."""
    gave_up = False

    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        nonlocal gave_up
        try:
            await supervisor.run(task_status=task_status)
        except SupervisorGaveUp:
            gave_up = True

    async with trio.open_nursery() as tasks:
        await tasks.start(run)
        reference.start_all()
        for death in story:
            await trio.sleep(death.after_s)
            if death.name not in reference.alive:
                continue
            nursery.failing = Counter(death.failing)
            reference.failing = Counter(death.failing)
            nursery.end(death.name, ENDINGS[death.ending]())
            reference.end(death.name, crashed=death.ending != "return", now_s=trio.current_time())
            await wait_all_tasks_blocked()
            assert nursery.events == reference.events
            assert gave_up == reference.gave_up
            if reference.is_over:
                break
        assert (not tasks.child_tasks) == reference.is_over
        tasks.cancel_scope.cancel()


def live(
    strategy: Strategy, restarts: tuple[Restart, ...], max_restarts: int, story: list[Death]
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """What happens in a supervisor to which `story` happens, and what the reference says of it."""
    nursery = Nursery()
    types = dict(zip(NAMES, restarts, strict=True))
    boss = supervisor(
        nursery,
        [nursery.child(name, restart) for name, restart in types.items()],
        strategy=strategy,
        max_restarts=max_restarts,
    )
    reference = Reference(types, strategy, max_restarts, period_s=10.0)
    trio.run(live_through, boss, nursery, reference, story, clock=MockClock(autojump_threshold=0))
    reference.stop(NAMES)
    return nursery.events, reference.events


@pytest.mark.parametrize("strategy", Strategy)
@given(
    restarts=st.tuples(*[st.sampled_from(Restart)] * 3),
    max_restarts=st.integers(0, 3),
    story=st.lists(deaths, min_size=1, max_size=8),
)
def test_every_life_and_death_is_as_the_reference_says(
    strategy: Strategy, restarts: tuple[Restart, ...], max_restarts: int, story: list[Death]
) -> None:
    happened, expected = live(strategy, restarts, max_restarts, story)
    assert happened == expected


@pytest.mark.parametrize("max_restarts", range(4))
@pytest.mark.parametrize("strategy", Strategy)
def test_so_it_is_for_every_combination_of_restart_types(strategy: Strategy, max_restarts: int) -> None:
    for restarts in itertools.product(Restart, repeat=3):
        draw = random.Random(str((strategy, max_restarts, restarts)))
        story = [
            Death(
                draw.choice(NAMES),
                draw.choice(sorted(ENDINGS)),
                draw.choice((0.0, 1.0, 9.0)),
                tuple(draw.choices(NAMES, k=draw.choice((0, 0, 1, 2)))),
            )
            for _ in range(8)
        ]
        happened, expected = live(strategy, restarts, max_restarts, story)
        assert happened == expected


async def test_crashes_that_have_been_explained_do_not_count(autojump_clock: MockClock) -> None:
    nursery, pardons = Nursery(), [0, 0, 1, 1, 3, 0, 0, 0]
    boss = supervisor(
        nursery, [nursery.child("a")], max_restarts=2, take_uncounted_restarts=lambda: pardons.pop(0)
    )
    with pytest.raises(ExceptionGroup, match="nursery"):  # noqa: PT012 - the one that is asked to die again
        async with trio.open_nursery() as tasks:
            await tasks.start(boss.run)
            for _ in range(100):
                nursery.end("a", ValueError("planted"))
                await wait_all_tasks_blocked()
    # Two count; two are pardoned alone, the fifth with both before it; then two more count, and one is too many.
    assert nursery.events.count(("started", "a")) == 1 + 7
    assert nursery.events[-1] == ("intensity_exceeded", "a")


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("restart", Restart)
@pytest.mark.parametrize("strategy", Strategy)
async def test_each_ending_under_each_strategy_and_restart_type(
    strategy: Strategy, restart: Restart, ending: str, autojump_clock: MockClock
) -> None:
    nursery = Nursery()
    types = {"a": Restart.PERMANENT, "b": restart, "c": Restart.TEMPORARY, "d": Restart.PERMANENT}
    boss = supervisor(nursery, [nursery.child(name, kind) for name, kind in types.items()], strategy=strategy)
    reference = Reference(types, strategy, 2, 10.0)
    async with trio.open_nursery() as tasks:
        await tasks.start(boss.run)
        nursery.end("b", ENDINGS[ending]())
        await wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    reference.start_all()
    reference.end("b", crashed=ending != "return", now_s=0.0)
    reference.stop(list(types))
    assert nursery.events == reference.events


def test_restarts_outside_of_the_window_are_forgotten() -> None:
    intensity = RestartIntensity(max_restarts=2, period_s=5.0)
    assert [intensity.allow(now_s) for now_s in (0.0, 1.0, 2.0, 9.0)] == [True, True, False, True]


def test_a_window_as_long_as_its_period_still_holds_its_first_restart() -> None:
    intensity = RestartIntensity(max_restarts=1, period_s=5.0)
    assert [intensity.allow(now_s) for now_s in (0.0, 5.0, 10.1)] == [True, False, True]


# ------------------------------------------------------------------------------------------ starts


@pytest.mark.parametrize("failing", NAMES)
async def test_the_error_of_a_first_start_comes_out_bare_and_the_others_are_stopped(
    failing: str, autojump_clock: MockClock
) -> None:
    nursery = Nursery(failing=Counter([failing]))
    with pytest.raises(ValueError, match=f"{failing} does not start"):
        await supervisor(nursery, [nursery.child(name) for name in NAMES]).run()
    before = NAMES[: NAMES.index(failing)]
    assert nursery.events == [("started", n) for n in before] + [("stopped", n) for n in reversed(before)]


async def test_a_child_that_returns_before_it_is_ready_has_failed_to_start(autojump_clock: MockClock) -> None:
    async def absent(*, task_status: trio.TaskStatus[None]) -> None:
        await trio.lowlevel.checkpoint()

    with pytest.raises(RuntimeError, match="absent returned before it was ready"):
        await supervisor(Nursery(), [ChildSpec(name="absent", start=absent)]).run()


async def test_a_start_that_keeps_failing_uses_up_the_patience(autojump_clock: MockClock) -> None:
    nursery = Nursery()
    boss = supervisor(nursery, [nursery.child("a"), nursery.child("b")])

    def crash_for_good() -> None:
        nursery.failing = Counter({"b": 99})
        nursery.end("b", ENDINGS["exception"]())

    with pytest.raises(ExceptionGroup) as caught:
        await start_and(boss, crash_for_good)
    assert isinstance(caught.value.exceptions[0], SupervisorGaveUp)
    assert str(root_cause(caught.value)) == "b does not start"
    assert nursery.events[2:] == [
        ("child_terminated", "b"),
        ("start_error", "b"),
        ("start_error", "b"),
        ("intensity_exceeded", "b"),
        ("stopped", "a"),
    ]


async def test_a_start_that_lacks_a_resource_is_tried_again_with_growing_pauses_and_does_not_count(
    autojump_clock: MockClock,
) -> None:
    starts_s: list[float] = []

    async def short(*, task_status: trio.TaskStatus[None]) -> None:
        starts_s.append(trio.current_time())
        if 1 < len(starts_s) < 12:
            raise ResourceShortage("processes or threads", "a process for the model runner")
        task_status.started()
        if len(starts_s) == 1:
            raise ValueError("planted")
        await trio.sleep_forever()

    nursery = Nursery()
    boss = supervisor(nursery, [ChildSpec(name="runner", start=short)], max_restarts=1)
    async with trio.open_nursery() as tasks:
        await tasks.start(boss.run)
        await trio.sleep(60)
        tasks.cancel_scope.cancel()
    pauses_s = [round(after - before, 3) for before, after in itertools.pairwise(starts_s)]
    assert pauses_s == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 5.0]


async def test_a_supervisor_that_never_gives_up_waits_longer_and_longer_once_there_were_too_many_restarts(
    autojump_clock: MockClock,
) -> None:
    starts_s: list[float] = []

    async def crash(*, task_status: trio.TaskStatus[None]) -> None:
        starts_s.append(trio.current_time())
        task_status.started()
        raise ValueError("planted")

    nursery = Nursery()
    boss = supervisor(nursery, [ChildSpec(name="a", start=crash)], gives_up=lambda: False)
    with trio.move_on_after(100):
        await boss.run()
    pauses_s = [round(after - before, 3) for before, after in itertools.pairwise(starts_s)]
    assert pauses_s[:8] == [0.0, 0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2]
    assert max(pauses_s) == 5.0
    assert len(starts_s) > 20


def test_siblings_have_different_names() -> None:
    nursery = Nursery()
    with pytest.raises(ValueError, match="different names"):
        supervisor(nursery, [nursery.child("a"), nursery.child("a")])


# ----------------------------------------------------------------------------------------- reports


async def test_a_report_names_the_supervisor_the_context_the_reason_and_the_child(
    autojump_clock: MockClock,
) -> None:
    nursery = Nursery()
    async with trio.open_nursery() as tasks:
        await tasks.start(supervisor(nursery, [nursery.child("a")]).run)
        nursery.end("a", panic := Panic("planted"))
        await wait_all_tasks_blocked()
        nursery.end("a", None)
        await wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    expected = {"supervisor": "boss", "context": "child_terminated", "offender": "a"}
    assert nursery.reports == [
        CrashReport(**expected, reason=panic),
        CrashReport(**expected, reason=None),
    ]


async def test_a_log_line_names_supervisor_context_reason_and_offender(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "triolet.supervisor")
    nursery = Nursery()
    async with trio.open_nursery() as tasks:
        await tasks.start(supervisor(nursery, [nursery.child("a")]).run)
        nursery.end("a", ENDINGS["exception"]())
        await wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert [record.getMessage() for record in caplog.records] == [
        "supervisor=boss context=child_terminated reason=ValueError('planted') offender=a"
    ]


# ----------------------------------------------------------------------------------------- the end


async def test_cancelling_from_outside_stops_the_children_one_by_one_the_last_first(
    autojump_clock: MockClock,
) -> None:
    events: list[str] = []

    def slow(name: str) -> ChildSpec:
        async def live(*, task_status: trio.TaskStatus[None]) -> None:
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                events.append(f"{name} stopping")
                with trio.CancelScope(shield=True):
                    await trio.sleep(1)
                events.append(f"{name} stopped")

        return ChildSpec(name=name, start=live)

    with trio.move_on_after(5) as scope:
        await supervisor(Nursery(), [slow(name) for name in NAMES]).run()
    assert scope.cancelled_caught
    assert trio.current_time() == pytest.approx(8.0)
    assert events == [f"{name} {state}" for name in reversed(NAMES) for state in ("stopping", "stopped")]


async def test_a_child_that_is_late_to_stop_is_reported_and_waited_for(autojump_clock: MockClock) -> None:
    nursery = Nursery()

    async def stubborn(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        with trio.CancelScope(shield=True):
            await trio.sleep(60)

    specs = [nursery.child("a"), ChildSpec(name="stubborn", start=stubborn, report_late_stop_s=5.0)]
    with trio.move_on_after(10):
        await supervisor(nursery, specs).run()
    assert trio.current_time() == pytest.approx(60.0)
    assert nursery.events == [("started", "a"), ("shutdown_error", "stubborn"), ("stopped", "a")]


async def test_a_late_stop_below_a_supervisor_is_reported_once_and_is_no_error_in_the_log(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "triolet.supervisor")
    nursery = Nursery()

    async def stubborn(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        with trio.CancelScope(shield=True):
            await trio.sleep(60)

    inner = supervisor(nursery, [ChildSpec(name="stubborn", start=stubborn)])
    with trio.move_on_after(10):
        await supervisor(
            nursery, [ChildSpec(name="inner", start=inner.run, report_late_stop_s=math.inf)]
        ).run()
    assert nursery.events == [("shutdown_error", "stubborn")]
    assert [record.levelno for record in caplog.records] == [logging.INFO]


async def test_a_crash_while_stopping_is_reported_and_stops_nothing_else(autojump_clock: MockClock) -> None:
    nursery = Nursery()

    async def clumsy(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("on the way out")

    with trio.move_on_after(1) as scope:
        await supervisor(nursery, [nursery.child("a"), ChildSpec(name="clumsy", start=clumsy)]).run()
    assert scope.cancelled_caught
    assert nursery.events == [("started", "a"), ("shutdown_error", "clumsy"), ("stopped", "a")]
    assert repr(nursery.reports[0].reason) == "ValueError('on the way out')"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("is_grouped", [False, True])
async def test_what_is_the_interpreters_own_is_passed_on_and_the_others_are_stopped(
    error: BaseException, is_grouped: bool, autojump_clock: MockClock
) -> None:
    nursery = Nursery()
    ending = BaseExceptionGroup("both", [error, ValueError("planted")]) if is_grouped else error
    boss = supervisor(nursery, [nursery.child(name) for name in NAMES])
    with pytest.raises(BaseExceptionGroup) as caught:
        await start_and(boss, lambda: nursery.end("b", ending))
    assert root_cause(caught.value) is error
    assert caught.value.split(type(error))[1] is None
    stopped = [name for event, name in nursery.events if event == "stopped"]
    assert stopped == ["c", "a"]
    assert trio.current_time() < 1


async def test_a_supervisor_returns_when_its_last_child_has_ended(autojump_clock: MockClock) -> None:
    nursery = Nursery()
    boss = supervisor(nursery, [nursery.child("a", Restart.TRANSIENT)])
    await start_and(boss, lambda: nursery.end("a", None))
    assert nursery.events == [("started", "a")]


# ----------------------------------------------------------------------------------- within another


async def test_a_supervisor_that_gives_up_is_a_crashed_child_of_its_own_supervisor(
    autojump_clock: MockClock,
) -> None:
    nursery = Nursery()
    inner = supervisor(nursery, [nursery.child("leaf")], max_restarts=1)
    outer = supervisor(nursery, [ChildSpec(name="inner", start=inner.run)], max_restarts=1)
    with pytest.raises(ExceptionGroup) as caught:
        await start_and(outer, *[lambda: nursery.end("leaf", Panic("planted"))] * 4)
    assert isinstance(root_cause(caught.value), Panic)
    life = [("started", "leaf"), ("child_terminated", "leaf")] * 2 + [("intensity_exceeded", "leaf")]
    assert nursery.events == [
        *life, ("child_terminated", "inner"), *life, ("child_terminated", "inner"), ("intensity_exceeded", "inner")
    ]  # fmt: skip


async def test_the_start_error_of_a_leaf_comes_out_of_the_whole_tree_bare(autojump_clock: MockClock) -> None:
    nursery = Nursery(failing=Counter("b"))
    inner = supervisor(nursery, [nursery.child("a"), nursery.child("b")])
    outer = supervisor(nursery, [nursery.child("first"), ChildSpec(name="inner", start=inner.run)])
    with pytest.raises(ValueError, match="b does not start"):
        await outer.run()
    assert nursery.events == [("started", "first"), ("started", "a"), ("stopped", "a"), ("stopped", "first")]


async def test_deaths_during_a_long_mending_are_all_mended_after_it(autojump_clock: MockClock) -> None:
    """However many lives end while the supervisor has no time to look."""
    num_children, lives = 8, Counter[str]()

    def brief(name: str) -> ChildSpec:
        async def live(*, task_status: trio.TaskStatus[None]) -> None:
            lives[name] += 1
            await trio.sleep(10)
            task_status.started()
            if lives[name] > 5:
                await trio.sleep_forever()

        return ChildSpec(name=name, start=live)

    specs = [brief(f"child {number}") for number in range(num_children)]
    boss = supervisor(Nursery(), specs, strategy=Strategy.REST_FOR_ONE, max_restarts=1, period_s=5.0)
    with trio.move_on_after(100_000):
        await boss.run()
    assert set(lives.values()) == {6}
