"""Stat loggers: told of every step, asked for a line every ten seconds of work, and never a danger."""

from __future__ import annotations

import logging
import re

import attrs
import pytest
import trio
from trio.testing import MockClock

from tests.actors import harness
from tests.actors.harness import STEP_S, FakeExecutor, Panic, answer_of, fake_engine
from tests.core.fake_model import REPETITIVE
from triolet import EngineStatistics, SamplingParams
from triolet.core.engine_core import EngineCore
from triolet.core.metrics.iteration_stats import IterationStats


@attrs.define(eq=False)
class Notes:
    """A stat logger that remembers everything."""

    iterations: list[IterationStats] = attrs.field(factory=list)
    num_lines: int = 0

    def record(self, statistics: EngineStatistics, iteration: IterationStats) -> None:
        self.iterations.append(iteration)

    def log(self) -> None:
        self.num_lines += 1


class Broken:
    def record(self, statistics: EngineStatistics, iteration: IterationStats) -> None:
        raise Panic("in a logger")

    def log(self) -> None:
        raise AssertionError("asked again after a failure")


async def test_a_logger_is_told_of_every_token_until_it_is_removed(autojump_clock: MockClock) -> None:
    notes = Notes()
    async with fake_engine() as engine:
        engine.add_stat_logger(notes)
        await engine.complete([1, 2, 3], SamplingParams(max_tokens=7))
        engine.tell_stat_loggers()
        engine.remove_stat_logger(notes)
        await engine.complete([4, 5, 6], SamplingParams(max_tokens=7))
    assert sum(iteration.num_generation_tokens for iteration in notes.iterations) == 7
    assert sum(iteration.num_prompt_tokens for iteration in notes.iterations) == 3
    [finished] = [finished for iteration in notes.iterations for finished in iteration.finished_requests]
    assert finished.metrics.num_generation_tokens == 7
    assert finished.e2e_latency == pytest.approx(7 * STEP_S)


async def test_a_logger_that_raises_harms_no_request_and_is_asked_no_more(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    notes = Notes()
    async with fake_engine() as engine:
        engine.add_stat_logger(Broken())
        engine.add_stat_logger(notes)
        output = await engine.complete([1, 2, 3], SamplingParams(max_tokens=7, seed=5))
        assert engine.statistics().num_restarts == 0
    assert output.outputs[0].token_ids == answer_of([1, 2, 3], 5, 7)
    assert notes.iterations
    assert [record.levelname for record in caplog.records if record.name == "triolet.statistics"] == ["ERROR"]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "triolet.statistics"]


async def test_a_line_is_logged_every_ten_seconds_while_busy_and_none_while_idle(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "STEP_S", 0.1)
    caplog.set_level(logging.INFO, logger="triolet.statistics")
    executor = FakeExecutor(num_blocks=1024, block_size=4)
    async with fake_engine(executor) as engine:
        await trio.sleep(100)
        assert lines(caplog) == []
        await engine.complete([1, 2, 3], SamplingParams(max_tokens=310))  # 31 s of steps
        assert len(lines(caplog)) == 3
        await trio.sleep(100)
        assert len(lines(caplog)) == 3
        await engine.complete([1, 2, 3], SamplingParams(max_tokens=90))  # 9 s
        assert len(lines(caplog)) == 3
        await trio.sleep(5)
        await engine.complete([1, 2, 3], SamplingParams(max_tokens=90))
        assert len(lines(caplog)) == 5
    assert "Avg generation throughput: 10.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs" in lines(caplog)[1]


@pytest.mark.slow
async def test_the_line_tells_what_came_of_drafts_since_the_last_one(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="triolet.statistics")
    executor = FakeExecutor(num_blocks=1024, block_size=4)
    params = SamplingParams(max_tokens=3900, seed=REPETITIVE)
    tried = accepted = 0
    async with fake_engine(executor, speculative="ngram", prompt_lookup_min=2) as engine:
        while len(lines(caplog)) < 2:
            await engine.complete([1, 4, 6, 5, 2, 0] * 2, params)
            engine.tell_stat_loggers()
        statistics = engine.statistics()
    for line in lines(caplog):
        match = re.search(r"Draft acceptance rate: ([\d.]+)% \((\d+) of (\d+) tokens\)$", line)
        assert match is not None
        rate, right, all_tried = float(match[1]), int(match[2]), int(match[3])
        assert 0 < right <= all_tried
        assert rate == pytest.approx(100 * right / all_tried, abs=0.06)
        tried, accepted = tried + all_tried, accepted + right
    assert tried <= statistics.spec_decode_num_draft_tokens
    assert accepted <= statistics.spec_decode_num_accepted_tokens


async def test_without_speculation_the_line_says_nothing_of_drafts(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="triolet.statistics")
    async with fake_engine(FakeExecutor(num_blocks=1024, block_size=4)) as engine:
        await engine.complete([1, 2, 3], SamplingParams(max_tokens=1100))
    [line] = lines(caplog)
    assert "Draft" not in line


async def test_a_step_longer_than_the_interval_costs_lines_and_does_not_bunch_them(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="triolet.statistics")
    notes, executor = Notes(), FakeExecutor(num_blocks=64, block_size=4)
    async with fake_engine(executor, step_timeout=None, num_scheduler_steps=1) as engine:
        engine.add_stat_logger(notes)
        executor.before_step = lambda plan: autojump_clock.jump(24.995) if plan.step_id == 2 else None
        await engine.complete([1, 2, 3], SamplingParams(max_tokens=100))
    assert notes.num_lines == len(lines(caplog)) == 1


async def test_statistics_are_gathered_for_the_line_and_not_for_the_steps_between_two(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="triolet.statistics")
    gather, num_gathered = EngineCore.statistics, 0

    def counted(core: EngineCore) -> EngineStatistics:
        nonlocal num_gathered
        num_gathered += 1
        return gather(core)

    monkeypatch.setattr(EngineCore, "statistics", counted)
    async with fake_engine(FakeExecutor(num_blocks=1024, block_size=4)) as engine:
        await engine.complete([1, 2, 3], SamplingParams(max_tokens=1100))
    assert num_gathered == len(lines(caplog)) == 1
