"""Supervisor in OTP's sense, as one task with a nursery: starts children in order, restarts them, stops in reverse.

A nursery alone is "one for all, never restart": the first error cancels every sibling. So no error of a child
ever reaches the nursery here. Each child runs in a wrapper that catches what it died of; the supervisor takes
the dead in order of their deaths and does what `core.recovery.supervision` decides. Foreign BaseExceptions count as
crashes too (a panic inside a Rust tokenizer is one, and passes through `except Exception`); Trio's Cancelled and
the interpreter's own go their way.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import attrs
import trio

from triolet.core.recovery.supervision import (
    Backoff,
    CrashReport,
    Restart,
    RestartIntensity,
    RestartLog,
    Strategy,
    children_to_restart,
    must_restart,
)
from triolet.errors import ResourceShortage, RunnerDied

logger = logging.getLogger("triolet.supervisor")

# Cancellation belongs to the nursery, the others to the interpreter: none of them is a child's own error.
PASSED_ON = (trio.Cancelled, KeyboardInterrupt, SystemExit, GeneratorExit)


class ChildStart(Protocol):
    """A child: an async function that runs until it is cancelled or its work is done."""

    def __call__(self, *, task_status: trio.TaskStatus[None]) -> Awaitable[None]:
        """Call `task_status.started()` once it serves."""
        ...


@attrs.frozen(kw_only=True)
class ChildSpec:
    """Specification of a child.

    Args:
        name: for reports, unique among siblings.
        start: the child itself, started anew for every life.
        restart: kinds of endings after which the child is restarted.
        report_late_stop_s: time after which a stop is reported as late, seconds. A task cannot be killed.
    """

    name: str
    start: ChildStart
    restart: Restart = Restart.PERMANENT
    report_late_stop_s: float = attrs.field(default=5.0, validator=attrs.validators.gt(0))


class SupervisorGaveUp(Exception):
    """A child crashed more often than the intensity allows; `__cause__` is what it died of the last time."""


@contextmanager
def foreign_errors_kept(keep: Callable[[BaseException], None]) -> Iterator[None]:
    """Hand what the body died of to `keep`; cancellation and the interpreter's own exceptions pass.

    An exception group is split: its foreign part is kept, the rest goes on.
    """
    try:
        yield
    except PASSED_ON:
        raise
    except BaseExceptionGroup as group:
        # A group may hold both: what is foreign is the child's error, and the rest goes on.
        passed_on, foreign = group.split(PASSED_ON)
        if foreign is not None:
            keep(foreign)
        if passed_on is not None:
            raise passed_on from None
    except BaseException as error:
        keep(error)


def root_cause(error: BaseException) -> BaseException:
    """Return the error behind a group (its first leaf) or behind a supervisor that gave up (its cause)."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif isinstance(error, SupervisorGaveUp) and error.__cause__ is not None:
            error = error.__cause__
        else:
            return error


@attrs.define(eq=False)
class _Child:
    """One life of a child. Shielded: its supervisor stops it, in turn, also when the supervisor is cancelled."""

    spec: ChildSpec
    scope: trio.CancelScope = attrs.field(factory=lambda: trio.CancelScope(shield=True))
    ready: trio.Event = attrs.field(factory=trio.Event)
    done: trio.Event = attrs.field(factory=trio.Event)
    has_started: bool = False
    is_stopping: bool = False
    reason: BaseException | None = None

    def started(self, value: None = None) -> None:
        """Note that the child serves; called as `task_status.started()`."""
        self.has_started = True
        self.ready.set()

    @trio.lowlevel.enable_ki_protection  # Ctrl-C goes to the main task, and never tears a child's state
    async def live(self, on_death: Callable[[_Child], None]) -> None:
        try:
            with self.scope, foreign_errors_kept(self._die):
                await self.spec.start(task_status=self)
        finally:  # also when an exception is passed on: no task may wait for this life any longer
            self.ready.set()
            self.done.set()
        if self.has_started and not self.is_stopping:
            on_death(self)

    def _die(self, reason: BaseException) -> None:
        self.reason = reason


class Supervisor:
    """Supervisor of some children; itself a possible child, by its `run` as another one's `ChildSpec.start`.

    Args:
        name: for reports.
        children: in start order; later ones may depend on earlier ones.
        strategy: which siblings are restarted with a child.
        max_restarts: restarts allowed within `period_s`.
        period_s: length of the sliding window, seconds.
        on_report: told of every crash and of giving up.
        num_achieved: a count of what the children have done; see `RestartIntensity.allow`.
        take_uncounted_restarts: number of the latest crashes that were explained since the last call; not counted.
        restart_log: told of the children that are being restarted.
        gives_up: returns whether too many restarts end the supervisor; otherwise further ones wait, longer and longer.
        starts_together: whether all children start at once, since none depends on another.
    """

    def __init__(
        self,
        name: str,
        children: Sequence[ChildSpec],
        *,
        strategy: Strategy,
        max_restarts: int,
        period_s: float,
        on_report: Callable[[CrashReport], None] = lambda report: None,
        num_achieved: Callable[[], int | None] = lambda: None,
        take_uncounted_restarts: Callable[[], int] = lambda: 0,
        restart_log: RestartLog | None = None,
        gives_up: Callable[[], bool] = lambda: True,
        starts_together: bool = False,
    ) -> None:
        names = [spec.name for spec in children]
        if len(set(names)) != len(names):
            raise ValueError(f"children must have different names; got {names}")
        self.name = name
        self._specs = {spec.name: spec for spec in children}
        self._strategy = strategy
        self._max_restarts, self._period_s = max_restarts, period_s
        self._on_report = on_report
        self._num_achieved = num_achieved
        self._take_uncounted_restarts = take_uncounted_restarts
        self._restart_log = restart_log or RestartLog()
        self._gives_up, self._starts_together = gives_up, starts_together
        self._pauses = Backoff()  # once there were too many restarts
        self._children: dict[str, _Child] = {}
        self._dead: deque[_Child] = deque()  # children of `_children` that have ended by themselves
        self._waiting = trio.lowlevel.ParkingLot()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start all children, say so, and keep them alive until cancelled; stop them in reverse order.

        Raises:
            SupervisorGaveUp: too many restarts; all children have been stopped.
            BaseException: what the first start of a child failed with, bare; the others have been stopped.
        """
        intensity = RestartIntensity(self._max_restarts, self._period_s)
        failure: BaseException | None = None
        async with trio.open_nursery() as nursery:
            try:
                await self._start_all(nursery)
                task_status.started()
                while self._children:
                    await self._mend(await self._next_dead(), intensity, nursery)
            except BaseException as error:  # raised again below, without the nursery's group around it
                failure = error
            with trio.CancelScope(shield=True):
                await self._stop(tuple(self._specs))
        if failure is not None:
            raise failure

    async def _next_dead(self) -> _Child:
        while not self._dead:
            await self._waiting.park()
        return self._dead.popleft()

    def _note_death(self, child: _Child) -> None:
        self._dead.append(child)
        if must_restart(child.spec.restart, crashed=child.reason is not None):
            self._restart_log.note_end((child.spec.name,))
        self._waiting.unpark()

    async def _start_all(self, nursery: trio.Nursery) -> None:
        if not self._starts_together:
            for spec in self._specs.values():
                await self._start(spec, nursery)
            return
        failures: list[BaseException] = []

        async def start(spec: ChildSpec) -> None:
            with foreign_errors_kept(failures.append):
                await self._start(spec, nursery)
            if failures:
                starts.cancel_scope.cancel()

        async with trio.open_nursery() as starts:
            for spec in self._specs.values():
                starts.start_soon(start, spec)
        if failures:
            raise failures[0]

    async def _start(self, spec: ChildSpec, nursery: trio.Nursery) -> None:
        child = self._children[spec.name] = _Child(spec)
        nursery.start_soon(child.live, self._note_death, name=spec.name)
        await child.ready.wait()
        # It ended before it served; `live` sets `ready` in any case, so that this wait ends.
        if not child.has_started:
            del self._children[spec.name]
            raise child.reason or RuntimeError(f"{spec.name} returned before it was ready")
        self._restart_log.note_start(spec.name)

    async def _stop(self, names: Sequence[str]) -> None:
        """Stop the children of these names that exist, one after the other, the last one first."""
        for name in reversed(names):
            if (child := self._children.pop(name, None)) is None:
                continue
            # Before the cancellation, so that the end that it causes is not taken for a crash.
            child.is_stopping = True
            child.scope.cancel()
            with trio.move_on_after(child.spec.report_late_stop_s):
                await child.done.wait()
            if not child.done.is_set():
                self._report("shutdown_error", None, name)
                await child.done.wait()
            if child.reason is not None:
                self._report("shutdown_error", child.reason, name)
            # It had ended by itself before its turn to be stopped came.
            if child in self._dead:
                self._dead.remove(child)

    async def _mend(self, child: _Child, intensity: RestartIntensity, nursery: trio.Nursery) -> None:
        name, reason = child.spec.name, child.reason
        del self._children[name]
        if reason is not None or child.spec.restart is Restart.PERMANENT:
            self._report("child_terminated", reason, name)
        if not must_restart(child.spec.restart, crashed=reason is not None):
            return
        shortages = Backoff()
        while True:
            if reason is not None and isinstance(root_cause(reason), ResourceShortage):
                # Not counted: a shortage passes, and giving up would not help, since a new engine would find the same.
                await trio.sleep(shortages.next_s())
            elif intensity.allow(trio.current_time(), self._num_achieved(), self._take_uncounted_restarts()):
                self._pauses.reset()
            else:
                self._report("intensity_exceeded", reason, name)
                if self._gives_up():
                    raise SupervisorGaveUp(f"{self.name}: {name} crashed too often") from reason
                # Before the pause: what depends on it must not wait for it that long.
                await self._stop(children_to_restart(self._strategy, tuple(self._specs), name))
                await trio.sleep(self._pauses.next_s())
            affected = children_to_restart(self._strategy, tuple(self._specs), name)
            self._restart_log.note_end(
                one for one in affected if self._specs[one].restart is not Restart.TEMPORARY
            )
            await self._stop(affected)
            failed = await self._start_again(affected, nursery)
            if failed is None:
                return
            name, reason = failed
            self._report("start_error", reason, name)

    async def _start_again(
        self, names: Sequence[str], nursery: trio.Nursery
    ) -> tuple[str, BaseException] | None:
        """Start children again; return the name and error of the first that failed, which counts as its crash."""
        failures: list[BaseException] = []
        for name in names:
            if self._specs[name].restart is not Restart.TEMPORARY:
                with foreign_errors_kept(failures.append):
                    await self._start(self._specs[name], nursery)
                if failures:
                    return name, failures[0]
        return None

    def _report(self, context: str, reason: BaseException | None, offender: str) -> None:
        report = CrashReport(supervisor=self.name, context=context, reason=reason, offender=offender)
        # a stop that takes long is no failure: the step in flight ends first, since a thread cannot be killed
        is_late = context == "shutdown_error" and reason is None
        logger.log(
            logging.INFO if is_late else logging.ERROR,
            "supervisor=%s context=%s reason=%r offender=%s",
            report.supervisor, report.context, report.reason, report.offender,
            exc_info=reason if context == "child_terminated" else None,
        )  # fmt: skip
        self._on_report(report)


Lives = dict[str, trio.CancelScope]
"""Scopes of the running children that can be ended from outside, by name."""


class ActorStuck(Exception):
    """Error of a child that did nothing for too long, and was ended from outside."""


def watched(lives: Lives, name: str, start: ChildStart) -> ChildStart:
    """Wrap a child so that it can be ended from outside, as by the watchdog: it dies of `ActorStuck` then."""

    async def live(*, task_status: trio.TaskStatus[None]) -> None:
        with trio.CancelScope() as scope:
            lives[name] = scope
            try:
                await start(task_status=task_status)
            finally:
                del lives[name]
        # Its supervisor cancels from outside of this scope.
        if scope.cancelled_caught:
            raise ActorStuck(f"{name} did nothing for too long")

    return live


def restart_after(report: CrashReport) -> tuple[str, str] | None:
    """Return the actor that is started again after a report, without the number of its replica, and the cause.

    Returns:
        None if none is; the cause is one of `RESTART_CAUSES`.
    """
    # A start that fails is followed by another one, as a crash is.
    if report.context not in ("child_terminated", "start_error"):
        return None
    return report.offender.partition(".")[0], restart_cause(report.reason)


def restart_cause(reason: BaseException | None) -> str:
    """Return the cause of a restart, one of `RESTART_CAUSES`.

    Args:
        reason: what the actor ended with; None for a return.
    """
    match reason and root_cause(reason):
        case ActorStuck() | RunnerDied(is_hang=True):
            return "hang"
        case RunnerDied():
            return "exit"
        case ResourceShortage():
            return "shortage"
        case _:
            return "crash"
