"""Engines over the fake model in a thread of their own; real time, with steps that take next to none of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import trio

from tests.actors.harness import FakeExecutor, assert_all_blocks_back, fake_engine
from triolet.aio import AsyncioEngine
from triolet.bridge.engine_thread import EngineThread
from triolet.core.step_plan import StepPlan, StepResult
from triolet.engine.engine import Engine


class FastExecutor(FakeExecutor):
    """Steps of the fake model that take one turn of the event loop, or `step_s` seconds."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, step_s: float = 0.0) -> None:
        super().__init__(num_blocks, block_size)
        self.step_s = step_s

    async def compute(self, plan: StepPlan) -> StepResult:
        result = self.model.execute(plan)
        await trio.sleep(self.step_s)
        self.before_step(plan)
        return result


def engine_thread(executor: FastExecutor | None = None, **fields: Any) -> EngineThread:
    """A thread that runs an engine, and checks at the end that all blocks came back."""

    @asynccontextmanager
    async def checked() -> AsyncGenerator[Engine]:
        async with fake_engine(executor or FastExecutor(), **fields) as engine:
            yield engine

    return EngineThread(checked)


async def assert_nothing_is_held(engine: AsyncioEngine) -> None:
    """No request lives; and no block is held, once the step in flight has ended."""
    assert engine.statistics().num_requests_live == 0
    scheduler = engine._native._core.scheduler
    assert scheduler is not None
    while engine._thread.call(lambda: scheduler.is_step_in_flight):  # noqa: ASYNC110  it is another thread's
        await asyncio.sleep(0.001)
    engine._thread.call(assert_all_blocks_back, engine._native)


@contextmanager
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    # Trio keeps idle worker threads for a while; the engine's own thread must have ended.
    left = [thread for thread in threading.enumerate() if thread not in before and "triolet" in thread.name]
    assert not [thread for thread in left if thread.is_alive()]
