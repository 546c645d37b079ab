"""Defects of two steps in flight; see `mutation`."""

from __future__ import annotations

import attrs
import pytest

from tests.core.fake_model import FakeModel
from tests.simulation.mutation import mutant
from triolet.actors.executors.connection import RunnerConnection
from triolet.actors.executors.contract import Following, Tell
from triolet.actors.executors.process import ProcessExecutor
from triolet.core.scheduling.scheduler import Scheduler, StepInFlight
from triolet.core.scheduling.step_planner import StepPlanner
from triolet.core.step_plan import StepPlan, StepResult


@mutant("quarantine ends with the first of two steps")
def _quarantine_of_the_first(patch: pytest.MonkeyPatch) -> None:
    apply = Scheduler.apply

    def mutated(self: Scheduler, result: StepResult, now_s: float) -> None:
        in_flight = [step.step_id for step in self._in_flight]
        apply(self, result, now_s)
        if result.is_last and result.step_id in in_flight:
            for step_id in in_flight:
                self.pool.end_quarantine(step_id)

    patch.setattr(Scheduler, "apply", mutated)


@mutant("the late result of a void plan is applied")
def _void_is_applied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepInFlight, "make_void", lambda self: None)
    apply = Scheduler.apply

    def mutated(self: Scheduler, result: StepResult, now_s: float) -> None:
        if self._in_flight and self._in_flight[0].plan.is_ahead:
            result = attrs.evolve(result, out_of_memory=None)
        apply(self, result, now_s)

    patch.setattr(Scheduler, "apply", mutated)


@mutant("the runner computes a plan whose step before found no memory")
def _void_is_computed(patch: pytest.MonkeyPatch) -> None:
    execute = FakeModel.execute

    def mutated(self: FakeModel, plan: StepPlan) -> StepResult:
        self.has_lacked_memory = False
        return execute(self, plan)

    patch.setattr(FakeModel, "execute", mutated)


@mutant("a plan ahead preempts")
def _preempts_ahead(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: StepPlanner, now_s: float) -> StepPlan | None:
        plan = self.plan(now_s)
        return None if plan is None else attrs.evolve(plan, is_ahead=True)

    patch.setattr(StepPlanner, "plan_ahead", mutated)


@mutant("a grammar's row is planned ahead with the mask of the token before")
def _old_mask(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: Scheduler) -> bool:
        return not self._in_flight or (
            self.config.async_scheduling and len(self._in_flight) < 2 and not self._in_flight[0].is_void
        )

    patch.setattr(Scheduler, "may_plan", property(mutated))


@mutant("a plan ahead is sent before the one that it follows")
def _sent_too_early(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: ProcessExecutor, process: RunnerConnection) -> None:
        plan = self._ahead
        if plan is not None and plan.is_ahead and self._sent and process.post(plan):
            self._sent.append(plan)
            self._ahead = None

    patch.setattr(ProcessExecutor, "_send_the_next", mutated)


@mutant("a plan that was sent ahead is sent again in its turn")
def _sent_twice(patch: pytest.MonkeyPatch) -> None:
    send_now = ProcessExecutor._send_now

    def mutated(self: ProcessExecutor, process: RunnerConnection, plan: StepPlan) -> bool:
        return send_now(self, process, attrs.evolve(plan))

    patch.setattr(ProcessExecutor, "_send_now", mutated)


@mutant("the result of a plan that was taken back is not waited for")
def _not_waited_for(patch: pytest.MonkeyPatch) -> None:
    execute = ProcessExecutor.execute_in_turn

    async def mutated(self: ProcessExecutor, plan: StepPlan, tell: Tell, following: Following) -> StepResult:
        def follow() -> StepPlan | None:
            if (follower := following()) is None:
                self._sent.clear()
            return follower

        return await execute(self, plan, tell, follow)

    patch.setattr(ProcessExecutor, "execute_in_turn", mutated)
