"""What vLLM 0.32.0's `LLM` was seen to do with the same calls, where it was not clear from its documentation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.compat.test_llm_engine import make_engine, seeded
from triolet.compat import (
    LLM,
    BeamSearchParams,
    EngineArgs,
    LLMEngine,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
)
from triolet.errors import InvalidParams, InvalidPrompt, InvalidRequest, UnsupportedFeature


@pytest.fixture
def engine() -> LLMEngine:
    return make_engine()


@pytest.fixture
def llm(engine: LLMEngine) -> LLM:
    return LLM(engine=engine)


def test_without_parameters_an_answer_has_sixteen_tokens(llm: LLM) -> None:
    assert llm.get_default_sampling_params().max_tokens == 16
    [output] = llm.generate("A", use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 16


@pytest.mark.parametrize("messages", ["hello", {"role": "user", "content": "hello"}, None, 5])
def test_a_chat_is_a_list_of_messages(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^messages must be a list of messages"):
        llm.chat(messages, use_tqdm=False)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("chat_template_content_format", "openai"),
        ("mm_processor_kwargs", {"a": 1}),
    ],
)
def test_what_chat_does_not_offer_is_refused_by_name(llm: LLM, argument: str, value: Any) -> None:
    messages = [{"role": "user", "content": "A"}]
    with pytest.raises(UnsupportedFeature, match=f"^{argument} is not offered"):
        llm.chat(messages, use_tqdm=False, **{argument: value})


def test_a_chat_can_not_go_on_with_its_last_message_and_begin_another(llm: LLM) -> None:
    with pytest.raises(InvalidPrompt, match=r"^continue_final_message must be false"):
        llm.chat([{"role": "assistant", "content": "A"}], use_tqdm=False, continue_final_message=True)


@pytest.mark.parametrize("values", [[1], [1, 2, 3]])
def test_there_is_a_priority_for_each_prompt(llm: LLM, values: list[int]) -> None:
    sentence = rf"^The lengths of prompts \(2\) and priority \({len(values)}\) must be the same"
    with pytest.raises(InvalidRequest, match=sentence):
        llm.generate(["A", "B"], seeded(1), use_tqdm=False, priority=values)


@pytest.mark.parametrize(
    ("given", "came"),
    [
        ({"max_tokens": 2}, "dict"),
        ("x", "str"),
        ([None], "NoneType"),
        ([{"a": 1}], "dict"),
        (5, "int"),
        (True, "bool"),
        (PoolingParams(), "PoolingParams"),
    ],
)
def test_parameters_of_another_type_are_refused_by_their_name(llm: LLM, given: Any, came: str) -> None:
    messages = [{"role": "user", "content": "A"}]
    calls: tuple[Callable[[], Any], ...] = (
        lambda: llm.generate("A", given, use_tqdm=False),
        lambda: llm.chat(messages, given, use_tqdm=False),
    )
    for call in calls:
        with pytest.raises(
            InvalidRequest, match=f"^sampling_params must be SamplingParams, got {came}$"
        ) as caught:
            call()
        assert caught.value.field == "sampling_params"
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize("given", [SamplingParams(), {"beam_width": 2}, None])
def test_a_beam_search_takes_parameters_of_beam_searches(llm: LLM, given: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^params must be BeamSearchParams, got "):
        llm.beam_search(["A"], given)


@pytest.mark.parametrize("prompts", [None, 5, iter(["A"])])
def test_prompts_of_another_type_are_refused_by_their_name(llm: LLM, prompts: Any) -> None:
    for call in (
        lambda: llm.generate(prompts, use_tqdm=False),
        lambda: llm.encode(prompts, use_tqdm=False),
        lambda: llm.beam_search(prompts, BeamSearchParams(1, 1)),
    ):
        with pytest.raises(InvalidPrompt, match=r"^prompts must be a prompt or a list of prompts, got "):
            call()


@pytest.mark.parametrize(
    ("argument", "value", "rule"),
    [
        ("priority", "x", "an integer"),
        ("priority", ["a"], "an integer"),
        ("priority", 1.5, "an integer"),
        ("lora_request", "a", "a LoRARequest"),
        ("lora_request", 5, "a LoRARequest"),
        ("lora_request", ["a"], "a LoRARequest"),
    ],
)
def test_an_argument_for_each_prompt_is_of_its_type(llm: LLM, argument: str, value: Any, rule: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{argument} must be {rule}, got "):
        llm.generate(["A"], use_tqdm=False, **{argument: value})


def test_an_engine_refuses_parameters_and_a_priority_of_another_type(engine: LLMEngine) -> None:
    wrong: Any = {"max_tokens": 2}
    with pytest.raises(InvalidRequest, match=r"^params must be SamplingParams or PoolingParams, got dict$"):
        engine.add_request("r", "A", wrong)
    wrong = "x"
    with pytest.raises(InvalidRequest, match=r"^priority must be an integer, got str$"):
        engine.add_request("r", "A", priority=wrong)
    assert not engine.has_unfinished_requests()


def test_beam_search_parameters_can_be_written_in_order_and_name_what_they_do_not_offer() -> None:
    params = BeamSearchParams(3, 7)
    assert (params.beam_width, params.max_tokens, params.skip_special_tokens) == (3, 7, True)
    assert BeamSearchParams(3, 7, structured_outputs=None, watermarking=None) == params
    for field, value in (("structured_outputs", StructuredOutputsParams(regex="a")), ("watermarking", True)):
        with pytest.raises(InvalidParams, match=f"^{field} must be None"):
            BeamSearchParams(3, 7, **{field: value})  # type: ignore[arg-type]


def test_a_schema_can_come_first_and_null_is_none() -> None:
    assert StructuredOutputsParams({"type": "integer"}).kind == "json"
    with pytest.raises(InvalidParams, match=r"structured_outputs\.json must be a JSON schema"):
        StructuredOutputsParams(json="null", regex="a")


@pytest.mark.parametrize("salt", [3, b"a", ["a"]])
def test_a_cache_salt_is_a_text(engine: LLMEngine, salt: object) -> None:
    with pytest.raises(InvalidPrompt, match=r"^cache_salt must be a string"):
        engine.add_request("r", {"prompt": "A", "cache_salt": salt}, SamplingParams())
    assert not engine.has_unfinished_requests()


def test_several_requests_are_aborted_under_vllms_name_for_them(engine: LLMEngine) -> None:
    for request_id in ("a", "b", "c"):
        engine.add_request(request_id, "A", seeded(1))
    engine.abort_request(request_ids=["a", "unknown", "c"])
    ended = [output.request_id for output in engine.step() if output.outputs[0].finish_reason == "abort"]
    assert ended == ["a", "c"]


def test_engine_args_can_be_read_under_both_names() -> None:
    args = EngineArgs(max_num_queued_tokens=5_000, scheduling_policy="fair", enforce_eager=False)
    assert (args.max_num_queued_tokens, args.max_queued_tokens) == (5_000, 5_000)
    assert (args.scheduling_policy, args.policy, args.model) == ("fair", "fair", None)
    with pytest.raises(AttributeError):
        _ = args.nothing_of_the_kind
