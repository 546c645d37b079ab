"""Requests with forms and all else drawn at random: alone or all at once, with too few blocks, they give the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

import triolet
from tests.model.tiny import make_model
from triolet import Engine, FinishReason, SamplingParams, StructuredOutputsParams

NUM_REQUESTS = 60
FORMS: tuple[tuple[StructuredOutputsParams, Any], ...] = (
    (
        StructuredOutputsParams(choice=["red", "green", "blue", "a much longer one"]),
        re.compile("red|green|blue|a much.*"),
    ),
    (StructuredOutputsParams(regex="[a-c]{2,6}(-[0-9]+)?"), re.compile("[a-c]{2,6}(-[0-9]+)?")),
    (StructuredOutputsParams(grammar='start: "(" start ")" | "x"'), re.compile(r"\(*x\)*")),
    (StructuredOutputsParams(json={"type": "array", "items": {"enum": [1, 22, "é"]}, "maxItems": 4}), json),
    (StructuredOutputsParams(json={"type": "string", "maxLength": 5}, disable_any_whitespace=True), json),
)
# fmt: off
CHOICES: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 0.3, 1.0, 1.7), "top_k": (0, 1, 5), "top_p": (1.0, 0.6), "min_p": (0.0, 0.1),
    "repetition_penalty": (1.0, 1.4), "presence_penalty": (0.0, 1.5), "frequency_penalty": (0.0, -0.5),
    "min_tokens": (0, 3), "max_tokens": (4, 12, 40), "logprobs": (None, 2), "ignore_eos": (False, True),
    "stop": ((), ("x",), ("2",)), "bad_words": ((), ("re",)), "logit_bias": (None, {97: 3.0}),
}
# fmt: on


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama-plain", tmp_path_factory.mktemp("models") / "tiny", with_tokenizer=True)


def drawn(index: int) -> tuple[list[int], SamplingParams, Any]:
    """A prompt, parameters, and what the answer must match."""
    rng = Random(index)
    form, pattern = rng.choice(FORMS)
    fields = {name: rng.choice(values) for name, values in CHOICES.items() if rng.random() < 0.5}
    fields["max_tokens"] = fields.get("max_tokens", 30)
    prompt = [rng.randrange(256) for _ in range(rng.randint(1, 20))]
    return prompt, SamplingParams(structured_outputs=form, seed=index, **fields), pattern


async def answer(engine: Engine, index: int) -> tuple[Any, ...]:
    prompt, params, pattern = drawn(index)
    try:
        output = await engine.complete(prompt, params)
    except triolet.errors.RequestFailed as error:  # a form may leave nothing that a bad word lets through
        assert params.bad_words
        return ("failed", error.reason)
    [completion] = output.outputs
    if completion.finish_reason is FinishReason.STOP and completion.stop_reason is None:
        json.loads(output.text) if pattern is json else pattern.fullmatch(output.text).group()
    return completion.token_ids, completion.text, completion.finish_reason, completion.stop_reason


@pytest.mark.slow
async def test_bound_answers_alone_are_those_of_all_together(folder: Path) -> None:
    settings: dict[str, Any] = {"model": str(folder), "dtype": "float32", "max_model_len": 64}
    async with triolet.open_engine(**settings, num_kv_blocks=64, runner="inline") as engine:
        alone = [await answer(engine, index) for index in range(NUM_REQUESTS)]
    together: dict[int, tuple[Any, ...]] = {}
    async with triolet.open_engine(**settings, num_kv_blocks=24, block_size=4, max_grammars=3) as engine:

        async def ask(index: int) -> None:
            together[index] = await answer(engine, index)

        async with trio.open_nursery() as nursery:
            for index in range(NUM_REQUESTS):
                nursery.start_soon(ask, index)
        assert engine.statistics().num_preemptions > 5
        assert engine.statistics().kv_blocks_in_use == 0
    assert [together[index] for index in range(NUM_REQUESTS)] == alone
    reasons = {reason for *_, reason, _ in (result for result in alone if len(result) == 4)}
    assert {FinishReason.STOP, FinishReason.LENGTH} <= reasons
