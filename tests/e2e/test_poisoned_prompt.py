"""A real model, and one prompt among sixteen that its runner cannot survive."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

import triolet
from tests.model.tiny import make_model
from triolet import Engine, EngineConfig, SamplingParams
from triolet.core.step_plan import StepPlan, StepResult
from triolet.errors import RequestFailed
from triolet.model.runner import ModelRunner

NUM_REQUESTS, NUM_TOKENS, POISONED = 16, 12, 5
PROMPTS = [[number + 1] * (number % 7 + 1) for number in range(NUM_REQUESTS)]


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    folder = make_model("qwen3", tmp_path / "tiny", with_tokenizer=True)
    return EngineConfig(model=str(folder), dtype="float32", device="cpu", runner="thread")


async def ask_all(engine: Engine) -> dict[int, tuple[int, ...] | RequestFailed]:
    """Half of them greedy, half with a seed."""
    answers: dict[int, tuple[int, ...] | RequestFailed] = {}

    async def ask(index: int) -> None:
        params = SamplingParams(
            temperature=0.9 if index % 2 else 0.0, seed=index, max_tokens=NUM_TOKENS, ignore_eos=True
        )
        try:
            answers[index] = tuple((await engine.complete(PROMPTS[index], params)).outputs[0].token_ids)
        except RequestFailed as failure:
            answers[index] = failure

    async with trio.open_nursery() as nursery:
        for index in range(NUM_REQUESTS):
            nursery.start_soon(ask, index)
    return answers


async def test_one_fails_with_the_cause_and_fifteen_are_answered_as_if_it_had_not_been_there(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with triolet.open_engine(config) as engine:
        undisturbed = await ask_all(engine)
    rows: dict[int, tuple[int, ...]] = {}
    original = ModelRunner.execute

    def execute(self: ModelRunner, plan: StepPlan) -> StepResult:
        rows.update({start.row_id: start.prompt_token_ids for start in plan.starts})
        result = original(self, plan)
        if any(rows[row.row_id] == tuple(PROMPTS[POISONED]) for row in plan.rows):
            raise FloatingPointError("poisoned")
        return result

    monkeypatch.setattr(ModelRunner, "execute", execute)
    async with triolet.open_engine(config) as engine:
        answers = await ask_all(engine)
        engine.check_health()
        assert engine.statistics().num_restarts <= 2 + 4
    failure = answers.pop(POISONED)
    assert isinstance(failure, RequestFailed)
    assert isinstance(failure.__cause__, FloatingPointError)
    del undisturbed[POISONED]
    assert answers == undisturbed
