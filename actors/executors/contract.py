"""Contract of the executors, which decide where the model runs: in the event loop, a thread or a process.

`start` brings up a model that knows no request, `execute` computes one plan, and leaving `running()` leaves no thread
or process behind. The model-runner actor is the same around each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

import attrs

from triolet.config.engine import EngineConfig
from triolet.core.load_progress import OnProgress
from triolet.core.request.lora import Adapter
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import StepPlan, StepResult
from triolet.core.worker_call import WorkerCall, WorkerOutcome

Tell = Callable[[StepResult], None]


Following = Callable[[], StepPlan | None]
"""Called when a plan is computed: take the next one, or None."""


def with_kv_cache(config: EngineConfig, info: ModelInfo) -> EngineConfig:
    """Return the configuration of the loads after one that has succeeded: its KV cache is theirs.

    Requests in flight were admitted for that number of blocks, whatever memory is free by then.
    """
    has_none = info.pooling is not None and info.pooling.needs_whole_prompts
    return attrs.evolve(
        config,
        num_kv_blocks=None if has_none else info.num_kv_blocks // len(info.cache_windows),
        kv_cache_bytes=None,
        max_model_len=info.max_model_len,
    )


def with_weights(config: EngineConfig, folder: str) -> EngineConfig:
    """Return the configuration with the model of a folder."""
    # Not cached: each update of single tensors has a folder of its own, and would leave a file of packed weights.
    return attrs.evolve(config, model=folder, revision=None, weights_cache=None)


class WorkerSupply(Protocol):
    """Workers of an engine whose number of replicas changes."""

    @property
    def num_ready(self) -> int:
        """Number of workers that wait to be taken."""
        ...

    def want(self, num_workers: int) -> None:
        """Say how many workers there should be, those that are taken included; more than these are not needed."""
        ...


class Executor(Protocol):
    """Place where the model runs."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Enclose one life; no thread or process of it is left when the scope ends."""
        ...

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        """Load the model in the first life, and forget all requests in later ones."""
        ...

    async def execute(self, plan: StepPlan, tell: Tell) -> StepResult:
        """Compute a plan.

        Args:
            plan: one step or several.
            tell: called with each result but the last.
        Returns:
            The last result.
        """
        ...

    async def prepare_adapter(self, adapter: Adapter, *, is_pinned: bool) -> None:
        """Have the runner read a LoRA adapter, so that the step that needs it does not wait.

        Args:
            adapter: read and checked.
            is_pinned: whether the runner keeps it until it is removed.
        Raises:
            AdapterError: it cannot be read. An executor that does not wait for its runner leaves that to the step.
        """
        ...

    async def call(self, call: WorkerCall, limit_s: float | None) -> WorkerOutcome:
        """Call the worker, while no plan is being computed.

        Args:
            call: what to call.
            limit_s: after which a process that computes it is ended as one that hangs; None for never.
        Returns:
            What it returned or raised.
        Raises:
            RunnerDied: the process ended in it.
        """

    def use_weights(self, folder: str | None) -> None:
        """Load the model from this folder from the next `start` on; None for that of the configuration."""
        ...

    def forget_model(self) -> None:
        """Free the memory of the model, after `running()` was left: the next `start` loads it again."""
        ...

    def halt(self) -> None:
        """If a plan of several steps is being computed, end it after the current step; send none ahead of its turn."""
        ...

    def supply(self) -> WorkerSupply | None:
        """Return where workers come from; None for an executor with a model of its own."""
        return None


@runtime_checkable
class LookAheadExecutor(Executor, Protocol):
    """Executor whose runner takes a plan before the result of the one before it has come."""

    def send_ahead(self, plan: StepPlan) -> None:
        """Send a plan to the runner already, if it comes right after the one that was sent last. Never waits.

        It is still given by `following` when its turn has come. If it never is, because a new scheduler has taken it
        back, it is computed as well: its result is late.
        """
        ...

    async def execute_in_turn(self, plan: StepPlan, tell: Tell, following: Following) -> StepResult:
        """Compute a plan and those that follow it; see `execute`.

        Args:
            plan: one step or several.
            tell: called with each result but the last.
            following: called when a plan is computed, before its last result is told.
        Returns:
            The last result; none of a plan that was sent is missing.
        """
        ...
