"""Steps that the runner begins in the background: which plans they take, and that they give what `execute` gives."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.model.test_runner import start
from tests.model.tiny import make_model
from triolet.config.engine import EngineConfig
from triolet.core.request.params import SamplingParams
from triolet.core.step_plan import PlanRow, StepPlan, StepResult
from triolet.errors import InvariantViolated
from triolet.kernels.cpu.abi import MultiStepStruct
from triolet.kernels.cpu.library import library
from triolet.model.backends.cpu import decoder as cpu_decoder
from triolet.model.interface import GreedyStep
from triolet.model.loading.runner import load_runner
from triolet.model.memory.page_prefault import PagePrefault
from triolet.model.runner import ModelRunner

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="an eventfd is Linux'"),
    pytest.mark.skipif(library() is None, reason="torch computes nothing in the background"),
]

NUM_STEPS = 5  # that the blocks of a first step have room for
GREEDY, DRAWN = SamplingParams(temperature=0), SamplingParams(temperature=1.0)
PROMPT = (1, 2, 3)


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    made, _ = load_runner(
        EngineConfig(model=str(make_model("llama", tmp_path)), num_kv_blocks=16, block_size=4, max_num_seqs=4)
    )
    return made


def first_step(*params: SamplingParams) -> StepPlan:
    """A prompt for each of `params`, with room for what follows."""
    starts = tuple(start(row, PROMPT, params=each) for row, each in enumerate(params))
    rows = tuple(PlanRow(row, 0, len(PROMPT), (2 * row, 2 * row + 1), True) for row in range(len(params)))
    return StepPlan(1, (), starts, rows)


def decode(step_id: int, num_rows: int, **fields: Any) -> StepPlan:
    """One token more for each."""
    num_known = len(PROMPT) + step_id - 2
    return StepPlan(
        step_id, (), (), tuple(PlanRow(row, num_known, 1, (), True, **fields) for row in range(num_rows))
    )


def in_background(runner: ModelRunner, plan: StepPlan) -> StepResult | None:
    done = os.eventfd(0)
    with open(done, "rb", buffering=0) as end:
        run = runner.begin(plan, done)
        if run is None:
            return None
        (result,) = run.results(int.from_bytes(end.read(8), sys.byteorder))  # waits for it
        assert result.is_last
        return result


def tokens(result: StepResult | None) -> list[int]:
    assert result is not None
    return [token.token_id for token in result.tokens]


def test_steps_in_the_background_give_the_tokens_that_they_give_otherwise(runner: ModelRunner) -> None:
    here = [tokens(runner.execute(first_step(GREEDY, GREEDY)))]
    here += [tokens(runner.execute(decode(step_id, 2))) for step_id in (2, 3, 4)]
    runner.reset()
    there = [tokens(runner.execute(first_step(GREEDY, GREEDY)))]
    there += [tokens(in_background(runner, decode(step_id, 2))) for step_id in (2, 3, 4)]
    assert there == here


def test_pages_of_the_cache_are_told_of_when_steps_are_computed_in_either_way(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(PagePrefault, "reach", lambda pages, block_id: told.append(f"up to {block_id}"))
    monkeypatch.setattr(PagePrefault, "rest", lambda pages: told.append("rest"))
    runner.execute(first_step(GREEDY, GREEDY))
    assert told == ["up to 3", "rest"]
    done = os.eventfd(0)
    with open(done, "rb", buffering=0) as end:
        run = runner.begin(decode(2, 2), done)
        assert run is not None and told[2:] == ["up to 3"]
        run.results(int.from_bytes(end.read(8), sys.byteorder))
    assert told[2:] == ["up to 3", "rest"]
    runner.reset()
    assert told[4:] == ["rest"]


def test_background_and_other_steps_may_take_turns(runner: ModelRunner) -> None:
    here = [tokens(runner.execute(first_step(GREEDY)))]
    here += [tokens(runner.execute(decode(step_id, 1))) for step_id in (2, 3, 4, 5)]
    runner.reset()
    turns = [tokens(runner.execute(first_step(GREEDY)))]
    for step_id in (2, 4):
        turns.append(tokens(in_background(runner, decode(step_id, 1))))
        turns.append(tokens(runner.execute(decode(step_id + 1, 1))))
    assert turns == here


def test_what_needs_a_thread_of_ours_is_not_begun_and_changes_nothing(runner: ModelRunner) -> None:
    assert in_background(runner, first_step(GREEDY, DRAWN)) is None
    runner.execute(first_step(GREEDY, DRAWN))
    assert in_background(runner, decode(2, 2)) is None  # one of them is drawn
    assert in_background(runner, decode(2, 1, mask=b"\xff" * 16)) is None
    draft = StepPlan(2, (), (), (PlanRow(0, 3, 2, (), True, None, (7,)),))
    assert in_background(runner, draft) is None
    assert len(tokens(runner.execute(decode(2, 2)))) == 2
    assert in_background(runner, decode(3, 1)) is not None


def test_a_plan_that_contradicts_the_table_is_refused_before_it_is_begun(runner: ModelRunner) -> None:
    runner.execute(first_step(GREEDY))
    with pytest.raises(InvariantViolated, match="start must be 3"):
        in_background(runner, decode(3, 1))


def run_of(first: StepPlan, num_steps: int) -> StepPlan:
    return attrs.evolve(first, num_steps=num_steps)


def results_of_run(runner: ModelRunner, plan: StepPlan) -> list[StepResult]:
    """Of a run in the background, each as soon as it is there."""
    done = os.eventfd(0)
    results: list[StepResult] = []
    with open(done, "rb", buffering=0) as end:
        run = runner.begin(plan, done)
        assert run is not None
        while not (results and results[-1].is_last):
            results += run.results(int.from_bytes(end.read(8), sys.byteorder))
    return results


@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_run_in_the_background_gives_what_its_steps_give_one_by_one(
    runner: ModelRunner, num_rows: int
) -> None:
    steps = range(2, 2 + NUM_STEPS)
    here = [tokens(runner.execute(first_step(*[GREEDY] * num_rows)))]
    here += [tokens(runner.execute(decode(step_id, num_rows))) for step_id in steps]
    runner.reset()
    there = [tokens(runner.execute(first_step(*[GREEDY] * num_rows)))]
    results = results_of_run(runner, run_of(decode(2, num_rows), NUM_STEPS - 1))
    there += [tokens(result) for result in results]
    there += [
        tokens(runner.execute(decode(1 + NUM_STEPS, num_rows)))
    ]  # behind a run goes on like behind a step
    assert there == here
    assert [token.position for result in results for token in result.tokens[:1]] == list(range(1, NUM_STEPS))
    assert all(result.elapsed_s > 0 for result in results)


def test_a_run_that_is_halted_ends_early_and_whatever_comes_next_knows_how_far_it_got(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = [tokens(runner.execute(first_step(GREEDY)))]
    here += [tokens(runner.execute(decode(step_id, 1))) for step_id in range(2, 2 + NUM_STEPS)]
    runner.reset()
    there = [tokens(runner.execute(first_step(GREEDY)))]
    monkeypatch.setattr(
        cpu_decoder, "MultiStepStruct", partial(MultiStepStruct, is_halted=1)
    )  # sooner than any thread could
    (result,) = results_of_run(runner, run_of(decode(2, 1), NUM_STEPS))
    there += [tokens(result)]
    there += [tokens(runner.execute(decode(step_id, 1))) for step_id in range(3, 2 + NUM_STEPS)]
    assert there == here


@pytest.mark.parametrize("num_done", [0, 2])
def test_a_step_of_a_run_without_memory_is_told_and_computed_again_as_if_it_had_not_begun(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, num_done: int
) -> None:
    here = [tokens(runner.execute(first_step(GREEDY)))]
    here += [tokens(runner.execute(decode(step_id, 1))) for step_id in range(2, 2 + NUM_STEPS)]
    runner.reset()
    there = [tokens(runner.execute(first_step(GREEDY)))]
    with monkeypatch.context() as patch:
        patch.setattr(
            cpu_decoder.CpuRun, "steps", partialmethod(last_without_memory, cpu_decoder.CpuRun.steps)
        )
        *done, lost = results_of_run(runner, run_of(decode(2, 1), num_done + 1))
    there += map(tokens, done)
    assert len(done) == num_done and lost.out_of_memory is not None and lost.is_last and not lost.rows
    there += [tokens(runner.execute(decode(step_id, 1))) for step_id in range(2 + num_done, 2 + NUM_STEPS)]
    assert there == here


def last_without_memory(
    run: cpu_decoder.CpuRun, steps: Callable[[cpu_decoder.CpuRun, int], list[GreedyStep]], count: int
) -> list[GreedyStep]:
    """The next steps of a run; of the last one of all, that there was no memory for it."""
    made = steps(run, count)
    return [*made[:-1], attrs.evolve(made[-1], lacks_memory=True)] if run.is_over else made


def test_a_run_needs_blocks_for_all_its_steps(runner: ModelRunner) -> None:
    runner.execute(first_step(GREEDY))
    with pytest.raises(InvariantViolated, match="must have blocks for"):
        runner.begin(run_of(decode(2, 1), 64), 0)
