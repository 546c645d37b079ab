"""An engine with eyes: every count is checked after every transition, and things break where the story says.

Nothing of the engine is replaced. The classes below are its own ones, which first reach a fault's point, then do what
they always do, then look. What they find is written down and not raised: raised, it would be one more crash to mend.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest
import trio

from tests.simulation.adapters import WatchedAdapters
from tests.simulation.forms import opening_stand_ins
from tests.simulation.replicas import WatchedReplicaCore, WatchedShare
from tests.simulation.world import World, is_planted
from triolet.actors import channels, detokenizer, supervision_tree, tokenizer
from triolet.actors.actor_progress import ActorProgress
from triolet.actors.channels import Channels, ReplicatedChannels
from triolet.actors.grammar_requests import GrammarRequests
from triolet.actors.supervisor import SupervisorGaveUp
from triolet.core import engine_core
from triolet.core.engine_core import EngineCore, GrammarMasks
from triolet.core.journal import Journal, JournalEntry
from triolet.core.replicas import replica_table, replicated_core
from triolet.core.request.grammar_state import TokenMask
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.request import FinishReason, Request
from triolet.core.scheduling import scheduler
from triolet.core.scheduling.admission import RequestQueues
from triolet.core.scheduling.scheduler import Scheduler, SchedulerConfig
from triolet.core.scheduling.sequence import Sequence
from triolet.core.scheduling.step_planner import StepPlanner
from triolet.core.step_plan import PooledVectors, SampledToken, StepPlan, StepResult
from triolet.engine import open_engine, weights
from triolet.errors import InvariantViolated


@contextmanager
def watched(world: World) -> Iterator[None]:
    """Engines that are started within this scope belong to the world."""
    log = logging.getLogger("triolet.supervisor")
    reports = _Reports(world)
    runner_log = logging.getLogger("triolet.runner")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_engine, "Journal", lambda: WatchedJournal(world))
        patch.setattr(open_engine, "Channels", lambda: WatchedChannels(world))
        # with replicas
        patch.setattr(channels, "Channels", lambda shared=None: WatchedChannels(world, shared))
        patch.setattr(open_engine, "ReplicatedChannels", lambda number: _watched_channels(world, number))
        patch.setattr(replica_table, "JournalShare", lambda *arguments: WatchedShare(world, *arguments))
        patch.setattr(
            replicated_core, "ReplicaCore", lambda *arguments: WatchedReplicaCore(world, *arguments)
        )
        patch.setattr(
            open_engine, "EngineCore", lambda admission, on_finish: WatchedCore(world, admission, on_finish)
        )
        patch.setattr(engine_core, "GrammarMasks", lambda *arguments: WatchedMasks(world, *arguments))
        patch.setattr(engine_core, "Scheduler", lambda *arguments: WatchedScheduler(world, *arguments))
        patch.setattr(scheduler, "RequestQueues", lambda *arguments: WatchedLanes(world, *arguments))
        patch.setattr(scheduler, "StepPlanner", lambda **arguments: WatchedPlanner(world, **arguments))
        patch.setattr(detokenizer, "deliver", _faulty_deliver(world))
        patch.setattr(tokenizer, "_answer", _faulty_answer(world))
        patch.setattr(open_engine, "GrammarRequests", lambda masks: WatchedGrammarRequests(world, masks))
        patch.setattr(open_engine, "AdapterRegistry", lambda *arguments: WatchedAdapters(world, *arguments))
        patch.setattr(weights, "check_folder", lambda current, new: world.reach_weights("weights.check", new))
        patch.setattr(supervision_tree, "make_grammars", lambda config, model: opening_stand_ins(world))
        log.addFilter(reports)
        runner_log.addFilter(world.hear)
        try:
            yield
        finally:
            log.removeFilter(reports)
            runner_log.removeFilter(world.hear)


class _Reports(logging.Filter):
    """Hears what supervisors report, and keeps it out of the log. A crash that no fault explains is a bug."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def filter(self, record: logging.LogRecord) -> bool:
        assert isinstance(record.args, tuple)
        supervisor, context, reason, offender = record.args
        self.world.note(f"report {supervisor} {context} {offender} {reason!r}")
        self.world.num_root_crashes += supervisor == "root" and context in ("child_terminated", "start_error")
        if context == "intensity_exceeded" and str(supervisor).startswith("replica "):
            self.world.custody.is_back(int(str(supervisor).removeprefix("replica ")))
        if (
            isinstance(reason, BaseException)
            and not isinstance(reason, SupervisorGaveUp)
            and not is_planted(reason)
        ):
            self.world.violated(f"{offender} crashed of itself: {reason!r}")
        return False


class WatchedJournal(Journal):
    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def open(self, request: Request, *, after: JournalEntry | None = None) -> JournalEntry:
        entry = super().open(request, after=after)
        self.world.opened(entry)
        return entry

    def commit(self, entry: JournalEntry, token: SampledToken, now_s: float) -> bool:
        self.world.reach("scheduler.commit.before")
        was_committed = super().commit(entry, token, now_s)
        if was_committed:
            self.world.computed(entry, entry.weight_version)
        self.world.reach("scheduler.commit.after")
        return was_committed

    def commit_pooled(self, entry: JournalEntry, part: PooledVectors) -> bool:
        self.world.reach("scheduler.commit.before")
        num_counted = len(self.stats._pooled)
        was_committed = super().commit_pooled(entry, part)
        self.world.counted(entry, len(self.stats._pooled) - num_counted)
        if was_committed:
            self.world.computed(entry, self.weight_version)
        self.world.reach("scheduler.commit.after")
        return was_committed

    def close(self, entry: JournalEntry) -> list[int]:
        live = {one.serial: one for one in self}
        ended = super().close(entry)
        for serial in live.keys() & ended:
            self.world.closed(live[serial])
        return ended


class WatchedChannels(Channels):
    def __init__(self, world: World, shared: Channels | None = None) -> None:
        super().__init__(shared)
        self.world = world
        self.scheduler_inbox: Any = HangingInbox(self.scheduler_inbox, world, "scheduler.hang")
        self.detokenizer_inbox: Any = HangingInbox(self.detokenizer_inbox, world, "detokenizer.hang")

    def send_result(self, result: StepResult) -> None:
        self.world.reach("runner.tell.before")
        super().send_result(result)
        self.world.reach("runner.tell.after")


def _watched_channels(world: World, num_replicas: int) -> ReplicatedChannels:
    made = ReplicatedChannels(num_replicas)
    inbox: Any = HangingInbox(made.detokenizer_inbox, world, "detokenizer.hang")
    made.detokenizer_inbox = inbox
    return made


class WatchedCore(EngineCore):
    def __init__(self, world: World, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.world = world
        self.is_stale = False
        world.custody.cores[0] = self

    def finish(self, serial: int, reason: FinishReason) -> None:
        self.is_stale |= not self.is_scheduling
        super().finish(serial, reason)

    def note_loaded(self, info: ModelInfo) -> None:
        super().note_loaded(info)
        for rule in self.world.weights.name(self.weights.version):
            self.world.violated(rule)

    def new_scheduler(self, config: SchedulerConfig) -> Scheduler:
        if self.scheduler is not None:
            self.world.reach("scheduler.start")
        new = super().new_scheduler(config)
        self.is_stale = False
        self.world.note(f"scheduler started with {new.num_waiting}")
        return new


class HangingInbox:
    """An inbox whose reader sometimes does nothing before it reads."""

    def __init__(self, inbox: Any, world: World, point: str) -> None:
        self._inbox, self._world, self._point = inbox, world, point

    def clone(self) -> HangingInbox:
        return HangingInbox(self._inbox.clone(), self._world, self._point)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._inbox.close()

    def __aiter__(self) -> HangingInbox:
        return self

    async def __anext__(self) -> Any:
        await self._world.maybe_hang(self._point)
        return await anext(self._inbox)

    async def receive(self) -> Any:
        await self._world.maybe_hang(self._point)
        return await self._inbox.receive()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inbox, name)


class WatchedScheduler(Scheduler):
    """While its own actor is in the middle of something, others may not find it whole, and need not: it is checked when
    a transition has ended.
    """

    def __init__(self, world: World, *arguments: Any) -> None:
        self.world = world
        self.is_whole = True
        self._touched: dict[int, set[int]] = {}  # by the steps in flight
        super().__init__(*arguments)

    @contextmanager
    def _transition(self, name: str = "") -> Iterator[None]:
        if name:
            self.world.reach(f"scheduler.{name}.before")
        was_whole, self.is_whole = self.is_whole, False
        yield
        self.is_whole = was_whole
        if was_whole:
            self._look(name)
        if name:
            self.world.reach(f"scheduler.{name}.after")

    def _look(self, name: str) -> None:
        try:
            self.check()
        except InvariantViolated as violation:
            self.world.violated(f"after {name or 'abort'}: {violation}")
        # Whatever else happens meanwhile, no other request gets the blocks that the steps in flight read and write.
        touched = set[int]().union(*(self._touched[step.step_id] for step in self._in_flight))
        if loose := touched & {*self.pool._free, *self.pool._cached}:
            self.world.violated(f"after {name or 'abort'}: blocks {sorted(loose)} are free amid a step")

    def add_arrivals(self) -> None:
        with self._transition("arrivals"):
            super().add_arrivals()

    def abort(self, serial: int, reason: FinishReason = FinishReason.ABORT) -> None:
        with self._transition():
            super().abort(serial, reason)

    def expire(self, now_s: float) -> None:
        with self._transition("expire"):
            super().expire(now_s)

    def plan_step(self, now_s: float) -> StepPlan | None:
        with self._transition("plan"):
            plan = super().plan_step(now_s)
            if plan is not None:
                scheduled = self._in_flight[-1].scheduled
                self._touched[plan.step_id] = {block for one in scheduled for block in one.block_table}
        return plan

    def apply(self, result: StepResult, now_s: float) -> None:
        with self._transition("apply"):
            super().apply(result, now_s)

    def take_progress(self) -> tuple[int, ...]:
        with self._transition("progress"):
            return super().take_progress()


class WatchedPlanner(StepPlanner):
    def __init__(self, world: World, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.world = world

    def _schedule(self, sequence: Sequence, num_tokens: int, num_missing_blocks: int) -> None:
        super()._schedule(sequence, num_tokens, num_missing_blocks)
        self.world.reach("scheduler.plan.middle")


class WatchedLanes(RequestQueues):
    def __init__(self, world: World, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.world = world

    def _take_back(self, sequence: Sequence, step_id: int | None) -> None:
        super()._take_back(sequence, step_id)
        if trio.lowlevel.current_task().name.startswith("scheduler"):
            point = "finish" if sequence.entry.finish_reason else "preempt"
            self.world.reach(f"scheduler.{point}.middle")


def _faulty_deliver(world: World) -> Any:
    original = detokenizer.deliver

    def deliver(core: EngineCore, progress: ActorProgress, serial: int, now_s: float) -> None:
        world.reach("detokenizer.deliver.before")
        original(core, progress, serial, now_s)
        world.reach("detokenizer.deliver.after")

    return deliver


def _faulty_answer(world: World) -> Any:
    original = tokenizer._answer

    async def answer(tokenizer: Any, request: Any, run: Any) -> None:
        with request[1]:
            world.reach("tokenizer.answer.before")
            await world.maybe_hang("tokenizer.hang")
            run = _run_without_threads(world, run)
            await original(tokenizer, request, run)
            world.reach("tokenizer.answer.after")

    return answer


def _run_without_threads(world: World, run: Any) -> Any:
    async def faulty(function: Any) -> Any:
        await trio.lowlevel.checkpoint()
        world.reach_shortage("shortage.tokenizer")
        return await run(function)

    return faulty


class WatchedGrammarRequests(GrammarRequests):
    def __init__(self, world: World, masks: GrammarMasks) -> None:
        super().__init__(masks)
        self.world = world

    async def questions(self) -> tuple[int, ...]:
        questions = await super().questions()
        await self.world.maybe_hang("guidance.hang")  # with the questions in its hands
        return questions


class WatchedMasks(GrammarMasks):
    def __init__(self, world: World, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.world = world

    def sort(self, serials: Iterable[int]) -> Any:
        self.world.reach("guidance.sort.before")
        asked = super().sort(serials)
        self.world.reach("guidance.sort.after")
        return asked

    def answer(self, serial: int, mask: TokenMask) -> None:
        self.world.reach("guidance.answer.before")
        super().answer(serial, mask)
        self.world.reach("guidance.answer.after")
