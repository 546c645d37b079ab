"""`triolet.aio`: the promises of native streams hold under asyncio; the fake model's answers are the oracle."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import wraps
from math import inf
from typing import Any

import pytest
import trio

import triolet
from tests.actors.harness import answer_of
from tests.bridge.harness import FastExecutor, assert_nothing_is_held, engine_thread, no_thread_is_left
from triolet import SamplingParams, aio
from triolet.aio import AsyncioEngine, AsyncioTokenStream
from triolet.blocking import BlockingEngine, BlockingTokenStream
from triolet.bridge.engine_thread import EngineThread
from triolet.core.request.request import RequestStatus
from triolet.errors import (
    ConfigError,
    EngineClosed,
    EngineDead,
    InvalidRequest,
    RequestFailed,
    RequestIdInUse,
    StreamMisused,
    WrongEventLoop,
)

LONG = SamplingParams(max_tokens=200, seed=3)


def in_asyncio(function: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that runs under `asyncio.run`, and leaves no task and no thread of the engine behind."""

    @wraps(function)
    def test(*args: object, **kwargs: object) -> None:
        async def run() -> None:
            await asyncio.wait_for(function(*args, **kwargs), 300)
            assert asyncio.all_tasks() == {asyncio.current_task()}

        with no_thread_is_left():
            asyncio.run(run())

    return test


@asynccontextmanager
async def opened(executor: FastExecutor | None = None, **fields: object) -> AsyncGenerator[AsyncioEngine]:
    async with aio.engine_of_thread(engine_thread(executor, **fields)) as engine:
        yield engine
        if engine.death is None:
            await assert_nothing_is_held(engine)


@contextmanager
def nothing_is_logged() -> Iterator[None]:
    """Check that asyncio had no error to log, such as one of a future that was not awaited."""
    logged: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: logged.append(context))
    yield
    gc.collect()  # with the future its error is logged
    loop.set_exception_handler(None)
    assert logged == []


def params(num_tokens: int, seed: int = 3) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, seed=seed)


async def read(stream: AsyncioTokenStream) -> tuple[int, ...]:
    token_ids: tuple[int, ...] = ()
    async for output in stream:
        token_ids = tuple(output.outputs[0].token_ids)
    return token_ids


@in_asyncio
async def test_a_stream_gives_every_token_in_order() -> None:
    async with opened() as engine, engine.generate([1, 2, 3], params(40)) as stream:
        seen = [output.outputs[0].token_ids async for output in stream]
        answer = answer_of([1, 2, 3], 3, 40)
        assert all(token_ids == answer[: len(token_ids)] for token_ids in seen)
        assert [len(token_ids) for token_ids in seen] == sorted({len(token_ids) for token_ids in seen})
        assert seen[-1] == answer
        assert engine.status(stream.request_id) is RequestStatus.COMPLETED


@in_asyncio
async def test_a_whole_answer_is_one_output() -> None:
    async with opened() as engine:
        output = await engine.complete([5, 6], params(12))
        assert output.finished
        assert output.outputs[0].token_ids == answer_of([5, 6], 3, 12)


@in_asyncio
async def test_the_text_has_the_part_that_was_read_before() -> None:
    async with opened() as engine, engine.generate([7], params(20)) as stream:
        async for _ in stream:
            break
        assert await stream.text() == "".join(chr(65 + token) for token in answer_of([7], 3, 20))


@in_asyncio
async def test_leaving_the_scope_early_frees_the_blocks_before_the_scope_is_left() -> None:
    async with opened() as engine:
        async with engine.generate([1], LONG) as stream:
            async for _ in stream:
                break
        await assert_nothing_is_held(engine)


@in_asyncio
async def test_cancelling_a_task_frees_its_blocks_before_the_task_has_ended() -> None:
    executor = FastExecutor(step_s=0.005)
    async with opened(executor) as engine:
        begun = asyncio.Event()

        async def client() -> None:
            async with engine.generate([1], LONG) as stream:
                async for _ in stream:
                    begun.set()

        task = asyncio.create_task(client())
        await begun.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await assert_nothing_is_held(engine)


@in_asyncio
async def test_a_second_cancellation_does_not_leave_the_scope_behind() -> None:
    async with opened(FastExecutor(step_s=0.005)) as engine:

        async def client() -> None:
            async with engine.generate([1], LONG) as stream:
                await read(stream)

        task = asyncio.create_task(client())
        await asyncio.sleep(0.02)
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)
        assert task.cancelled()
        await assert_nothing_is_held(engine)


@in_asyncio
async def test_a_timeout_ends_a_whole_answer_and_frees_its_blocks() -> None:
    async with opened(FastExecutor(step_s=0.01)) as engine:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await engine.complete([1], LONG)
        await assert_nothing_is_held(engine)


@in_asyncio
async def test_a_call_that_is_cancelled_leaves_no_error_to_be_logged() -> None:
    with nothing_is_logged():
        async with opened(FastExecutor(step_s=0.01)) as engine, engine.generate([1], LONG):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.03):
                    await engine.pause_generation("wait")
            engine.resume_generation()


@in_asyncio
async def test_a_request_that_waits_for_admission_can_be_cancelled() -> None:
    async with opened(FastExecutor(step_s=0.01), max_num_seqs=1, max_queued_requests=8) as engine:
        async with engine.generate([1], LONG):
            task = asyncio.create_task(engine.complete([2], LONG))
            await asyncio.sleep(0.03)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            assert engine.statistics().num_requests_live == 1


@in_asyncio
async def test_a_slow_reader_loses_no_token_and_holds_few_outputs() -> None:
    async with opened(max_num_seqs=2) as engine, engine.generate([4], params(150)) as stream:
        await asyncio.sleep(0.2)  # far longer than the fake model needs
        assert len(stream._remote._items) <= 8
        assert await read(stream) == answer_of([4], 3, 150)


@in_asyncio
async def test_an_abort_gives_the_output_so_far() -> None:
    async with opened(FastExecutor(step_s=0.002)) as engine:
        async with engine.generate([1], LONG, request_id="mine") as stream:
            async for _ in stream:
                engine.abort("mine")
                break
            last = [output async for output in stream][-1]
        assert last.outputs[0].finish_reason == "abort"
        tokens = last.outputs[0].token_ids
        assert tokens == answer_of([1], 3, 200)[: len(tokens)]


@in_asyncio
async def test_a_deadline_is_in_the_time_of_the_event_loop() -> None:
    async with opened(FastExecutor(step_s=0.01)) as engine:
        deadline = asyncio.get_running_loop().time() + 0.1
        output = await engine.complete([1], LONG, deadline=deadline)
        assert output.outputs[0].finish_reason == "deadline"
        assert asyncio.get_running_loop().time() >= deadline


@in_asyncio
async def test_a_deadline_does_not_move_while_a_stream_is_not_entered() -> None:
    async with opened() as engine:
        loop = asyncio.get_running_loop()
        stream = engine.generate([1], LONG, deadline=loop.time() + 0.5)
        await asyncio.sleep(0.6)  # until it is over
        async with stream:
            [output] = [output async for output in stream]
        assert output.outputs[0].finish_reason == "deadline"
        assert output.outputs[0].token_ids == ()


@in_asyncio
async def test_progress_can_be_followed_while_the_stream_is_read() -> None:
    async with (
        opened(FastExecutor(step_s=0.002)) as engine,
        engine.generate(list(range(40)), params(3)) as stream,
    ):
        followed = [progress async for progress in stream.follow()]
        computed = [progress.num_computed_tokens for progress in followed]
        assert computed == sorted(computed)
        assert computed[-1] == 40
        assert await read(stream) == answer_of(list(range(40)), 3, 3)


@in_asyncio
async def test_leaving_a_stream_ends_its_followers() -> None:
    async with opened(FastExecutor(step_s=0.01), max_num_seqs=1) as engine, engine.generate([1], LONG):
        async with engine.generate([2], LONG) as stream:
            follower = stream.follow()
            await anext(follower)
        async for _ in follower:  # ends: the engine is open, and has no more to tell of it
            pass
        assert engine.is_open


@in_asyncio
async def test_errors_of_a_request_are_raised_where_its_scope_is_entered() -> None:
    async with opened(FastExecutor(step_s=0.005)) as engine:
        with pytest.raises(InvalidRequest, match="prompt"):
            async with engine.generate(7):  # type: ignore[arg-type]
                pass
        with pytest.raises(InvalidRequest, match="sampling_params"):
            await engine.complete([1], {"max_tokens": 3})  # type: ignore[arg-type]
        async with engine.generate([1], LONG, request_id="twice"):
            with pytest.raises(RequestIdInUse):
                async with engine.generate([1], LONG, request_id="twice"):
                    pass
        assert (await engine.complete([1], params(3))).finished


@in_asyncio
async def test_a_stream_is_read_inside_of_its_scope_once_by_one_task() -> None:
    async with opened(FastExecutor(step_s=0.005)) as engine:
        stream = engine.generate([1], LONG)
        with pytest.raises(StreamMisused, match="inside"):
            await anext(stream)
        async with stream:
            task = asyncio.create_task(read(stream))
            await asyncio.sleep(0)
            with pytest.raises(StreamMisused, match="one reader"):
                await anext(stream)
            with pytest.raises(StreamMisused, match="entered once"):
                await stream.__aenter__()
        with pytest.raises(StreamMisused, match="inside"):  # the other task's scope has been left under it
            await task


def test_an_engine_belongs_to_its_event_loop() -> None:
    async def open_only() -> tuple[AsyncioEngine, Any]:
        scope = opened()
        return await scope.__aenter__(), scope

    with asyncio.Runner() as first, asyncio.Runner() as second:
        engine, scope = first.run(open_only())
        with pytest.raises(WrongEventLoop, match="the event loop in which it was opened"):
            second.run(engine.complete([1], params(3)))
        assert first.run(engine.complete([1], params(3))).finished
        first.run(scope.__aexit__(None, None, None))


@in_asyncio
async def test_an_engine_is_closed_once_its_scope_has_ended() -> None:
    async with opened() as engine:
        stream = engine.generate([1], LONG)
    with pytest.raises(EngineClosed):
        engine.statistics()
    with pytest.raises(EngineClosed):
        await engine.complete([1], params(3))
    with pytest.raises(EngineClosed):
        async with stream:
            pass


@in_asyncio
async def test_closing_the_engine_ends_its_streams_with_the_output_so_far() -> None:
    async with aio.engine_of_thread(engine_thread(FastExecutor(step_s=0.005))) as engine:
        stream = await engine.generate([1], LONG).__aenter__()
        await anext(stream)
        task = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
    tokens = await task
    assert 0 < len(tokens) < 200
    assert tokens == answer_of([1], 3, 200)[: len(tokens)]
    await stream.__aexit__(None, None, None)


@in_asyncio
async def test_a_drain_returns_what_another_engine_resumes() -> None:
    answer = answer_of([1, 2], 3, 200)
    async with aio.engine_of_thread(engine_thread(FastExecutor(step_s=0.005))) as first:
        async with first.generate([1, 2], LONG, request_id="moved") as stream:
            await anext(stream)
            snapshot = await first.drain(asyncio.get_running_loop().time() + 0.05)
            part = await read(stream)
    assert part == answer[: len(part)]
    async with opened() as second:
        (resumed,) = second.resume(snapshot).values()
        async with resumed:
            assert await read(resumed) == answer


@pytest.mark.parametrize(
    ("native", "ours"),
    [
        (triolet.Engine, AsyncioEngine),
        (triolet.TokenStream, AsyncioTokenStream),
        (triolet.Engine, BlockingEngine),
        (triolet.TokenStream, BlockingTokenStream),
    ],
)
def test_every_public_name_of_the_native_engine_and_stream_is_there(native: type, ours: type) -> None:
    names = {name for name in dir(native) if not name.startswith("_")}
    names.discard("encode")  # one pooled request is `encode_all` of one prompt: its stream has one output
    names.discard("plan_scoring")  # for routes that run beside the engine; `score` is for all others
    assert names <= set(dir(ours))


@in_asyncio
async def test_restarts_can_be_followed() -> None:
    executor = FastExecutor(step_s=0.001)
    crashes = iter([RuntimeError("planted")])

    def crash_once(plan: object) -> None:
        for crash in crashes:
            raise crash

    async with opened(executor) as engine:
        followed = engine.follow_restarts()
        assert await anext(followed) == ()
        executor.before_step = crash_once
        assert (await engine.complete([1], params(5))).outputs[0].token_ids == answer_of([1], 3, 5)
        assert "model_runner" in await anext(followed)
        followed.close()


@in_asyncio
async def test_the_verbs_for_adapters_answer_as_those_of_the_native_engine() -> None:
    adapter = triolet.LoRARequest("tiny", 1, "/nowhere")
    async with opened(FastExecutor(step_s=0.001)) as engine:
        assert (engine.list_loras(), engine.loras(), engine.remove_lora(1)) == (set(), (), False)
        for asked in (
            engine.add_lora(adapter),
            engine.pin_lora(1),
            engine.complete([1], params(1), lora=adapter),
        ):
            with pytest.raises(InvalidRequest, match=r"(?i)lora"):
                await asked


@in_asyncio
async def test_an_engine_that_cannot_be_opened_tells_why() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        async with aio.open_engine(max_num_seqs=0):
            pass


@in_asyncio
async def test_a_trio_run_that_cannot_begin_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(*args: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("triolet.bridge.engine_thread.trio.run", no_descriptor)
    with pytest.raises(OSError, match="Too many open files"):
        async with aio.open_engine():
            pass


@in_asyncio
async def test_opening_can_be_cancelled() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    @asynccontextmanager
    async def never_opens() -> AsyncGenerator[triolet.Engine]:
        loop.call_soon_threadsafe(begun.set)
        try:
            await trio.sleep(inf)
            async with triolet.open_engine() as engine:
                yield engine
        finally:
            loop.call_soon_threadsafe(ended.set)

    async def client() -> None:
        async with aio.engine_of_thread(EngineThread(never_opens)):
            pass

    with nothing_is_logged():
        task = asyncio.create_task(client())
        await begun.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await ended.wait()
        del task  # which holds what it has waited for


@in_asyncio
async def test_the_death_of_an_engine_reaches_its_streams() -> None:
    executor = FastExecutor()

    def crash(plan: object) -> None:
        raise RuntimeError("planted")

    async with aio.engine_of_thread(engine_thread(executor)) as engine:
        executor.before_step = crash
        with pytest.raises(EngineDead):
            await engine.complete([1], params(5))


@in_asyncio
async def test_under_asyncio_the_native_engine_names_the_bridge() -> None:
    with pytest.raises(WrongEventLoop, match=r"triolet\.aio\.open_engine"):
        async with triolet.open_engine():
            pass


@in_asyncio
async def test_beam_search_is_refused_before_anything_is_asked() -> None:
    async with opened() as engine:
        native: Any = engine
        with pytest.raises(WrongEventLoop, match="beam_search needs Trio's event loop"):
            await triolet.beam_search(native, [1], triolet.BeamSearchParams(beam_width=2, max_tokens=3))
        assert engine.statistics().num_requests_ended == {}


@in_asyncio
async def test_the_answers_of_a_beam_search_are_those_of_the_native_engine() -> None:
    asked = triolet.BeamSearchParams(beam_width=2, max_tokens=3)

    async def native() -> triolet.BeamSearchOutput:
        async with triolet.open_engine(runner="inline", num_kv_blocks=64) as engine:
            found = await engine.beam_search("Once upon a time", asked)
            assert found == await triolet.beam_search(engine, "Once upon a time", asked)
            return found

    async with aio.open_engine(runner="inline", num_kv_blocks=64) as engine:
        deadline = asyncio.get_running_loop().time() + 60
        found = await engine.beam_search("Once upon a time", asked, deadline=deadline)
        with pytest.raises(RequestFailed):
            await engine.beam_search("Once upon a time", asked, deadline=deadline - 60)
    wanted = await asyncio.to_thread(trio.run, native)
    assert [beam.tokens for beam in found.sequences] == [beam.tokens for beam in wanted.sequences]
    assert len(found.sequences) == 2


@in_asyncio
async def test_embeddings_are_those_of_the_native_engine() -> None:
    prompts = ["Once upon a time", "Hello"]

    async def native() -> list[list[float]]:
        async with triolet.open_engine(runner="inline", num_kv_blocks=64, convert="embed") as engine:
            return [output.outputs.embedding for output in await engine.embed(prompts)]

    async with aio.open_engine(runner="inline", num_kv_blocks=64, convert="embed") as engine:
        deadline = asyncio.get_running_loop().time() + 60
        found = await engine.embed(prompts, deadline=deadline)
        assert len(await engine.encode_all(prompts)) == 2
        task = asyncio.create_task(engine.embed(prompts * 20))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert engine.statistics().num_requests_live == 0
    wanted = await asyncio.to_thread(trio.run, native)
    assert [output.outputs.embedding for output in found] == wanted


async def test_under_trio_the_native_engine_is_given() -> None:
    async with aio.open_engine(runner="inline", num_kv_blocks=64) as engine:
        native: object = engine
        assert isinstance(native, triolet.Engine)


async def stay(engine: AsyncioEngine, dice: random.Random) -> None:
    prompt, seed, length = [dice.randrange(50) for _ in range(dice.randint(1, 12))], dice.randrange(9), 12
    async with engine.generate(prompt, params(length, seed)) as stream:
        assert await read(stream) == answer_of(prompt, seed, length)


async def leave_early(engine: AsyncioEngine, dice: random.Random) -> None:
    async with engine.generate([dice.randrange(50)], LONG) as stream:
        async for _ in stream:
            if dice.random() < 0.3:
                return


async def is_cancelled(engine: AsyncioEngine, dice: random.Random) -> None:
    task = asyncio.create_task(leave_early(engine, dice) if dice.random() < 0.5 else stay(engine, dice))
    for _ in range(dice.randrange(12)):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("num_requests", [192, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_streams_that_are_left_and_cancelled_at_random_leave_nothing(num_requests: int) -> None:
    ways: list[Callable[[AsyncioEngine, random.Random], Awaitable[None]]] = [stay, leave_early, is_cancelled]

    async def main() -> None:
        dice = random.Random(0)
        async with opened(max_num_seqs=16, max_queued_requests=200) as engine:

            async def client(number: int) -> None:
                own = random.Random(number)
                for _ in range(num_requests // 64):
                    await own.choice(ways)(engine, own)

            async with asyncio.TaskGroup() as clients:
                for _ in range(64):
                    clients.create_task(client(dice.randrange(2**32)))
            await assert_nothing_is_held(engine)
        gc.collect()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with no_thread_is_left():
        asyncio.run(main())
