"""Every field that OpenAI or vLLM document is honoured, without effect by its meaning, or refused by its name."""

from __future__ import annotations

import json
from typing import Any, get_args

import attrs
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import ResponseIncludable, response_create_params

from triolet.core.request.param_validation import ApiFamily, SamplingParameter
from triolet.core.request.params import SAMPLING_PARAMETERS, SamplingParams
from triolet.core.tools import plan_tools
from triolet.protocol.chat_completions import ChatRequest
from triolet.protocol.completions import CompletionRequest
from triolet.protocol.errors import WireError
from triolet.protocol.pooling import NOT_OFFERED, ClassifyRequest, EmbeddingsRequest, PoolingRequest
from triolet.protocol.responses.requests import CreateResponse, RequestEcho, SamplingPlan, read_event
from triolet.protocol.sampling import (
    HINTS,
    UNSUPPORTED,
    WIRE_NAMES,
    read_sampling,
    write_sampling,
)
from triolet.protocol.scoring import RerankRequest, ScoreRequest

CHAT, COMPLETIONS, RESPONSES = ApiFamily
BODIES: dict[ApiFamily, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"model": "m", "prompt": "hi"},
    RESPONSES: {"model": "m", "input": "hi"},
}
CLASSES: dict[ApiFamily, Any] = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest, RESPONSES: CreateResponse}
SDK = {
    CHAT: chat_create_params.CompletionCreateParamsBase,
    COMPLETIONS: completion_create_params.CompletionCreateParamsBase,
    RESPONSES: response_create_params.ResponseCreateParamsBase,
}
# Fields of vLLM's request classes beyond OpenAI's, of its present and of its earlier versions.
VLLM_BOTH = """
add_special_tokens allowed_token_ids bad_words best_of cache_salt detokenize ec_transfer_params echo
flat_logprobs guided_choice guided_decoding_backend guided_grammar guided_json guided_regex
guided_whitespace_pattern ignore_eos include_stop_str_in_output kv_transfer_params length_penalty
logits_processors logprob_token_ids max_repetition_pattern_size mm_payload min_p min_repetition_pattern_size min_tokens
priority prompt_logprobs repetition_detection repetition_min_count repetition_penalty request_id response_format
return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start
session_id skip_reading_prefix_cache skip_special_tokens spaces_between_special_tokens stop_token_ids
stream_interval structured_outputs thinking_token_budget top_k truncate_prompt_tokens truncation_side
use_beam_search vllm_xargs watermarking
""".split()
VLLM = {
    CHAT: [
        *VLLM_BOTH,
        *(
            "add_generation_prompt",
            "chat_template",
            "chat_template_kwargs",
            "continue_final_message",
            "documents",
        ),
        *(
            "include_reasoning",
            "media_io_kwargs",
            "mm_processor_kwargs",
            "return_prompt_text",
            "structural_tag",
        ),
    ],
    COMPLETIONS: [*VLLM_BOTH, "prompt_embeds"],
    RESPONSES: [
        *VLLM_BOTH,
        *(
            "enable_response_messages",
            "frequency_penalty",
            "logit_bias",
            "media_io_kwargs",
            "mm_processor_kwargs",
        ),
        *("n", "presence_penalty", "previous_input_messages", "previous_response", "seed", "stop"),
    ],
}
WITHOUT_EFFECT = frozenset(
    {
        "metadata",  # kept with the answer by OpenAI; echoed by Responses
        "mm_payload",  # vLLM: of its render endpoints only
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "return_mm_kwargs",  # likewise
        "return_token_offsets",  # likewise
        "safety_identifier",
        "service_tier",
        "session_id",  # for routers
        "store",
        "stream_options",
        "user",
        "verbosity",  # a hint that models here do not know
    }
)
# For each type of a parameter, a value that asks for something.
VALUES: dict[str, Any] = {
    "int": 2,
    "float": 0.5,
    "bool": True,
    "tuple[int, ...]": [3],
    "tuple[str, ...]": ["x"],
    "Mapping[int, float]": {"3": 1.0},
    "RepetitionDetectionParams": {"max_pattern_size": 3, "min_count": 2},
    "StructuredOutputsParams": {"regex": "a+"},
    "RequestOutputKind": "delta",
    "Mapping[str, str]": {"a": "b"},
}
BESIDE: dict[tuple[ApiFamily, str], dict[str, Any]] = {
    (CHAT, "logprobs"): {"logprobs": True},
    (CHAT, "logprob_token_ids"): {"logprobs": True},
    (COMPLETIONS, "logprob_token_ids"): {"logprobs": 1},
}
EVERYWHERE = [(family, one) for family in ApiFamily for one in SAMPLING_PARAMETERS]


def value_of(parameter: SamplingParameter) -> Any:
    value = VALUES[parameter.value_type]
    return (
        not parameter.default if parameter.value_type == "bool" and parameter.default is not None else value
    )


def params_of(family: ApiFamily, **fields: Any) -> SamplingParams:
    request = CLASSES[family].of({**BODIES[family], **fields})
    if family is COMPLETIONS:
        params = request.params(SamplingParams())
    elif family is CHAT:
        params = request.params(SamplingParams(), request.plan("hermes"))
    else:
        params = request.sampling_params(SamplingParams(), request.plan("hermes"))
    assert isinstance(params, SamplingParams)
    return params


def refusal(family: ApiFamily, **fields: Any) -> WireError:
    with pytest.raises(WireError) as error:
        params_of(family, **fields)
    return error.value


@pytest.mark.parametrize(
    ("family", "parameter"), EVERYWHERE, ids=[f"{family.value}-{one.name}" for family, one in EVERYWHERE]
)
def test_a_sampling_parameter_is_honoured_or_refused_by_name(
    family: ApiFamily, parameter: SamplingParameter
) -> None:
    value, name = value_of(parameter), parameter.wire_name(family)
    if name is None:
        error = refusal(family, **{parameter.name: value})
        assert (error.param, error.code) == (parameter.name, "unsupported_parameter")
        assert parameter.spec.refused[family] in error.message
    else:
        changed = params_of(family, **BESIDE.get((family, parameter.name), {}), **{name: value})
        default = getattr(params_of(family), parameter.name)
        assert getattr(changed, parameter.name) != default


@pytest.mark.parametrize(
    ("family", "parameter"), EVERYWHERE, ids=[f"{family.value}-{one.name}" for family, one in EVERYWHERE]
)
def test_a_parameter_with_its_default_value_passes_everywhere(
    family: ApiFamily, parameter: SamplingParameter
) -> None:
    default = list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
    if isinstance(default, None | bool | int | float | list) and parameter.name != "max_tokens":
        name = parameter.wire_name(family) or parameter.name
        assert isinstance(params_of(family, **{name: default}), SamplingParams)


def test_a_websocket_refuses_what_http_refuses() -> None:
    request = CreateResponse.of(BODIES[RESPONSES])
    planned = SamplingPlan(SamplingParams(), plan_tools(), RequestEcho.of(request))
    for parameter in SAMPLING_PARAMETERS:
        if parameter.wire_name(RESPONSES) is None:
            body = {**BODIES[RESPONSES], parameter.name: value_of(parameter), "type": "response.create"}
            event = read_event(json.dumps(body), "m".__eq__, lambda request: planned)
            assert event.error is not None
            assert event.error.param == parameter.name


@pytest.mark.parametrize("family", ApiFamily)
def test_every_documented_field_has_its_place(family: ApiFamily) -> None:
    declared = {field.name for field in attrs.fields(CLASSES[family])} - {"sampling"}
    refused = {one.name for one in SAMPLING_PARAMETERS if one.wire_name(family) is None}
    known = declared | set(WIRE_NAMES[family].values()) | refused | WITHOUT_EFFECT | UNSUPPORTED.keys()
    documented = {*SDK[family].__annotations__, *VLLM[family], "stream"}
    assert documented - known == set()


def test_no_field_is_both_without_effect_and_refused() -> None:
    assert not WITHOUT_EFFECT & UNSUPPORTED.keys()
    assert HINTS.keys() <= UNSUPPORTED.keys() | NOT_OFFERED.keys()


@pytest.mark.parametrize("family", ApiFamily)
def test_a_known_field_that_would_change_the_answer_is_refused_by_name(family: ApiFamily) -> None:
    declared = {field.name for field in attrs.fields(CLASSES[family])} | set(WIRE_NAMES[family].values())
    for name in UNSUPPORTED.keys() - declared:
        error = refusal(family, **{name: "something"})
        assert (error.param, error.code, error.status) == (name, "unsupported_parameter", 400)


@pytest.mark.parametrize("family", ApiFamily)
def test_a_known_field_that_asks_for_nothing_passes(family: ApiFamily) -> None:
    declared = {field.name for field in attrs.fields(CLASSES[family])} | set(WIRE_NAMES[family].values())
    for name, harmless in UNSUPPORTED.items():
        for value in (None, *harmless):
            if name not in declared:
                assert params_of(family, **{name: value}) == params_of(family), name


@pytest.mark.parametrize("family", ApiFamily)
def test_bookkeeping_fields_and_unknown_ones_are_accepted(family: ApiFamily) -> None:
    fields = {
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "safety_identifier": "x",
        "user": "me",
    }
    assert params_of(family, **fields, prompt_cache_key="k", something_new=[1]) == params_of(family)


@pytest.mark.parametrize(
    ("family", "name", "hint"),
    [
        (RESPONSES, "max_tokens", "is called max_output_tokens in Responses"),
        (CHAT, "max_output_tokens", "is called max_tokens in Chat Completions"),
        (RESPONSES, "guided_json", "use structured_outputs.json"),
        (RESPONSES, "response_format", "use text.format"),
    ],
)
def test_a_refusal_says_what_to_use_instead(family: ApiFamily, name: str, hint: str) -> None:
    assert hint in refusal(family, **{name: 3}).message


def test_a_client_cannot_write_the_engines_own_fields() -> None:
    assert params_of(CHAT, sampling={"temperature": 0.5}) == params_of(CHAT)


@pytest.mark.parametrize("family", ApiFamily)
def test_what_is_read_can_be_written_again(family: ApiFamily) -> None:
    payload = {
        name: value_of(one) for one in SAMPLING_PARAMETERS if (name := one.wire_name(family)) is not None
    }
    sampling = read_sampling(payload, family)
    assert read_sampling(write_sampling(sampling, family), family) == sampling
    assert len(sampling) == len(WIRE_NAMES[family])


def test_a_wrong_value_is_refused_under_the_name_that_the_client_wrote() -> None:
    for family, fields, param in (
        (RESPONSES, {"top_logprobs": -2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
        (COMPLETIONS, {"logprobs": -2}, "logprobs"),
        (RESPONSES, {"max_output_tokens": 2, "min_tokens": 3}, "min_tokens"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": float("nan")}}}},
            "response_format.json_schema.schema",
        ),
    ):
        error = refusal(family, **fields)
        assert error.param == param
        assert error.message.startswith(param)


# ------------------------------------------------------------------------------------ fixed values

EFFORTS_OF_OPENAI = "none minimal low medium high xhigh max"
TIERS = "auto default flex scale priority fast"
INCLUDES = get_args(ResponseIncludable)


def body_of(path: str, value: object) -> dict[str, Any]:
    outer, _, inner = path.partition(".")
    return {outer: {inner: value}} if inner else {outer: [value] if outer == "include" else value}


@pytest.mark.parametrize(
    ("family", "path", "values"),
    [
        (CHAT, "reasoning_effort", EFFORTS_OF_OPENAI),
        (CHAT, "verbosity", "low medium high"),
        (CHAT, "service_tier", TIERS),
        (CHAT, "prompt_cache_retention", "in_memory in-memory 24h"),
        (RESPONSES, "reasoning.effort", EFFORTS_OF_OPENAI),
        (RESPONSES, "reasoning.summary", "auto concise detailed"),
        (RESPONSES, "text.verbosity", "low medium high"),
        (RESPONSES, "service_tier", TIERS),
        (RESPONSES, "prompt_cache_retention", "in_memory in-memory 24h"),
        (RESPONSES, "include", " ".join(INCLUDES)),
    ],
)
def test_a_field_with_fixed_values_takes_these_and_refuses_others_by_name(
    family: ApiFamily, path: str, values: str
) -> None:
    for value in values.split():
        assert isinstance(params_of(family, **body_of(path, value)), SamplingParams)
    for wrong in ("bogus", ""):
        error = refusal(family, **body_of(path, wrong))
        assert (error.param, error.code, error.status) == (path, "invalid_value", 400)
        assert set(values.split()) <= set(error.message.partition("one of ")[2].partition(";")[0].split(", "))


# ----------------------------------------------------------------------------------- pooled routes

VLLM_POOLED = """
add_generation_prompt add_special_tokens cache_salt chat_template chat_template_kwargs continue_final_message
dimensions embed_dtype encoding_format endianness media_io_kwargs mm_processor_kwargs model padding priority
request_id truncate_prompt_tokens truncation_side use_activation user
""".split()
VLLM_SCORED = ["instruction", "max_tokens_per_doc", "max_tokens_per_query"]
POOLED: list[tuple[Any, dict[str, Any], list[str]]] = [
    (EmbeddingsRequest, {"model": "m", "input": "hi"}, ["messages", "normalize"]),
    (PoolingRequest, {"model": "m", "input": "hi"}, ["messages", "data", "task"]),
    (ClassifyRequest, {"model": "m", "input": "hi"}, []),
    (
        ScoreRequest,
        {"model": "m", "text_1": "a", "text_2": "b"},
        [*VLLM_SCORED, "queries", "items", "documents"],
    ),
    (RerankRequest, {"model": "m", "query": "a", "documents": ["b"]}, [*VLLM_SCORED, "top_n"]),
]
OF_VECTORS = {
    "dimensions",
    "embed_dtype",
    "encoding_format",
    "endianness",
}  # which classes and scores are not


@pytest.mark.parametrize(("kind", "body", "further"), POOLED)
def test_every_field_of_vllms_pooled_bodies_is_read_or_refused_by_name(
    kind: Any, body: dict[str, Any], further: list[str]
) -> None:
    declared = {field.name for field in attrs.fields(kind)}
    has_vectors = "dimensions" in declared
    for name in {*VLLM_POOLED, *further} - (set() if has_vectors else OF_VECTORS):
        if name in declared:
            with pytest.raises(WireError):
                kind.of({**body, name: object()})
        else:
            with pytest.raises(WireError) as caught:
                kind.of({**body, name: "bogus"})
            assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(("kind", "body", "further"), POOLED)
def test_a_field_of_a_pooled_body_that_asks_for_nothing_passes(
    kind: Any, body: dict[str, Any], further: list[str]
) -> None:
    for name, harmless in NOT_OFFERED.items():
        for value in (None, *harmless):
            assert kind.of({**body, name: value}) == kind.of(body), name
