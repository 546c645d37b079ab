"""Steps that the runner begins and somebody else computes: which they are, and that they give what `execute` gives."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.model.test_runner import start
from tests.model.tiny import make_model
from triolet.core.params import SamplingParams
from triolet.core.plan import PlanRow, StepPlan, StepResult
from triolet.errors import InvariantViolated
from triolet.kernels.cpu.library import library
from triolet.model.runner import ModelRunner, load_runner

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="an eventfd is Linux'"),
    pytest.mark.skipif(library() is None, reason="torch computes nothing in the background"),
]

GREEDY, DRAWN = SamplingParams(temperature=0), SamplingParams(temperature=1.0)
PROMPT = (1, 2, 3)


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    made, _ = load_runner(
        model=str(make_model("llama", tmp_path)), num_kv_blocks=16, block_size=4, max_num_seqs=4
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
        finish = runner.begin(plan, done)
        if finish is None:
            return None
        end.read(8)  # waits for it
        return finish()


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
