"""The rules of Erlang/OTP's supervisor, as short as they can be said, and children that do as they are told.

`Reference` has no tasks and no clock. It writes down what must happen; `Nursery` writes down what did. Unlike OTP's,
a supervisor here returns when its last child has ended for good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import attrs
import trio

from tests.actors.harness import Panic
from triolet.actors.supervisor import ChildSpec
from triolet.core.recovery.supervision import CrashReport, Restart, Strategy

Event = tuple[str, str]


# New ones for every death: an exception that is raised again and again drags all its tracebacks along.
ENDINGS: dict[str, Callable[[], BaseException | None]] = {
    "exception": lambda: ValueError("planted"),
    "panic": lambda: Panic("planted"),
    "group": lambda: ExceptionGroup("planted", [ValueError("one"), OSError("two")]),
    "group with a panic": lambda: BaseExceptionGroup("planted", [ValueError("one"), Panic("two")]),
    "return": lambda: None,
}


@attrs.define
class Reference:
    """What a supervisor must do, step by step.

    Args:
        restarts: the children and their restart types, in start order.
        failing: how many of the coming starts of a child fail.
    """

    restarts: dict[str, Restart]
    strategy: Strategy
    max_restarts: int
    period_s: float
    failing: Counter[str] = attrs.field(factory=Counter)
    events: list[Event] = attrs.field(factory=list)
    alive: list[str] = attrs.field(factory=list)
    times_s: list[float] = attrs.field(factory=list)
    gave_up: bool = False

    @property
    def is_over(self) -> bool:
        return not self.alive

    def start_all(self) -> None:
        assert self.start(list(self.restarts)) is None

    def start(self, names: Sequence[str]) -> str | None:
        """Return the child that failed to start."""
        for name in names:
            if self.failing[name]:
                self.failing[name] -= 1
                return name
            self.events.append(("started", name))
            self.alive = [other for other in self.restarts if other in {*self.alive, name}]
        return None

    def stop(self, names: Sequence[str]) -> None:
        for name in [other for other in reversed(self.alive) if other in names]:
            self.alive.remove(name)
            self.events.append(("stopped", name))

    def end(self, name: str, *, crashed: bool, now_s: float) -> None:
        """A child ends by itself."""
        self.alive.remove(name)
        restart = self.restarts[name]
        if crashed or restart is Restart.PERMANENT:
            self.events.append(("child_terminated", name))
        if restart is Restart.PERMANENT or (crashed and restart is Restart.TRANSIENT):
            self.restart(name, now_s)

    def restart(self, name: str | None, now_s: float) -> None:
        while name is not None:
            self.times_s = [t for t in self.times_s if t >= now_s - self.period_s] + [now_s]
            if len(self.times_s) > self.max_restarts:
                self.events.append(("intensity_exceeded", name))
                self.stop(list(self.restarts))
                self.gave_up = True
                return
            names = list(self.restarts)
            first = {Strategy.ONE_FOR_ALL: 0, Strategy.REST_FOR_ONE: names.index(name)}.get(self.strategy)
            affected = [name] if first is None else names[first:]
            self.stop(affected)
            name = self.start([other for other in affected if self.restarts[other] is not Restart.TEMPORARY])
            if name is not None:
                self.events.append(("start_error", name))


@attrs.define
class Nursery:
    """Children that start, end and fail to start when they are told to, and write down what happens to them."""

    events: list[Event] = attrs.field(factory=list)
    reports: list[CrashReport] = attrs.field(factory=list)
    failing: Counter[str] = attrs.field(factory=Counter)
    endings: dict[str, trio.MemorySendChannel[BaseException | None]] = attrs.field(factory=dict)

    def child(self, name: str, restart: Restart = Restart.PERMANENT) -> ChildSpec:
        async def live(*, task_status: trio.TaskStatus[None]) -> None:
            self.endings[name], told = trio.open_memory_channel[BaseException | None](1)
            await trio.lowlevel.checkpoint()
            if self.failing[name]:
                self.failing[name] -= 1
                raise ValueError(f"{name} does not start")
            self.events.append(("started", name))
            task_status.started()
            try:
                ending = await told.receive()
            except trio.Cancelled:
                self.events.append(("stopped", name))
                raise
            if ending is not None:
                raise ending

        return ChildSpec(name=name, start=live, restart=restart)

    def end(self, name: str, ending: BaseException | None) -> None:
        self.endings[name].send_nowait(ending)

    def report(self, report: CrashReport) -> None:
        self.reports.append(report)
        self.events.append((report.context, report.offender))
