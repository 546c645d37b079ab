"""`AsyncLLM` under `asyncio.run`, as programs for vLLM use it; the fake model's answers are the oracle."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from tests.actors.harness import answer_of, fake_engine
from tests.bridge.harness import FastExecutor, engine_thread, no_thread_is_left
from triolet import EngineConfig, SamplingParams
from triolet.aio import engine_of_thread
from triolet.compat import AsyncEngineArgs, AsyncLLM, StatLoggerBase
from triolet.errors import EngineClosed, WrongEventLoop

LONG = SamplingParams(max_tokens=200, seed=3)


@pytest.fixture(autouse=True)
def a_fake_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def open_fake(config: EngineConfig) -> object:
        return fake_engine(FastExecutor(step_s=0.002))

    monkeypatch.setattr("triolet.compat.async_llm.open_engine", open_fake)
    with no_thread_is_left():
        yield


def make() -> AsyncLLM:
    return AsyncLLM.from_engine_args(AsyncEngineArgs(enforce_eager=True))


async def read(engine: AsyncLLM, request_id: str, num_tokens: int = 30) -> tuple[int, ...]:
    params = SamplingParams(max_tokens=num_tokens, seed=3)
    async for output in engine.generate(request_id=request_id, prompt=[1, 2], sampling_params=params):
        if output.finished:
            return tuple(output.outputs[0].token_ids)
    raise AssertionError("the last output is finished")


async def until_idle(engine: AsyncLLM) -> None:
    while engine.has_unfinished_requests():  # noqa: ASYNC110  the time limit of the test ends this
        await asyncio.sleep(0.001)


def test_without_a_scope_the_engine_starts_at_once_and_shutdown_ends_it() -> None:
    async def main() -> None:
        engine = make()
        try:
            assert engine.is_running
            answers = await asyncio.gather(*(read(engine, f"request-{number}") for number in range(3)))
            assert answers == [answer_of([1, 2], 3, 30)] * 3
            await engine.check_health()
            assert (await engine.get_model_config()).max_model_len == 256
        finally:
            engine.shutdown()
        assert engine.errored
        with pytest.raises(EngineClosed, match="has been shut down; make another one"):
            engine.generate([1], LONG)

    asyncio.run(main())


def test_an_engine_that_is_made_before_the_event_loop_starts_with_its_first_use() -> None:
    engine = make()
    assert not engine.is_running

    async def main() -> None:
        assert await read(engine, "first") == answer_of([1, 2], 3, 30)
        await engine.drain(5)
        engine.shutdown()

    asyncio.run(main())


def test_the_scope_of_trio_programs_works_too() -> None:
    async def main() -> None:
        async with make() as engine, engine.generate([1, 2], LONG, "one") as outputs:
            async for _ in outputs:
                break
        assert not engine.is_running
        with pytest.raises(EngineClosed):
            await engine.__aenter__()

    asyncio.run(main())


def test_a_loop_that_is_left_and_a_task_that_is_cancelled_end_their_requests() -> None:
    async def main() -> None:
        engine = make()
        async for _ in engine.generate([1], LONG, "left"):
            break
        gc.collect()
        await until_idle(engine)
        task = asyncio.create_task(read(engine, "cancelled", 200))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await until_idle(engine)
        engine.shutdown()

    asyncio.run(main())


def test_an_abort_ends_a_request_with_the_output_so_far() -> None:
    async def main() -> None:
        engine = make()
        outputs = engine.generate([1], LONG, "mine")
        await anext(outputs)
        await engine.abort("mine")
        last = [output async for output in outputs][-1]
        assert last.outputs[0].finish_reason == "abort"
        engine.shutdown()

    asyncio.run(main())


def test_another_event_loop_is_refused_in_words() -> None:
    engines: list[AsyncLLM] = []

    async def open_only() -> None:
        engines.append(make())

    async def use() -> None:
        await read(engines[0], "elsewhere")

    asyncio.run(open_only())
    with pytest.raises(WrongEventLoop, match="the event loop in which it was opened"):
        asyncio.run(use())
    engines[0].shutdown()


def test_an_engine_that_is_forgotten_ends_its_thread() -> None:
    async def main() -> None:
        engine = make()
        thread = engine._thread
        assert thread is not None
        del engine
        gc.collect()
        await asyncio.wrap_future(thread.ended)
        thread.finish()

    asyncio.run(main())


def test_an_engine_of_triolet_aio_is_wrapped_as_a_native_one_is() -> None:
    async def main() -> None:
        async with engine_of_thread(engine_thread(FastExecutor(step_s=0.002))) as opened:
            async with AsyncLLM.around(opened) as engine:
                assert await read(engine, "r") == answer_of([1, 2], 3, 30)
                await engine.drain(5.0)
            with pytest.raises(EngineClosed):
                engine.generate([1], LONG)
            assert opened.death is None  # it stays open

    asyncio.run(main())


def test_an_engine_that_has_not_begun_is_drained_as_any_other() -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs())

    async def main() -> None:
        await engine.drain(5.0)
        with pytest.raises(EngineClosed):
            await read(engine, "r")
        engine.shutdown()

    asyncio.run(main())


def test_a_logger_that_cannot_be_made_leaves_no_engine_at_its_first_use_either() -> None:
    made: list[StatLoggerBase] = []

    def once_refused(config: EngineConfig, index: int) -> StatLoggerBase:
        made.append(StatLoggerBase(config, index))
        if len(made) == 1:
            raise OSError("no disk")
        return made[-1]

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(), stat_loggers=[StatLoggerBase, once_refused])

    async def main() -> None:
        with pytest.raises(OSError, match="no disk"):
            engine.generate([1], LONG)
        assert not engine.is_running
        assert await read(engine, "r") == answer_of([1, 2], 3, 30)
        assert engine.stat_loggers["1"] is made[-1]
        engine.shutdown()

    asyncio.run(main())
