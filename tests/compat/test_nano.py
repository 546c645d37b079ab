"""vLLM's faces over triolet-nano: the same answers as from the native engine."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path

import attrs
import pytest
import trio

import triolet
from triolet import compat
from triolet.compat import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    BeamSearchParams,
    EngineArgs,
    SamplingParams,
    StructuredOutputsParams,
)
from triolet.core.request.request import FinishReason
from triolet.errors import EngineClosed, InvalidParams, UnsupportedFeature

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


def test_the_configuration_of_an_engine_has_vllms_parts(llm: LLM) -> None:
    config = llm.llm_engine.vllm_config
    written = json.loads((Path(config.model_config.folder) / "config.json").read_text())
    model = config.model_config
    assert (model.hf_config.model_type, model.architectures) == (
        written["model_type"],
        tuple(written["architectures"]),
    )
    assert model.hf_text_config.to_dict()["num_hidden_layers"] == written["num_hidden_layers"]
    assert (model.get_hidden_size(), model.get_vocab_size()) == (
        written["hidden_size"],
        written["vocab_size"],
    )
    assert model.get_head_size() == written.get(
        "head_dim", written["hidden_size"] // written["num_attention_heads"]
    )
    assert (model.max_model_len, config.scheduler_config.max_num_seqs) == (256, 2)
    assert (config.parallel_config.world_size, config.lora_config) == (1, None)
    assert config.cache_config.num_gpu_blocks * config.cache_config.block_size >= 256
    assert config.observability_config.otlp_traces_endpoint is None
    assert model is llm.llm_engine.model_config  # what transformers has read is read once


def test_the_configuration_of_an_engine_opens_another_one(llm: LLM) -> None:
    config = llm.llm_engine.vllm_config
    assert config == EngineArgs(max_num_seqs=2, max_model_len=256).create_engine_config()
    assert hash(config) == hash(config.plain())
    assert AsyncLLM(copy.deepcopy(config)).vllm_config == config
    assert config != attrs.evolve(config.plain(), seed=config.seed + 1)


async def test_parts_of_a_configuration_are_known_once_the_engine_is_open() -> None:
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(max_num_seqs=2))
    with pytest.raises(EngineClosed):
        _ = llm.vllm_config.model_config
    async with llm:
        assert (await llm.get_vllm_config()).model_config.dtype == (await llm.get_model_config()).dtype


def test_what_registers_with_vllm_is_refused_in_words() -> None:
    with pytest.raises(UnsupportedFeature, match=r"register_model is not offered: models are families"):
        compat.ModelRegistry.register_model("MyModel", object)
    with pytest.raises(UnsupportedFeature, match=r"initialize_ray_cluster is not offered: .*runner 'ray'"):
        compat.initialize_ray_cluster(None)
