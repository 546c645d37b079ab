"""The table of live requests: what waits and runs, at one moment."""

from __future__ import annotations

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.actors.harness import STEP_S, FakeExecutor, fake_engine
from triolet import SamplingParams
from triolet.core.output.output_processor import LiveRequest
from triolet.engine.engine import Engine
from triolet.errors import InvalidRequest

LONG = SamplingParams(max_tokens=40, seed=1)


def table(engine: Engine) -> dict[str, LiveRequest]:
    return {one.request_id: one for one in engine.requests()}


async def test_the_table_says_where_every_live_request_is(autojump_clock: MockClock) -> None:
    await trio.sleep(1)
    executor = FakeExecutor(num_blocks=64, block_size=4)
    async with fake_engine(executor, max_num_seqs=1, num_scheduler_steps=1) as engine:
        assert engine.requests() == ()
        async with engine.generate([1] * 6, LONG, request_id="runs", client="a") as stream:
            await anext(stream)
            async with (
                engine.generate(
                    [2] * 9, LONG, request_id="next", priority=3, deadline=trio.current_time() + 5
                ),
                engine.generate([3] * 2, attrs.evolve(LONG, n=3), request_id="last"),
            ):
                await trio.sleep(2.5 * STEP_S)
                found = table(engine)
                assert list(found) == ["runs", "next", "last"]
        runs, waits, last = found.values()
        assert engine.requests() == ()
    assert attrs.asdict(runs) == pytest.approx(
        {
            "request_id": "runs",
            "client": "a",
            "priority": 0,
            "status": "running",
            "queue_position": 0,
            "n": 1,
            "num_prompt_tokens": 6,
            "num_cached_tokens": 0,
            "num_computed_tokens": 6,
            "num_output_tokens": 3,
            "num_kv_blocks": 3,
            "num_preemptions": 0,
            "age_s": 3.5 * STEP_S,
            "time_left_s": None,
            "lora_name": None,
        }
    )
    assert (waits.status, waits.queue_position, waits.priority, waits.num_kv_blocks) == ("waiting", 0, 3, 0)
    assert waits.time_left_s == pytest.approx(5 - 2.5 * STEP_S)
    assert (last.n, last.queue_position, last.num_prompt_tokens, last.num_output_tokens) == (3, 1, 2, 0)


async def test_blocks_of_the_table_are_those_in_use(autojump_clock: MockClock) -> None:
    async with fake_engine(FakeExecutor(num_blocks=64, block_size=4)) as engine:
        async with (
            engine.generate([1] * 6, LONG) as first,
            engine.generate([2] * 9, LONG) as second,
        ):
            for _ in range(10):
                await anext(first)
                await anext(second)
                held = sum(one.num_kv_blocks for one in engine.requests())
                assert held == engine.statistics().kv_blocks_in_use > 0


async def test_a_request_on_its_way_in_and_one_that_has_ended(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                await engine.complete("HELLO", LONG, request_id="text")

            nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            assert table(engine)["text"].num_prompt_tokens == 5
            engine.abort("text")
            assert engine.requests() == ()
            nursery.cancel_scope.cancel()


async def test_an_owner_sees_what_is_theirs(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        async with (
            engine.generate([1], LONG, request_id="a", owner="alice"),
            engine.generate([2], LONG, request_id="b", owner="bob", client="alice"),
            engine.generate([3], LONG, request_id="c"),
        ):
            assert [one.request_id for one in engine.requests()] == ["a", "b", "c"]
            assert [one.request_id for one in engine.requests(owner="alice")] == ["a"]
            assert engine.requests(owner="carol") == ()
        with pytest.raises(InvalidRequest, match="owner must be a string"):
            engine.generate([1], owner=5)  # type: ignore[arg-type]


async def test_asking_changes_nothing_of_the_answers(autojump_clock: MockClock) -> None:
    async with fake_engine(max_num_seqs=2) as engine:
        async with engine.generate([1, 2, 3], LONG) as stream:
            outputs = []
            async for output in stream:
                outputs.append(output)
                engine.requests()
        again = await engine.complete([1, 2, 3], LONG)
    assert outputs[-1].outputs[0].token_ids == again.outputs[0].token_ids
