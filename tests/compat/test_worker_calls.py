"""Calls into the workers under vLLM's names, and through the engines for other event loops."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.actors.harness import FakeExecutor, fake_engine, model_info
from tests.core.fake_model import FakeModel
from triolet.compat import LLM, AsyncLLM, LLMEngine
from triolet.config.engine import EngineConfig
from triolet.core.worker_call import WorkerCall, WorkerOutcome
from triolet.errors import UnknownWorkerMethod, WorkerCallTimeout
from triolet.testing import open_fake_blocking_engine, open_fake_engine


class Called(FakeModel):
    """A model whose worker has one method."""

    def reset(self) -> None:
        self.rows.clear()

    def call(self, call: WorkerCall) -> Any:
        if call.target == "refuse":
            raise KeyError("planted")
        return (call.name, call.is_on_model, call.args, dict(call.kwargs))


class CalledExecutor(FakeExecutor):
    async def call(self, call: WorkerCall, limit_s: float | None) -> WorkerOutcome:
        await trio.lowlevel.checkpoint()
        return WorkerOutcome((call.name, call.is_on_model, call.args, dict(call.kwargs), limit_s))


async def test_async_llm_calls_its_workers(autojump_clock: MockClock) -> None:
    async with fake_engine(CalledExecutor(64, 4)) as engine, AsyncLLM.around(engine) as llm:
        assert await llm.collective_rpc("f", 5.0, (1,), {"a": 2}) == [("f", False, (1,), {"a": 2}, 5.0)]
        assert await llm.collective_rpc("f") == [("f", False, (), {}, engine.config.step_timeout)]
        assert await llm.apply_model("m:f") == [("m:f", True, (), {}, engine.config.step_timeout)]


@pytest.mark.parametrize("offline", [False, True])
def test_llm_engine_and_llm_call_their_worker_in_the_callers_thread(offline: bool) -> None:
    now_s = iter(range(100))
    loaded = (Called(64, 4, 50), model_info(64, 4), None)
    engine = LLMEngine(EngineConfig(), loaded=loaded, clock=lambda: next(now_s))
    face: Any = LLM(engine=engine) if offline else engine
    assert face.collective_rpc("f", None, (1,), {"a": 2}) == [("f", False, (1,), {"a": 2})]
    assert face.apply_model("m:f") == [("m:f", True, (), {})]
    with pytest.raises(KeyError, match="planted"):
        face.collective_rpc("refuse")
    with pytest.raises(WorkerCallTimeout, match=r"f must end within 0\.5 s"):
        face.collective_rpc("f", timeout=0.5)


def test_other_event_loops_and_none_get_the_errors_of_a_call_as_they_are() -> None:
    with open_fake_blocking_engine() as engine:
        with pytest.raises(UnknownWorkerMethod, match="ScriptedModel has no worker"):
            engine.collective_rpc("f", args=(1,))
        with pytest.raises(UnknownWorkerMethod):
            engine.apply_model(len)

    async def main() -> None:
        async with open_fake_engine() as engine:
            with pytest.raises(UnknownWorkerMethod):
                await engine.collective_rpc("f", 3.0)
            with pytest.raises(UnknownWorkerMethod):
                await engine.apply_model("m:f")

    asyncio.run(main())
