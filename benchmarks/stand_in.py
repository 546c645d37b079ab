"""Stand-in for a model runner that uses no processor, to measure everything else."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio

from triolet.actors.executors.contract import Executor, Tell
from triolet.core.load_progress import OnProgress
from triolet.core.request.lora import Adapter
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import SampledToken, StepPlan, StepResult
from triolet.core.worker_call import WorkerCall, WorkerOutcome
from triolet.errors import UnknownWorkerMethod
from triolet.nano import PATH


class StandIn(Executor):
    """Executor that answers with arbitrary tokens.

    Args:
        step_s: how long a step takes, seconds.
        vocab_size: of the model that it stands for.
        num_blocks: of its cache.
    """

    def __init__(self, step_s: float, vocab_size: int, num_blocks: int = 60_000) -> None:
        self._step_s, self._vocab_size, self._num_blocks = step_s, vocab_size, num_blocks
        self._rows: dict[int, tuple[str, int, int]] = {}

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        yield

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        await trio.lowlevel.checkpoint()
        return ModelInfo(
            folder=str(PATH),
            architecture="StandIn",
            backend="native",
            vocab_size=self._vocab_size,
            max_position=10**6,
            max_model_len=10 * self._num_blocks,
            num_kv_blocks=self._num_blocks,
            block_size=16,
            dtype="float32",
            device="cpu",
        )

    async def execute(self, plan: StepPlan, tell: Tell) -> StepResult:
        for start in plan.starts:
            self._rows[start.row_id] = (start.request_id, start.epoch, len(start.output_token_ids))
        tokens = []
        for row in plan.rows:
            if row.sample:
                request_id, epoch, position = self._rows[row.row_id]
                self._rows[row.row_id] = (request_id, epoch, position + 1)
                tokens.append(SampledToken(request_id, epoch, position, 300 + position % 500))
        await trio.sleep(self._step_s)
        return StepResult(plan.step_id, tuple(tokens))

    def halt(self) -> None:
        """End every run after its first step."""

    async def prepare_adapter(self, adapter: Adapter, *, is_pinned: bool) -> None:
        """Read nothing: the tokens are the same with every adapter."""

    async def call(self, call: WorkerCall, limit_s: float | None) -> WorkerOutcome:
        raise UnknownWorkerMethod(call.name, "called where there is a worker: a stand-in has none")

    def use_weights(self, folder: str | None) -> None:
        """Take other weights: there are none."""

    def forget_model(self) -> None:
        """Free nothing."""
