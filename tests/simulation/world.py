"""What one run knows of itself: its trace, its faults, and every rule that it has seen broken."""

from __future__ import annotations

import errno
import hashlib
import logging
import random
from collections import Counter
from typing import Any

import attrs
import trio

from tests.actors.harness import Panic
from tests.simulation.adapters import Folders, WatchedAdapters
from tests.simulation.operations import Operations, Weights
from tests.simulation.story import MAX_STEP_S, Ask, Kind, Story
from triolet.actors.executors.grammar.grammars import GrammarsDied
from triolet.actors.model_runner import WeightsRefused
from triolet.actors.structured_output import MAX_ATTEMPTS
from triolet.actors.supervisor import ActorStuck
from triolet.core.journal import JournalEntry
from triolet.core.recovery.supervision import MIN_PAUSE_S
from triolet.core.request.request import FinishReason
from triolet.core.step_plan import RowStart
from triolet.errors import AdapterError, ModelFileError, ResourceShortage, RunnerDied, RunnerFailed

MAX_ROOT_RESTARTS = 3  # in a minute, longer than any story (docs/architecture.md)
SHORTAGES = (
    lambda: OSError(errno.EMFILE, "Too many open files"),
    lambda: OSError(errno.EAGAIN, "Resource temporarily unavailable"),
    lambda: OSError(errno.ENOMEM, "Cannot allocate memory"),
    lambda: RuntimeError("can't start new thread"),
    MemoryError,
)


class Planted(Exception):
    """A fault of the story."""


def make_error(kind: Kind, point: str) -> BaseException:
    """What is raised at a point: an exception, what foreign code raises past `except Exception`, or a group of both."""
    match kind:
        case "error":
            return Planted(point)
        case "panic":
            return Panic(point)
        case "memory":
            return MemoryError()
        case "disk":
            return OSError(errno.ENOSPC, "No space left on device")
        case "group":
            return BaseExceptionGroup(point, [Planted(point), Panic(point)])


def is_planted(error: BaseException) -> bool:
    """Whether the story explains it."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_planted, error.exceptions))
    if isinstance(error, OSError):
        return error.errno == errno.ENOSPC
    return isinstance(
        error,
        Planted
        | Panic
        | RunnerDied
        | RunnerFailed
        | ActorStuck
        | GrammarsDied
        | ResourceShortage
        | MemoryError
        | WeightsRefused
        | ModelFileError,
    )


@attrs.define(eq=False)
class Record:
    """What the world has seen of an admitted request.

    Args:
        entry: in the journal.
        owner: the task that submitted it.
        closed_s: when it ended.
        weights: number of those that the engine says have computed it, by token; one of a pooled request.
    """

    entry: JournalEntry
    owner: trio.lowlevel.Task
    closed_s: float | None = None
    weights: list[int] = attrs.field(factory=list)

    @property
    def request_id(self) -> str:
        """The client's word for it, also where this is one of several answers."""
        request = self.entry.request
        return request.parent_id or request.request_id


@attrs.define
class Countdown:
    """A scope to be cancelled after some more steps of a task."""

    num_steps: int
    scope: trio.CancelScope


@attrs.define(eq=False)
class World:
    """One run of a story.

    Args:
        story: what is to happen.
    """

    story: Story
    rng: random.Random = attrs.field(init=False)
    lines: list[str] = attrs.field(factory=list)
    violations: list[str] = attrs.field(factory=list)
    records: dict[int, Record] = attrs.field(factory=dict)
    aborted: set[str] = attrs.field(factory=set)
    fired: Counter[str] = attrs.field(factory=Counter)
    reached: Counter[str] = attrs.field(factory=Counter)
    cancels: dict[trio.lowlevel.Task, Countdown] = attrs.field(factory=dict)
    endings: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    emergency: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    schedule: list[str] = attrs.field(factory=list)
    is_armed: bool = True
    is_closing: bool = False
    num_lives: int = 0
    num_failed: int = 0
    num_root_crashes: int = 0  # children of the root that ended, or did not start again
    num_crashes: list[tuple[RowStart, int]] = attrs.field(factory=list)
    hung_s: float = 0.0
    num_shortages: int = 0
    num_counted: Counter[int] = attrs.field(factory=Counter)
    folders: Folders = attrs.field(factory=Folders)
    weights: Weights = attrs.field(factory=Weights)
    operations: Operations = attrs.field(factory=Operations)
    registry: WatchedAdapters | None = None
    custody: Any = None
    _faults: dict[tuple[str, int], Kind] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        from tests.simulation.replicas import Custody  # it is about worlds itself

        self.custody = Custody()
        self.rng = random.Random(self.story.seed + 1)
        self._faults = {(fault.point, fault.nth): fault.kind for fault in self.story.faults}

    @property
    def may_die(self) -> bool:
        """Whether the engine may give up.

        Faults that strike again and again while the root starts its children can exhaust it in an escalating story,
        too: it mends three crashes in a minute.
        """
        return self.story.mood == "deadly" or (
            self.story.mood == "escalating" and self.num_root_crashes > MAX_ROOT_RESTARTS
        )

    # ------------------------------------------------------------------------------------- the trace

    def note(self, line: str) -> None:
        """Write a line of the trace."""
        self.lines.append(f"{trio.current_time():9.6f} {line}")

    def hear(self, record: logging.LogRecord) -> bool:
        """Take a line of the log into the trace; False keeps it out of the log."""
        self.note(record.getMessage())
        return False

    def violated(self, rule: str) -> None:
        """A rule was broken."""
        self.note(f"VIOLATED {rule}")
        self.violations.append(rule)

    def expect(self, holds: bool, rule: str) -> None:
        """A rule must hold."""
        if not holds:
            self.violated(rule)

    def digest(self) -> str:
        """Of the trace, and of the order in which tasks ran."""
        return hashlib.blake2b(
            "\n".join([*self.lines, *self.schedule]).encode("utf-8", "backslashreplace"), digest_size=8
        ).hexdigest()

    # -------------------------------------------------------------------------------------- faults

    def is_due(self, point: str) -> Kind | None:
        """A point is reached: whether, and how, something breaks there now."""
        self.reached[point] += 1
        kind = self._faults.get((point, self.reached[point]))
        if kind is None or not self.is_armed:
            return None
        self.fired[point] += 1
        self.note(f"fault {point} {self.reached[point]} {kind}")
        return kind

    def reach_shortage(self, point: str) -> None:
        """Reach a point where the machine may have a resource no more; raises the error of the system."""
        if self.is_due(point):
            self.num_shortages += 1
            self.hung_s += MIN_PAUSE_S * 2**MAX_ATTEMPTS
            error = random.Random(f"{point} {self.reached[point]}").choice(SHORTAGES)()
            raise error

    def reach(self, point: str) -> None:
        """A point is reached; raises what is due there."""
        if (kind := self.is_due(point)) is not None:
            raise make_error(kind, point)

    def reach_adapter(self, point: str, path: object) -> None:
        """Reach a point where the files of an adapter are read; raises if that fails."""
        if self.is_due(point):
            self.folders.unread.add(trio.lowlevel.current_task())
            raise AdapterError(path, f"planted at {point}")

    def reach_weights(self, point: str, folder: object) -> None:
        """Reach a point where new weights are read; raises if that fails."""
        broken = {operation.folder for operation in self.story.operations if operation.is_broken}
        if self.is_due(point) or (point == "weights.load" and folder in broken):
            self.fired[point] += 1
            raise ModelFileError(str(folder), f"planted at {point}")

    async def maybe_hang(self, point: str) -> None:
        """Reach a point at which a task may pause."""
        if self.is_due(point):
            self.hung_s += self.longest_hang_s
            await trio.sleep(self.story.hang_s)

    @property
    def longest_hang_s(self) -> float:
        """How long an actor may do nothing before its watchdog ends that."""
        step_timeout_s: float = self.story.limits["step_timeout"]
        return min(self.story.hang_s, 1.5 * step_timeout_s)

    def reach_poison(self, start: RowStart, num_computed: int, replica: int | None = None) -> None:
        """A step brings a row to so many computed tokens; raises if that is more than the runner can stand.

        Args:
            replica: that is known to have been taken down by it; None if that cannot be known.
        """
        for ask in self.story.asks:
            if ask.poison_at is not None and num_computed > ask.poison_at and ask.is_of(start):
                self.note(f"poison of client {ask.number}")
                if replica is not None:
                    self.custody.poisoned(self, replica, ask.number, start.request_id)
                raise Planted("poison")

    @property
    def num_blocks(self) -> int:
        """Of the KV cache, in the present life of the runner."""
        later = self.story.later_num_blocks
        return self.story.num_blocks if later is None or self.num_lives <= 1 else later

    @property
    def max_model_len(self) -> int:
        """Longest sequence in the present life of the runner, tokens."""
        return self.story.longest_in(self.num_blocks)

    @property
    def lateness_s(self) -> float:
        """How late the scheduler may be for a deadline: while a runner starts again there is none."""
        restart_s = self.story.restart_s + MAX_STEP_S  # the step that a runner must do to be trusted
        return 2 * MAX_STEP_S + restart_s * max(0, self.num_lives - 1) + self.hung_s

    def may_be_blamed(self, ask: Ask) -> bool:
        """A client is told that its request crashes the runner: it does, or that is what two crashes looked like."""
        lengths = Counter(length for start, length in self.num_crashes if ask.is_of(start))
        # The runner may have begun the step after the one that crashed, too, in which the request was longer by one.
        is_ahead = bool(self.story.limits.get("async_scheduling"))
        most = max((number + is_ahead * lengths[length + 1] for length, number in lengths.items()), default=0)
        return ask.poison_at is not None or most >= 2

    # ----------------------------------------------------------------------------------- the journal

    def opened(self, entry: JournalEntry) -> None:
        """A request was admitted."""
        record = Record(entry, trio.lowlevel.current_task())
        record.weights += [0] * len(entry.output_token_ids)  # of another engine
        self.records[entry.serial] = record
        self.note(f"opened {entry.serial} {entry.request.request_id}")

    def records_of(self, task: trio.lowlevel.Task) -> list[Record]:
        """Of the answers to the request that a task submitted, in the order of their index."""
        return [record for record in self.records.values() if record.owner is task]

    def computed(self, entry: JournalEntry, version: int) -> None:
        """A token, or the result of a pooled request, was committed as one of this version of the weights."""
        number = self.weights.of_version.get(version)
        self.expect(
            number is not None, f"request {entry.serial} is computed by the unknown version {version}"
        )
        self.records[entry.serial].weights.append(number or 0)

    def counted(self, entry: JournalEntry, times: int) -> None:
        """The result of a pooled request was committed, and counted so many times."""
        self.num_counted[entry.serial] += times
        self.expect(self.num_counted[entry.serial] <= 1, f"pooled request {entry.serial} was counted twice")

    def closed(self, entry: JournalEntry) -> None:
        """A request has ended."""
        record, now_s = self.records[entry.serial], trio.current_time()
        request, name = entry.request, f"request {entry.serial}"
        self.note(f"closed {entry.serial} {entry.finish_reason} {entry.output_token_ids}")
        self.expect(record.closed_s is None, f"{name} ended twice")
        self.expect(entry.finish_reason is not None, f"{name} ended without a reason")
        record.closed_s = now_s
        if entry.finish_reason is FinishReason.ABORT and self.operations.num_aborting:
            self.aborted.add(record.request_id)
        self.endings.unpark_all()
        self.expect(now_s <= request.deadline_s + self.lateness_s, f"{name} outlived its deadline")
        queued_s = now_s if entry.scheduled_s is None else entry.scheduled_s
        self.expect(
            queued_s <= request.queue_deadline_s + self.lateness_s,
            f"{name} waited longer than its queue timeout",
        )
