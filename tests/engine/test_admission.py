"""Admission: under which id, up to which limit, and that nothing is held for a rejected request."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.actors.harness import STEP_S, answer_of, assert_all_blocks_back, fake_engine
from triolet import SamplingParams
from triolet.core.output.output_processor import OutputProcessor
from triolet.core.request.request import FinishReason, RequestStatus
from triolet.engine import submission, token_stream
from triolet.errors import (
    InvalidPrompt,
    Overloaded,
    RequestIdInUse,
)

LONG = SamplingParams(max_tokens=100, seed=1)
SHORT = SamplingParams(max_tokens=3, seed=1)


# -------------------------------------------------------------------------------------- request ids


async def test_a_live_requests_id_can_not_be_used_again(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine, engine.generate([1, 2], SHORT, request_id="r") as stream:
        with pytest.raises(RequestIdInUse, match="got 'r'"):
            await engine.complete([1, 2], request_id="r")
        assert len((await anext(stream)).outputs[0].token_ids) == 1


async def test_an_id_is_in_use_while_its_prompt_is_being_tokenised(
    autojump_clock: MockClock, stuck_tokenizer: None
) -> None:
    async with fake_engine() as engine, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: engine.complete("HELLO", request_id="r"))
        await wait_all_tasks_blocked()
        assert engine.status("r") is RequestStatus.WAITING
        with pytest.raises(RequestIdInUse):
            await engine.complete([1, 2], request_id="r")
        nursery.cancel_scope.cancel()


async def test_an_id_is_free_again_as_soon_as_its_request_has_ended(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        async with engine.generate([1, 2], LONG, request_id="r"):
            await trio.sleep(STEP_S)
        async with engine.generate([1, 2], LONG, request_id="r") as second:
            await trio.sleep(5 * STEP_S)
            engine.abort("r")
            async with engine.generate([1, 2], SHORT, request_id="r") as third:
                assert [output.finish_reason async for output in second][-1] is FinishReason.ABORT
                assert [output.finish_reason async for output in third][-1] is FinishReason.LENGTH
                await second.__aexit__(None, None, None)
                assert engine.status("r") is RequestStatus.COMPLETED
        assert_all_blocks_back(engine)


async def test_the_engine_chooses_no_id_that_a_live_request_bears(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        async with engine.generate([1, 2], LONG, request_id="request-1"):
            async with engine.generate([1, 2], SHORT) as stream:
                assert stream.request_id == "request-2"


# --------------------------------------------------------------------------------------- admission


@pytest.mark.parametrize("fails_in", ["outputs", "answers", "recording"])
async def test_an_admission_that_fails_at_its_end_holds_nothing(
    fails_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    opened: list[object] = []

    def fail(*values: Any, **fields: Any) -> Any:
        opened.append(values)
        if fails_in == "outputs" and len(opened) < 3:
            return open_output(*values, **fields)
        raise MemoryError

    open_output = OutputProcessor.open
    target, name = {
        "outputs": (OutputProcessor, "open"),
        "answers": (submission, "collector_of"),
        "recording": (token_stream, "saved_request"),
    }[fails_in]
    async with fake_engine(record=str(tmp_path / "requests.jsonl")) as engine:
        for others_run, name_of_request in ((False, "a"), (True, "b")):
            with monkeypatch.context() as patch:
                async with AsyncExitStack() as stack:
                    if others_run:
                        await stack.enter_async_context(engine.generate([1, 2], LONG))
                        await trio.sleep(3.5 * STEP_S)
                    patch.setattr(target, name, fail)
                    opened.clear()
                    with pytest.raises(MemoryError):
                        await engine.complete(
                            [3, 4], SamplingParams(n=3, max_tokens=3), request_id=name_of_request
                        )
                    await trio.sleep(STEP_S)
                    statistics = engine.statistics()
                    assert statistics.num_requests_live == others_run == len(engine._core.outputs)
                    assert engine.status(name_of_request) is None
            output = await engine.complete([3, 4], SHORT, request_id=name_of_request)
            assert output.outputs[0].token_ids == answer_of([3, 4], 1, 3)
        assert_all_blocks_back(engine)
        statistics = engine.statistics()
        assert statistics.num_requests_received == sum(statistics.num_requests_ended.values())


async def test_as_many_requests_as_run_and_may_wait_are_taken_and_not_one_more(
    autojump_clock: MockClock,
) -> None:
    async with fake_engine(max_num_seqs=1, max_queued_requests=2) as engine:
        streams = [engine.generate([n], LONG) for n in range(3)]
        for stream in streams:
            await stream.__aenter__()
        with pytest.raises(Overloaded, match="max_queued_requests=2") as caught:
            await engine.complete([9], SHORT)
        assert (caught.value.limit, caught.value.bound) == ("max_queued_requests", 2)
        assert caught.value.retry_after_s > 0
        assert engine.statistics().num_requests_live == 3
        await streams[1].__aexit__(None, None, None)
        async with engine.generate([9], SHORT):
            assert engine.statistics().num_requests_live == 3
        for stream in (streams[0], streams[2]):
            await stream.__aexit__(None, None, None)
        await trio.sleep(2 * STEP_S)
        assert_all_blocks_back(engine)


async def test_a_request_that_finds_too_many_waiting_tokens_is_refused(autojump_clock: MockClock) -> None:
    async with fake_engine(max_num_seqs=1, max_queued_tokens=10) as engine:
        async with engine.generate([1] * 30, LONG):
            await trio.sleep(STEP_S / 2)  # it runs, so it does not wait
            async with engine.generate([2] * 9, LONG), engine.generate([3], LONG):
                with pytest.raises(Overloaded, match="max_queued_tokens=10") as caught:
                    await engine.complete([4], SHORT)
                assert caught.value.retry_after_s > 0
                assert engine.statistics().num_requests_live == 3
            async with engine.generate([2] * 9, LONG):
                async with engine.generate([4] * 30, SHORT):  # finds 9
                    assert engine.statistics().num_requests_live == 3
        await trio.sleep(2 * STEP_S)
        assert_all_blocks_back(engine)


async def test_a_request_that_is_being_tokenised_has_a_place_and_gives_it_back_when_cancelled(
    autojump_clock: MockClock, stuck_tokenizer: None
) -> None:
    async with fake_engine(max_num_seqs=1, max_queued_requests=1) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.complete, "HELLO")
            nursery.start_soon(engine.complete, "WORLD")
            await wait_all_tasks_blocked()
            with pytest.raises(Overloaded, match="max_queued_requests=1"):
                await engine.complete([1], SHORT)
            assert engine.statistics().num_requests_live == 0
            nursery.cancel_scope.cancel()
        assert len({(await engine.complete([1], SHORT)).text for _ in range(3)}) == 1
        assert_all_blocks_back(engine)


async def test_a_prompt_that_is_refused_gives_its_place_back(autojump_clock: MockClock) -> None:
    async with fake_engine(max_num_seqs=1, max_queued_requests=1) as engine:
        for _ in range(5):
            with pytest.raises(InvalidPrompt):
                await engine.complete([99], SHORT)
            with pytest.raises(InvalidPrompt, match="could not be tokenized"):
                await engine.complete("panic", SHORT)
        assert (await engine.complete("FINE", SHORT)).finish_reason is FinishReason.LENGTH
        assert_all_blocks_back(engine)


async def test_the_advice_when_to_come_back_is_the_pace_of_recent_endings(autojump_clock: MockClock) -> None:
    async with fake_engine(max_num_seqs=1, max_queued_requests=1) as engine:
        for _ in range(4):
            await engine.complete([1], SHORT)
            await trio.sleep(3)
        async with engine.generate([1], LONG), engine.generate([1], LONG):
            with pytest.raises(Overloaded) as caught:
                await engine.complete([1], SHORT)
    assert caught.value.retry_after_s == pytest.approx(3, abs=0.1)
