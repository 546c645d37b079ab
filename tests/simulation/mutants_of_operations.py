"""Defects of sleep, pauses and new weights; see `mutation`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.simulation.mutation import mutant
from triolet.core.engine_core import EngineCore
from triolet.core.request.model_info import ModelInfo
from triolet.core.scheduling import scheduler
from triolet.core.scheduling.scheduler import Scheduler, SchedulerConfig
from triolet.core.sleep import NOTHING, PAUSE, WEIGHTS, RunnerPhase, SleepState
from triolet.core.step_plan import StepPlan
from triolet.core.weights import WeightsState
from triolet.engine.pause import PauseMethods

# ------------------------------------------------------------------------------------------- sleep


@mutant("an engine is called awake before its load has ended")
def _awake_too_early(patch: pytest.MonkeyPatch) -> None:
    wake = SleepState.wake

    def mutated(self: SleepState, *arguments: Any) -> None:
        wake(self, *arguments)
        self._is_waking = False

    patch.setattr(SleepState, "wake", mutated)


@mutant("requests are computed before the load of the waking has ended")
def _computes_too_early(patch: pytest.MonkeyPatch) -> None:
    wake = SleepState.wake

    def mutated(self: SleepState, *arguments: Any) -> None:
        wake(self, *arguments)
        if self.level is None and self.phase is RunnerPhase.UNLOADED:
            self.enter(RunnerPhase.LOADED)

    patch.setattr(SleepState, "wake", mutated)


@mutant("a wake-up before the runner has given up the model is lost")
def _wake_up_lost(patch: pytest.MonkeyPatch) -> None:
    wake = SleepState.wake

    def mutated(self: SleepState, *arguments: Any) -> None:
        if self.phase is not RunnerPhase.LEAVING:
            wake(self, *arguments)

    patch.setattr(SleepState, "wake", mutated)


@mutant("the runner is not told of a wake-up")
def _runner_not_told(patch: pytest.MonkeyPatch) -> None:
    wake = SleepState.wake

    def mutated(self: SleepState, *arguments: Any) -> None:
        on_change, self.on_change = self.on_change, lambda: None
        wake(self, *arguments)
        self.on_change = on_change

    patch.setattr(SleepState, "wake", mutated)


@mutant("a request does not wake an engine that sleeps by itself")
def _request_does_not_wake(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SleepState, "wake_from_idleness", lambda self: None)


@mutant("a runner that crashes while the engine falls asleep loads its model again")
def _sleeper_loads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineCore, "must_unload", property(lambda self: False))


@mutant("deadlines do not go on while nothing may be computed")
def _no_deadlines(patch: pytest.MonkeyPatch) -> None:
    plan_step = EngineCore.plan_step

    def mutated(self: EngineCore, now_s: float) -> StepPlan | None:
        return None if self.is_frozen else plan_step(self, now_s)

    patch.setattr(EngineCore, "plan_step", mutated)
    patch.setattr(EngineCore, "next_look_s", lambda self: float("inf"))


# ------------------------------------------------------------------------------------------- pause


@mutant("a pause does not keep requests from being computed")
def _no_pause(patch: pytest.MonkeyPatch) -> None:
    hold = SleepState.hold

    def mutated(self: SleepState, name: str, limit: float = NOTHING, by: object = None) -> None:
        hold(self, name, float("inf") if name == PAUSE else limit, by)

    patch.setattr(SleepState, "hold", mutated)


@mutant("a pause is forgotten when the scheduler crashes")
def _forgotten_pause(patch: pytest.MonkeyPatch) -> None:
    new_scheduler = EngineCore.new_scheduler

    def mutated(self: EngineCore, config: SchedulerConfig) -> Scheduler:
        self.sleep._holds.pop(PAUSE, None)
        self.sleep._update()
        return new_scheduler(self, config)

    patch.setattr(EngineCore, "new_scheduler", mutated)


@mutant("what waits for the live ones does not wait for them")
def _does_not_wait(patch: pytest.MonkeyPatch) -> None:
    limit_of: Callable[[Any, str], int] = PauseMethods._limit_of

    def mutated(self: PauseMethods, mode: str) -> int:
        return limit_of(self, "keep" if mode == "wait" else mode)

    patch.setattr(PauseMethods, "_limit_of", mutated)


@mutant("what may not be computed any more is waited for by its stricter neighbour only")
def _stricter_neighbour(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: SleepState, name: str) -> float:
        return self.limit if name in self._holds else float("inf")

    patch.setattr(SleepState, "limit_of", mutated)


# ----------------------------------------------------------------------------------------- weights


@mutant("the scheduler of the old weights goes on with its blocks after new ones are loaded")
def _stale_blocks(patch: pytest.MonkeyPatch) -> None:
    follow_runner = EngineCore.follow_runner

    def mutated(self: EngineCore, config: Callable[[], SchedulerConfig]) -> bool:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(self, "new_scheduler", lambda config: self.scheduler)
            return follow_runner(self, config)

    patch.setattr(EngineCore, "follow_runner", mutated)


@mutant("prefixes that the old weights have computed are found after new ones are loaded")
def _stale_prefix(patch: pytest.MonkeyPatch) -> None:
    new_scheduler = EngineCore.new_scheduler

    def mutated(self: EngineCore, config: SchedulerConfig) -> Scheduler:
        former = self.scheduler
        if former is None or former.pool.num_blocks != config.num_blocks:
            return new_scheduler(self, config)
        if former.pool.num_in_use or former.pool.num_quarantined:
            return new_scheduler(self, config)
        with pytest.MonkeyPatch.context() as within:
            within.setattr(scheduler, "PrefixCache", lambda *arguments, **fields: former.cache)
            return new_scheduler(self, config)

    patch.setattr(EngineCore, "new_scheduler", mutated)


@mutant("tokens of the new weights bear the old version")
def _old_version(patch: pytest.MonkeyPatch) -> None:
    note_loaded = EngineCore.note_loaded

    def mutated(self: EngineCore, info: ModelInfo) -> None:
        version = self.journal.weight_version
        note_loaded(self, info)
        self.journal.weight_version = version

    patch.setattr(EngineCore, "note_loaded", mutated)


@mutant("tokens of the old weights bear the new version while the live ones finish")
def _new_version_too_early(patch: pytest.MonkeyPatch) -> None:
    plan_step = EngineCore.plan_step

    def mutated(self: EngineCore, now_s: float) -> StepPlan | None:
        if self.weights.requested is not None:
            self.journal.weight_version = self.weights.version + 1
        return plan_step(self, now_s)

    patch.setattr(EngineCore, "plan_step", mutated)


@mutant("a runner that starts again loads the weights that the engine was opened with")
def _first_weights(patch: pytest.MonkeyPatch) -> None:
    begin_load = EngineCore.begin_load

    def mutated(self: EngineCore) -> str | None:
        begin_load(self)
        return self.weights.loading

    patch.setattr(EngineCore, "begin_load", mutated)


@mutant("a runner that starts again loads new weights, though some are to finish with the old ones")
def _exchanged_too_early(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: EngineCore) -> str | None:
        self.weights.loading = self.weights.requested
        return self.weights.loading or self.weights.folder

    patch.setattr(EngineCore, "begin_load", mutated)


@mutant("weights that could not be loaded count as those in use")
def _refused_are_used(patch: pytest.MonkeyPatch) -> None:
    refuse = WeightsState.refuse

    def mutated(self: WeightsState, error: BaseException, *, is_death: bool) -> bool:
        loading = self.loading
        if was_refused := refuse(self, error, is_death=is_death):
            self.version, self.folder = self.version + 1, loading
        return was_refused

    patch.setattr(WeightsState, "refuse", mutated)


@mutant("an exchange that was cancelled before its load is made all the same")
def _cancelled_is_made(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightsState, "withdraw", lambda self, former: None)


@mutant("weights that are loading when others are asked for are not counted")
def _uncounted_version(patch: pytest.MonkeyPatch) -> None:
    request = WeightsState.request

    def mutated(self: WeightsState, folder: str) -> None:
        request(self, folder)
        self.loading = None

    patch.setattr(WeightsState, "request", mutated)


@mutant("requests go on only after the next one has come when new weights are loaded")
def _never_released(patch: pytest.MonkeyPatch) -> None:
    release = SleepState.release

    def mutated(self: SleepState, name: str) -> None:
        if name != WEIGHTS:
            release(self, name)

    patch.setattr(SleepState, "release", mutated)


@mutant("weights that cannot be loaded are tried for ever")
def _tried_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightsState, "refuse", lambda self, error, *, is_death: False)
