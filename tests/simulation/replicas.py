"""Stories of engines with two replicas: the others' faults, and processes that are killed from outside."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import attrs

from tests.simulation.story import Story, draw_story
from tests.simulation.world import World
from triolet.core.engine_core import EngineCore
from triolet.core.journal import JournalEntry
from triolet.core.replicas.replica_table import JournalShare
from triolet.core.replicas.replicated_core import ReplicaCore
from triolet.core.request.model_info import ModelInfo
from triolet.core.scheduling.scheduler import Scheduler, SchedulerConfig
from triolet.core.step_plan import PooledVectors, SampledToken, StepPlan

NUM_REPLICAS = 2
KILLED = 0.6  # of the stories: in these, processes are killed
TOGETHER = 0.3  # of the kills: the other replica dies of the next step, too
REFUSED_LIMITS = ("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "sleep_after")


def draw_replica_story(seed: int) -> Story:
    """The story of a seed, without what replicas refuse, and with kills."""
    story, rng = draw_story(seed), random.Random(f"replicas {seed}")
    limits = {name: value for name, value in story.limits.items() if name not in REFUSED_LIMITS}
    asks = tuple(attrs.evolve(ask, adapter=None, retraining=None) for ask in story.asks)
    kills = set[tuple[int, int]]()
    for _ in range(rng.choice((1, 1, 2, 3, 6)) if rng.random() < KILLED else 0):
        replica, nth = rng.randrange(NUM_REPLICAS), rng.randint(1, 40)
        kills.add((replica, nth))
        if rng.random() < TOGETHER:
            kills.add((1 - replica, nth + rng.randint(0, 1)))
    return attrs.evolve(
        story,
        limits=limits,
        asks=asks,
        operations=(),
        later_num_blocks=None,
        num_replicas=NUM_REPLICAS,
        kills=tuple(sorted(kills)),
    )


@attrs.define(eq=False)
class Custody:
    """Which replica has which request, as it was seen from outside: it is independent of the engine's own table.

    Args:
        owner: of each request, by serial.
        by_epoch: the replica that each stay of a request belongs to.
        down: replicas that a poisoned request has taken down, by its client and its id, until they are back.
        cores: of the replicas.
    """

    owner: dict[int, int] = attrs.field(factory=dict)
    by_epoch: dict[tuple[int, int], int] = attrs.field(factory=dict)
    down: defaultdict[tuple[int, str], set[int]] = attrs.field(factory=lambda: defaultdict(set))
    cores: dict[int, EngineCore] = attrs.field(factory=dict)

    def awaits(self, replica: int, plan: StepPlan) -> bool:
        """Whether the result of a plan is waited for: not if its scheduler has crashed. A process has a copy of it."""
        core = self.cores[replica]
        if core.scheduler is None or not core.is_scheduling:
            return False
        return any(step.plan.step_id == plan.step_id for step in core.scheduler._in_flight)

    def takes(self, world: World, replica: int, entry: JournalEntry) -> None:
        """A request was placed."""
        self.owner[entry.serial] = replica
        self.stays(world, replica, entry)

    def stays(self, world: World, replica: int, entry: JournalEntry) -> None:
        """A replica works on a request under its present epoch."""
        former = self.by_epoch.setdefault((entry.serial, entry.epoch), replica)
        world.expect(former == replica, f"request {entry.serial} came to replica {replica} with an old epoch")

    def commits(self, world: World, replica: int, entry: JournalEntry) -> None:
        """A result of a replica was applied."""
        owner = self.owner.get(entry.serial)
        world.expect(owner == replica, f"replica {replica} answers request {entry.serial} of replica {owner}")
        self.stays(world, replica, entry)

    def poisoned(self, world: World, replica: int, client: int, request_id: str) -> None:
        """A request has taken down a replica. Two clients may give their requests the same id, one after the other."""
        down = self.down[client, request_id]
        others = down - {replica}
        world.expect(not others, f"{request_id} takes down replica {replica} beside {sorted(others)}")
        down.add(replica)

    def is_back(self, replica: int) -> None:
        """A replica computes again, or is waited for no longer."""
        for replicas in self.down.values():
            replicas.discard(replica)


class WatchedShare(JournalShare):
    def __init__(self, world: World, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.world = world

    def add(self, entry: JournalEntry) -> None:
        super().add(entry)
        self.world.custody.takes(self.world, self.replica, entry)

    def commit(self, entry: JournalEntry, token: SampledToken, now_s: float) -> bool:
        was_committed = super().commit(entry, token, now_s)
        if was_committed:
            self.world.custody.commits(self.world, self.replica, entry)
        return was_committed

    def commit_pooled(self, entry: JournalEntry, part: PooledVectors) -> bool:
        was_committed = super().commit_pooled(entry, part)
        if was_committed:
            self.world.custody.commits(self.world, self.replica, entry)
        return was_committed


class WatchedReplicaCore(ReplicaCore):
    def __init__(self, world: World, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.world = world
        world.custody.cores[self.replica] = self

    def note_loaded(self, info: ModelInfo) -> None:
        super().note_loaded(info)
        self.world.weights.of_version[0] = 0  # replicas get no other weights

    def new_scheduler(self, config: SchedulerConfig) -> Scheduler:
        if self.scheduler is not None:
            self.world.reach("scheduler.start")
        new = super().new_scheduler(config)
        self.world.custody.is_back(self.replica)
        self.world.note(f"scheduler {self.replica} started with {new.num_waiting}")
        return new
