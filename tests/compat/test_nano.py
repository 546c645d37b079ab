"""vLLM's faces over triolet-nano: the same answers as from the native engine."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import trio

import triolet
from triolet.compat import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    BeamSearchParams,
    SamplingParams,
    StructuredOutputsParams,
)
from triolet.core.request.request import FinishReason
from triolet.errors import InvalidParams

QUESTIONS = ["What is the opposite of hot?", "Which day comes after Monday?", "Count to five."]
CHATS = [[{"role": "user", "content": question}] for question in QUESTIONS]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SCHEMA = {
    "type": "object",
    "properties": {"day": {"enum": ["Monday", "Friday"]}},
    "required": ["day"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_num_seqs=2, max_model_len=256)


async def test_all_three_give_the_same_answers(llm: LLM) -> None:
    offline = [output.outputs[0].token_ids for output in llm.chat(CHATS, GREEDY, use_tqdm=False)]
    async with triolet.open_engine(max_num_seqs=2, max_model_len=256) as engine:
        native = [(await engine.complete(chat, GREEDY)).outputs[0].token_ids for chat in CHATS]
    online = []
    async with AsyncLLM.from_engine_args(AsyncEngineArgs(max_num_seqs=2, max_model_len=256)) as face:
        for number, chat in enumerate(CHATS):
            outputs = [output async for output in face.generate(chat, GREEDY, str(number))]
            online.append(outputs[-1].outputs[0].token_ids)
        await face.check_health()
    assert offline == native == online
    assert not face.is_running


def test_answers_can_be_bound_to_a_form(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, seed=1, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    for output in llm.chat(CHATS, params, use_tqdm=False):
        assert json.loads(output.outputs[0].text)["day"] in ("Monday", "Friday")
    wrong = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(["))
    with pytest.raises(InvalidParams, match="structured_outputs"):
        llm.generate("Hello!", wrong, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


async def test_beams_are_those_of_the_native_search(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    [offline] = llm.beam_search(QUESTIONS[:1], params, None, False, None, 1)
    async with triolet.open_engine(max_model_len=256) as engine:
        native = await triolet.beam_search(engine, QUESTIONS[0], params)
    assert [beam.tokens for beam in offline.sequences] == [beam.tokens for beam in native.sequences]
    scores = [beam.cum_logprob for beam in offline.sequences]
    assert scores == pytest.approx([beam.cum_logprob for beam in native.sequences], abs=1e-4)


async def test_metrics_of_a_real_engine_agree_with_its_outputs() -> None:
    from triolet.observability.prometheus import Metrics

    outputs: list[triolet.RequestOutput] = []

    async with triolet.open_engine(max_model_len=256) as engine:

        async def ask(chat: list[dict[str, str]]) -> None:
            outputs.append(await engine.complete(chat, GREEDY))

        metrics = Metrics(engine, prefix="vllm:")
        async with trio.open_nursery() as nursery:
            for chat in CHATS:
                nursery.start_soon(ask, chat)
        await ask(CHATS[0])
        text = metrics.render().decode()
        index = engine.statistics().engine_index  # not 0: this module has an `LLM` open, too
    measured = outputs[-1].metrics
    assert measured.inference_time == pytest.approx(measured.prefill_time + measured.decode_time)
    reasons = Counter(output.outputs[0].finish_reason for output in outputs)
    assert reasons[FinishReason.STOP] > 0 and reasons.total() == 4
    for reason, count in reasons.items():
        labels = f'engine="{index}",finished_reason="{reason}",model_name="triolet-nano"'
        assert f"vllm:request_success_total{{{labels}}} {count}.0" in text
