"""Defects of plans for several steps; see `mutation`."""

from __future__ import annotations

from collections.abc import Collection

import attrs
import pytest

from tests.simulation.mutation import mutant
from triolet.core.kv_cache.block_pool import BlockPool
from triolet.core.scheduling import step_planner
from triolet.core.scheduling.scheduler import Scheduler
from triolet.core.scheduling.sequence import Sequence
from triolet.core.scheduling.step_planner import StepPlanner
from triolet.core.step_plan import StepResult


@mutant("a run has the blocks of its first step only")
def _blocks_of_one_step(patch: pytest.MonkeyPatch) -> None:
    def mutated(scheduled: Collection[Sequence], num_steps: int, pool: BlockPool, block_size: int) -> int:
        return num_steps

    patch.setattr(step_planner, "add_blocks_of_run", mutated)


@mutant("a request that has ended in a run goes on in it")
def _ended_go_on(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: StepPlanner, now_s: float) -> None:
        for sequence in self.scheduled:
            sequence.schedule(1, self.counters.steps)

    patch.setattr(StepPlanner, "go_on", mutated)


@mutant("a result in the middle of a run is taken for the last")
def _ends_too_soon(patch: pytest.MonkeyPatch) -> None:
    apply = Scheduler.apply

    def mutated(self: Scheduler, result: StepResult, now_s: float) -> None:
        apply(self, attrs.evolve(result, is_last=True), now_s)

    patch.setattr(Scheduler, "apply", mutated)


@mutant("no request has a part in a run's later steps")
def _none_goes_on(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: StepPlanner, now_s: float) -> None:
        self.scheduled = []

    patch.setattr(StepPlanner, "go_on", mutated)
