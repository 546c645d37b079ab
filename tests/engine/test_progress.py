"""Where a request is: its status, its place in the queue, and how far its prompt has come."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.actors.harness import STEP_S, FakeExecutor, answer_of, fake_engine
from triolet import RequestProgress, RequestStatus, SamplingParams
from triolet.core.output.output_processor import MAX_AGE_S, MAX_ENDINGS, EndedRequests
from triolet.core.step_plan import StepPlan
from triolet.engine.engine import Engine
from triolet.errors import EngineDead, InvalidRequest, StreamMisused

SHORT = SamplingParams(max_tokens=3, seed=1)


async def follow(engine: Engine, prompt: list[int], found: list[RequestProgress], priority: int = 0) -> None:
    async with engine.generate(prompt, SHORT, priority=priority) as stream:
        found += [progress async for progress in stream.follow()]
        assert (await stream.text()) != ""


def is_monotone(found: list[RequestProgress]) -> bool:
    positions = [progress.queue_position for progress in found]
    computed = [progress.num_computed_tokens for progress in found]
    return positions == sorted(positions, reverse=True) and computed == sorted(computed)


async def test_a_request_that_waits_comes_nearer_and_stands_at_0_before_its_first_token(
    autojump_clock: MockClock,
) -> None:
    logs: list[list[RequestProgress]] = [[] for _ in range(4)]
    async with fake_engine(max_num_seqs=1) as engine, trio.open_nursery() as nursery:
        for number, log in enumerate(logs):
            nursery.start_soon(follow, engine, [number] * 4, log)
            await trio.testing.wait_all_tasks_blocked()
    for number, log in enumerate(logs):
        assert is_monotone(log)
        assert log[0].queue_position == max(0, number - 1)
        assert [p for p in log if p.num_computed_tokens == 0][-1].queue_position == 0
        assert log[-1] == RequestProgress(
            status=RequestStatus.RUNNING, queue_position=0, num_prompt_tokens=4, num_computed_tokens=4
        )


async def test_a_long_prompt_is_followed_chunk_by_chunk(autojump_clock: MockClock) -> None:
    log: list[RequestProgress] = []
    async with fake_engine(max_num_batched_tokens=16) as engine:
        await follow(engine, [7] * 60, log)
    running = [progress.num_computed_tokens for progress in log if progress.status == "running"]
    assert running == [0, 16, 32, 48, 60]


async def test_a_request_overtaken_or_preempted_is_not_shown_going_back(autojump_clock: MockClock) -> None:
    log: list[RequestProgress] = []
    executor = FakeExecutor(num_blocks=64, block_size=4)
    async with fake_engine(executor, max_num_seqs=1, max_num_batched_tokens=8, policy="priority") as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow, engine, [1] * 40, [])
            await trio.sleep(STEP_S)
            nursery.start_soon(follow, engine, [2] * 40, log, 1)
            await trio.sleep(8 * STEP_S)
            for number in range(3, 6):
                await trio.sleep(STEP_S)
                nursery.start_soon(follow, engine, [number] * 4, [], 0)
        assert engine.statistics().num_preemptions > 0
    assert is_monotone(log)
    assert log[-1].num_computed_tokens == 40


async def test_following_takes_nothing_from_the_reader(autojump_clock: MockClock) -> None:
    log: list[RequestProgress] = []
    async with fake_engine() as engine, engine.generate([3] * 6, SHORT) as stream:
        async with trio.open_nursery() as nursery:

            async def follow_too() -> None:
                log.extend([progress async for progress in stream.follow()])

            nursery.start_soon(follow_too)
            nursery.start_soon(follow_too)
            outputs = [output async for output in stream]
    assert outputs[-1].outputs[0].token_ids == answer_of([3] * 6, 1, 3)
    assert len(log) >= 2


async def test_following_ends_with_the_request(autojump_clock: MockClock) -> None:
    async with fake_engine(max_num_seqs=1) as engine:
        async with engine.generate([1, 2], SamplingParams(max_tokens=100)):
            async with engine.generate([3, 4], request_id="waits") as stream:
                with trio.move_on_after(5 * STEP_S):
                    async for _ in stream.follow():
                        pass
                engine.abort("waits")
                log = [progress async for progress in stream.follow()]
        assert log[-1].status is RequestStatus.CANCELLED
        with pytest.raises(StreamMisused):
            stream.follow()


async def test_an_interval_bounds_how_often_the_progress_is_looked_at(autojump_clock: MockClock) -> None:
    interval = 4 * STEP_S
    times: list[float] = []
    async with fake_engine(max_num_batched_tokens=4) as engine, engine.generate([7] * 60, SHORT) as stream:
        found: list[RequestProgress] = []
        async for progress in stream.follow(interval):
            found.append(progress)
            times.append(trio.current_time())
    assert found[-1].num_computed_tokens == 60
    assert len(times) == 5  # 15 steps of 4 tokens
    assert all(later - earlier >= interval * 0.999 for earlier, later in pairwise(times))


@pytest.mark.parametrize("interval", ["1", True, float("nan")])
async def test_an_interval_is_a_number_of_seconds(interval: Any, autojump_clock: MockClock) -> None:
    async with fake_engine() as engine, engine.generate([7], SHORT) as stream:
        with pytest.raises(InvalidRequest, match="interval must be a number of seconds"):
            stream.follow(interval)


# --------------------------------------------------------------------------------------------- restarts


class CrashesOnce(FakeExecutor):
    """The first step fails, and the next life takes a second to start."""

    async def start(self, on_progress: Any) -> Any:
        if self.num_lives:
            await trio.sleep(1)
        return await super().start(on_progress)

    async def compute(self, plan: StepPlan) -> Any:
        if self.num_lives == 1:
            raise ValueError("planted")
        return await super().compute(plan)


async def test_restarts_are_followed_from_now_on_until_the_engine_ends(autojump_clock: MockClock) -> None:
    early: list[tuple[str, ...]] = []
    late: list[tuple[str, ...]] = []

    async def note(engine: Engine, found: list[tuple[str, ...]]) -> None:
        found += [restarting async for restarting in engine.follow_restarts()]

    async with trio.open_nursery() as nursery:
        async with fake_engine(CrashesOnce(num_blocks=64, block_size=4)) as engine:
            nursery.start_soon(note, engine, early)
            nursery.start_soon(engine.complete, [1, 2], SHORT)
            await trio.sleep(0.5)
            nursery.start_soon(note, engine, late)
            await trio.sleep(5)
        # The scope of the nursery is left only if both iterators have ended.
    assert early[0] == () and early[-1] == ()
    assert late[0] == ("model_runner", "scheduler") and late[-1] == ()
    assert ("model_runner", "scheduler") in early
    assert len(early) <= 5 and len(late) <= 3


async def test_following_restarts_ends_with_the_death_of_the_engine(autojump_clock: MockClock) -> None:
    executor = FakeExecutor(num_blocks=64, block_size=4)

    def crash(plan: StepPlan) -> None:
        raise ValueError("planted")

    executor.before_step = crash
    async with fake_engine(executor) as engine, trio.open_nursery() as nursery:
        found: list[tuple[str, ...]] = []

        async def follow_restarts() -> None:
            found.extend([restarting async for restarting in engine.follow_restarts()])

        nursery.start_soon(follow_restarts)
        with pytest.raises(EngineDead):
            await engine.complete([1, 2], SHORT)
    assert "model_runner" in found[-1]  # it will not serve again
    async with fake_engine() as engine:
        restarts = engine.follow_restarts()
    assert [restarting async for restarting in restarts] == []


# --------------------------------------------------------------------------------------------- statuses


async def test_a_status_goes_from_waiting_over_running_to_its_end(autojump_clock: MockClock) -> None:
    executor = FakeExecutor(num_blocks=64, block_size=4)
    async with fake_engine(executor, max_num_seqs=1) as engine:
        async with engine.generate([1, 2], SHORT, request_id="a") as first:
            async with engine.generate([3, 4], SHORT, request_id="b") as second:
                await anext(first)
                assert (engine.status("a"), engine.status("b")) == ("running", "waiting")
                await first.text()
                await second.text()
        executor.model.failing.add("c")
        with pytest.raises(Exception, match="planted"):
            await engine.complete([5], SHORT, request_id="c")
        async with engine.generate([6], SHORT, request_id="d"):
            pass
        found = {name: engine.status(name) for name in "abcdx"}
        assert found == {"a": "completed", "b": "completed", "c": "failed", "d": "cancelled", "x": None}
        await trio.sleep(MAX_AGE_S + 1)
        assert engine.status("a") is None


def test_endings_are_forgotten_when_they_are_old_or_too_many() -> None:
    endings = EndedRequests()
    for number in range(MAX_ENDINGS + 5):
        endings.remember(str(number), RequestStatus.COMPLETED, 0.0)
    assert len(endings) == MAX_ENDINGS
    assert endings.get("4", 0.0) is None
    assert endings.get("5", MAX_AGE_S) is RequestStatus.COMPLETED
    endings.remember("5", RequestStatus.FAILED, MAX_AGE_S)
    assert endings.get("5", MAX_AGE_S + 1) is RequestStatus.FAILED
    assert len(endings) == 1


# ------------------------------------------------------------------------------------- the prefix cache


async def test_the_prefix_cache_is_reset_only_when_no_block_is_in_use(autojump_clock: MockClock) -> None:
    params = SamplingParams(max_tokens=12, seed=1)
    async with fake_engine() as engine:
        await engine.complete([1] * 20, params)
        assert engine.statistics().kv_blocks_cached > 0
        async with engine.generate([2] * 20, params) as stream:
            await anext(stream)
            assert engine.reset_prefix_cache() is False
            assert engine.reset_prefix_cache(reset_running_requests=True) is True
            output = [output async for output in stream][-1]
        assert output.outputs[0].token_ids == answer_of([2] * 20, 1, 12)
        assert output.metrics.num_preemptions == 1
        assert (await engine.complete([1] * 20, params)).num_cached_tokens == 0
        assert engine.reset_prefix_cache() is True
        assert engine.statistics().kv_blocks_cached == 0


async def test_requests_share_blocks_only_with_the_same_salt(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        found = [
            (await engine.complete([1] * 20, SHORT, cache_salt=salt)).num_cached_tokens
            for salt in ("alice", "bob", None, "alice")
        ]
    assert found == [0, 0, 0, 16]


async def test_an_output_says_how_much_of_its_prompt_was_written_to_the_prefix_cache(
    autojump_clock: MockClock,
) -> None:
    async with fake_engine() as engine:  # blocks of 4
        found = [await engine.complete(prompt, SHORT) for prompt in ([1] * 10, [1] * 10, [1] * 14, [2] * 3)]
        async with engine.generate([3] * 9, SHORT) as stream:
            first = await anext(stream)
    counts = [(output.num_cached_tokens, output.num_cache_creation_tokens) for output in found]
    assert counts == [(0, 8), (8, 0), (8, 4), (0, 0)]
    assert (first.num_cached_tokens, first.num_cache_creation_tokens) == (0, 8)
    async with fake_engine(enable_prefix_caching=False) as engine:
        assert (await engine.complete([1] * 10, SHORT)).num_cache_creation_tokens == 0
