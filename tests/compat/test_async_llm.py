"""vLLM's `AsyncLLM` over an engine with the fake model: its methods, and what becomes of a request that is left."""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock

from tests.actors.harness import STEP_S, FakeExecutor, answer_of, assert_all_blocks_back, fake_engine
from triolet import EngineStatistics
from triolet.compat import (
    AsyncLLM,
    AsyncLLMEngine,
    EngineDeadError,
    RequestManager,
    RequestOutput,
    SamplingParams,
    StreamingRequest,
    stream_generate,
)
from triolet.config.engine import EngineConfig
from triolet.core.metrics.iteration_stats import IterationStats
from triolet.core.request.request import FinishReason
from triolet.errors import (
    EngineClosed,
    InvalidRequest,
    RequestIdInUse,
    StreamMisused,
    UnsupportedFeature,
)

PROMPT = {"prompt_token_ids": [1, 2, 3]}
LONG = SamplingParams(max_tokens=100, seed=1)
SHORT = SamplingParams(max_tokens=4, seed=1)


@asynccontextmanager
async def face(executor: FakeExecutor | None = None, **fields: Any) -> AsyncGenerator[AsyncLLM]:
    async with fake_engine(executor, **fields) as engine:
        async with AsyncLLM.around(engine) as llm:
            yield llm
            await trio.sleep(2 * STEP_S)
            assert_all_blocks_back(engine)


async def test_outputs_come_as_from_the_engine(autojump_clock: MockClock) -> None:
    async with face() as llm:
        async with llm.generate(PROMPT, SHORT, "r") as outputs:
            found = [output async for output in outputs]
        assert [len(output.outputs[0].token_ids) for output in found] == [1, 2, 3, 4]
        assert found[-1].request_id == "r"
        assert found[-1].outputs[0].token_ids == answer_of([1, 2, 3], 1, 4)


# ------------------------------------------------------------------------------- a loop without a scope


async def loop_to_the_end(llm: AsyncLLM) -> None:
    async for _ in llm.generate(PROMPT, SHORT, "r"):
        pass


async def loop_until_break(llm: AsyncLLM) -> None:
    async for _ in llm.generate(PROMPT, LONG, "r"):
        break


async def loop_until_an_exception(llm: AsyncLLM) -> None:
    try:
        async for _ in llm.generate(PROMPT, LONG, "r"):
            raise ZeroDivisionError
    except ZeroDivisionError:
        return


async def loop_until_cancelled_amid_waiting(llm: AsyncLLM) -> None:
    with trio.move_on_after(2.5 * STEP_S):
        async for _ in llm.generate(PROMPT, LONG, "r"):
            pass


async def loop_until_cancelled_amid_its_body(llm: AsyncLLM) -> None:
    with trio.move_on_after(2.5 * STEP_S):
        async for _ in llm.generate(PROMPT, LONG, "r"):
            await trio.sleep_forever()


async def close_by_hand(llm: AsyncLLM) -> None:
    outputs = llm.generate(PROMPT, LONG, "r")
    await anext(outputs)
    await outputs.aclose()
    await outputs.aclose()


@pytest.mark.parametrize(
    "leave",
    [
        loop_to_the_end,
        loop_until_break,
        loop_until_an_exception,
        loop_until_cancelled_amid_waiting,
        loop_until_cancelled_amid_its_body,
        close_by_hand,
    ],
)
async def test_a_loop_that_is_left_ends_its_request_without_the_garbage_collector(
    leave: Callable[[AsyncLLM], Awaitable[None]], autojump_clock: MockClock
) -> None:
    gc.disable()
    try:
        async with face() as llm:
            await leave(llm)
            await trio.sleep(STEP_S)
            assert llm.engine.statistics().num_requests_live == 0
            assert llm.get_request_status("r") in ("completed", "cancelled")
    finally:
        gc.enable()


async def test_an_iterator_that_was_never_begun_asks_for_nothing(autojump_clock: MockClock) -> None:
    async with face() as llm:
        outputs = llm.generate(PROMPT, LONG, "r")
        assert llm.get_request_status("r") is None
        del outputs
        assert not llm.has_unfinished_requests()


# ---------------------------------------------------------------------------------------------- requests


async def test_an_abort_ends_the_stream_with_what_there_is(autojump_clock: MockClock) -> None:
    async with face() as llm:
        async with llm.generate(PROMPT, LONG, "r") as outputs:
            await anext(outputs)
            await llm.abort(["r", "unknown"])
            last = [output async for output in outputs][-1]
        await llm.abort("r")
        assert last.finish_reason is FinishReason.ABORT
        assert llm.get_request_status("r") == "cancelled"


async def test_a_request_may_be_added_first_and_read_later(autojump_clock: MockClock) -> None:
    async with face() as llm:
        outputs = await llm.add_request("r", PROMPT, SHORT, priority=1)
        assert llm.get_num_unfinished_requests() == 1
        with pytest.raises(RequestIdInUse):
            await llm.add_request("r", PROMPT, SHORT)
        with pytest.raises(TypeError, match="request_id must be a string, got <class 'float'>"):
            await llm.add_request(3.5, PROMPT, SHORT)  # type: ignore[arg-type]
        assert len([output async for output in outputs]) == 4


async def test_a_second_reader_is_refused_and_the_first_one_reads_on(autojump_clock: MockClock) -> None:
    async with fake_engine() as native, AsyncLLM.around(native) as llm:
        async with llm.generate([1, 2], SamplingParams(max_tokens=9, seed=3), "r") as outputs:
            read: list[RequestOutput] = []

            async def read_all() -> None:
                async for output in outputs:
                    read.append(output)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read_all)
                await trio.sleep(STEP_S / 2)
                with pytest.raises(StreamMisused, match="another task is waiting"):
                    await anext(outputs)
        assert read[-1].outputs[0].token_ids == answer_of([1, 2], 3, 9)


async def test_what_was_added_and_never_read_ends_with_the_scope(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        async with AsyncLLM.around(engine) as llm:
            kept = await llm.add_request("r", PROMPT, LONG)
            async for _ in (outputs := llm.generate(PROMPT, LONG, "s")):
                break
            assert engine.statistics().num_requests_live == 2
        assert engine.statistics().num_requests_live == 0
        assert (kept.request_id, outputs.request_id) == ("r", "s")


async def test_pieces_of_text_add_up_to_the_answer(autojump_clock: MockClock) -> None:
    text = "".join(chr(65 + token_id) for token_id in answer_of([0, 1, 2], 1, 4))
    async with face() as llm:
        assert [piece async for piece in llm.stream_generate("ABC", SHORT, "r")] == list(text)
        async with stream_generate(llm, "ABC", SHORT) as pieces:
            assert "".join([piece async for piece in pieces]) == text


async def test_a_manager_adds_aborts_and_tells_where_a_request_is(autojump_clock: MockClock) -> None:
    async with face() as llm:
        manager = RequestManager(llm)
        assert await manager.get_request_status("r") is None
        outputs = await manager.add_request(
            StreamingRequest(request_id="r", prompt=PROMPT, sampling_params=LONG)
        )
        assert await manager.get_request_status("r") == "waiting"
        await anext(outputs)
        assert await manager.get_request_status("r") == "running"
        await manager.abort_request("r")
        assert [output.finished async for output in outputs][-1]
        assert await manager.get_request_status("r") == "cancelled"
        with pytest.raises(UnsupportedFeature, match="arrival_time"):
            await manager.add(StreamingRequest(request_id="s", prompt=PROMPT, arrival_time=1.0))


async def test_a_salt_may_come_in_the_prompt(autojump_clock: MockClock) -> None:
    prompt = {"prompt_token_ids": [1] * 20}
    async with face() as llm:
        found = []
        for salt in ("a", "b", "a"):
            outputs = [output async for output in llm.generate({**prompt, "cache_salt": salt}, SHORT)]
            found.append(outputs[-1].num_cached_tokens)
        assert found == [0, 0, 16]
        with pytest.raises(InvalidRequest, match="cache_salt"):
            llm.generate({**prompt, "cache_salt": "a"}, SHORT, cache_salt="b")


async def test_what_has_a_value_and_is_not_honoured_is_refused(autojump_clock: MockClock) -> None:
    async with face() as llm:
        for name, error, rule in (
            ("lora_request", InvalidRequest, "must be a LoRARequest"),
            ("prompt_adapter_request", InvalidRequest, "must be a PromptAdapterRequest"),
            ("tokenization_kwargs", UnsupportedFeature, "tokenization_kwargs is not offered"),
        ):
            given: dict[str, Any] = {name: {"a": "b"}}
            with pytest.raises(error, match=rule):
                llm.generate(PROMPT, SHORT, "r", **given)
        async for _ in llm.generate(PROMPT, SHORT, "r", lora_request=None, trace_headers=None):
            pass
        with pytest.raises(TypeError, match="best_of"):
            llm.generate(PROMPT, SHORT, "r", best_of=1)
        with pytest.raises(ValueError, match="data_parallel_rank"):
            llm.generate(PROMPT, SHORT, "r", data_parallel_rank=1)


# -------------------------------------------------------------------------------------- life and numbers


@attrs.define(eq=False)
class Notes:
    iterations: list[IterationStats] = attrs.field(factory=list)

    def record(self, statistics: EngineStatistics, iteration: IterationStats) -> None:
        self.iterations.append(iteration)

    def log(self) -> None:
        pass


async def test_loggers_are_added_and_removed_by_name(autojump_clock: MockClock) -> None:
    notes = Notes()
    async with face() as llm:
        llm.add_logger("notes", notes)
        with pytest.raises(KeyError, match="already exists"):
            llm.add_logger("notes", notes)
        await loop_to_the_end(llm)
        await llm.do_log_stats()
        llm.remove_logger("notes")
        with pytest.raises(KeyError, match="does not exist"):
            llm.remove_logger("notes")
        await loop_to_the_end(llm)
    assert sum(iteration.num_generation_tokens for iteration in notes.iterations) == 4


async def test_outside_of_its_scope_it_takes_nothing(autojump_clock: MockClock) -> None:
    llm = AsyncLLM(EngineConfig())
    assert (llm.is_running, llm.errored, llm.is_stopped) == (False, True, True)
    with pytest.raises(EngineClosed):
        llm.generate(PROMPT, SHORT, "r")
    with pytest.raises(EngineClosed):
        llm.start_background_loop()
    async with face() as llm:
        assert (llm.is_running, llm.errored) == (True, False)
        await llm.check_health()
        with pytest.raises(RuntimeError, match="already running"):
            llm.start_background_loop()
    assert not llm.is_running
    with pytest.raises(EngineClosed):
        llm.generate(PROMPT, SHORT, "r")


async def test_a_shutdown_ends_what_there_is_and_a_drain_lets_it_finish(autojump_clock: MockClock) -> None:
    async with face() as llm:
        async with llm.generate(PROMPT, LONG, "r") as outputs:
            await anext(outputs)
            llm.shutdown_background_loop()
            assert [output.finish_reason async for output in outputs][-1] is FinishReason.SHUTDOWN
        assert not llm.is_running
    async with face() as llm, llm.generate(PROMPT, SHORT, "r") as outputs:
        await llm.drain(1.0)
        assert [output.finish_reason async for output in outputs][-1] is FinishReason.LENGTH


async def test_a_dead_engine_says_what_it_died_of(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine, AsyncLLM.around(engine) as llm:
        engine._die(OSError("planted"))
        assert (llm.is_running, llm.errored) == (False, True)
        assert isinstance(llm.dead_error, EngineDeadError)
        assert isinstance(llm.dead_error.__cause__, OSError)
        with pytest.raises(EngineDeadError):
            await llm.check_health()
        with pytest.raises(EngineDeadError, match="planted"):
            await loop_to_the_end(llm)


async def test_configurations_can_be_read(autojump_clock: MockClock) -> None:
    async with face(max_num_seqs=3, policy="priority") as llm:
        model, scheduler = await llm.get_model_config(), await llm.get_scheduler_config()
        assert (model.max_model_len, model.get_vocab_size(), model.served_model_name) == (
            256,
            50,
            "triolet-nano",
        )
        assert (scheduler.max_num_seqs, scheduler.policy) == (3, "priority")
        assert (await llm.get_parallel_config()).world_size == 1
        lora: object = await llm.get_lora_config()
        assert lora is None
        assert (await llm.get_vllm_config()) is llm.vllm_config
        assert await llm.get_supported_tasks() == ("generate",)
        assert llm.get_tokenizer().decode([0, 1]) == "AB"
        assert llm.get_tokenizer().encode("AB") == [0, 1]
        for answer in (llm.is_sleeping, llm.is_paused, llm.is_tracing_enabled):
            assert await answer() is False
        assert await llm.reset_prefix_cache() is True


def test_the_old_name_is_the_same_class() -> None:
    assert AsyncLLMEngine is AsyncLLM


async def test_a_stat_logger_that_cannot_be_made_leaves_no_engine_open() -> None:
    def factory(config: EngineConfig, index: int) -> Any:
        raise ValueError("no logger")

    config = EngineConfig(max_model_len=64, runner="inline")
    llm = AsyncLLM(config, stat_loggers=[factory])
    with pytest.raises(ValueError, match="no logger"):
        async with llm:
            pass
    assert not llm.is_running
    tasks = trio.lowlevel.current_task().parent_nursery
    assert tasks is not None
    assert len(tasks.child_tasks) == 1
    async with AsyncLLM(config) as other:
        assert other.is_running
