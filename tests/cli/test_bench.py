"""`triolet bench`: what it counts, over the fake engine on virtual time."""

from __future__ import annotations

import pytest
from trio.testing import MockClock

from tests.actors.harness import STEP_S, FakeExecutor, assert_all_blocks_back, fake_engine
from triolet.cli.bench import Work, lines, measure, percentiles_ms


async def test_every_token_and_every_wait_is_counted(autojump_clock: MockClock) -> None:
    work = Work(num_prompts=6, input_len=5, output_len=4, concurrency=2)
    async with fake_engine(FakeExecutor(num_blocks=64, block_size=4)) as engine:
        times = await measure(engine, work)
        assert_all_blocks_back(engine)
    assert times.num_output_tokens == 6 * 4
    assert len(times.ttft_s) == 6
    assert times.itl_s == pytest.approx([STEP_S] * 18)
    # Three rounds of two: each takes a step for the prompt and its first token, and three for the others.
    assert times.total_s == pytest.approx(3 * 4 * STEP_S)


async def test_the_summary_is_rates_per_second_and_waits_in_milliseconds(autojump_clock: MockClock) -> None:
    work = Work(num_prompts=2, input_len=5, output_len=4, concurrency=2)
    async with fake_engine() as engine:
        times = await measure(engine, work)
    summary = times.summary(work)
    assert summary["output_throughput"] == pytest.approx(8 / times.total_s, rel=1e-3)
    assert summary["total_token_throughput"] == pytest.approx(18 / times.total_s, rel=1e-3)
    assert summary["itl_ms"] == dict.fromkeys(("p50", "p90", "p99"), pytest.approx(1e3 * STEP_S))
    assert lines("m", summary)[0] == "m: 2 prompts of 5 tokens, answers of 4, 2 at a time"


def test_a_percentile_is_a_value_that_was_measured() -> None:
    assert percentiles_ms([0.004, 0.001, 0.003, 0.002]) == {"p50": 2.0, "p90": 4.0, "p99": 4.0}
    assert percentiles_ms([]) == {}
