"""Every public method, parameter and property of vLLM's classes is there, or refused by its name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from trio.testing import MockClock

from tests.actors.harness import fake_engine
from triolet.compat import LLM, AsyncLLM, LLMEngine, RequestManager, SamplingParams
from triolet.compat.refusals import ASYNC_METHODS, METHODS, OFFLINE_METHODS, PARAMETERS
from triolet.config.engine import EngineConfig
from triolet.core.output.outputs import CompletionOutput, RequestOutput
from triolet.core.request.request import RequestMetrics, RequestStatus
from triolet.errors import UnsupportedFeature

# What the versions of vLLM have (or had: the dropped ones are there as well), by class.
ASYNC_LLM = """
    from_engine_args from_vllm_config start_background_loop shutdown_background_loop shutdown
    generate encode add_request abort stream_generate get_request_status
    get_num_unfinished_requests has_unfinished_requests get_supported_tasks
    get_model_config get_decoding_config get_parallel_config get_scheduler_config get_lora_config get_vllm_config
    vllm_config model_config get_input_preprocessor get_tokenizer tokenizer is_tracing_enabled
    do_log_stats add_logger remove_logger start_profile stop_profile collective_rpc apply_model
    check_health is_running is_stopped errored dead_error
    reset_prefix_cache reset_mm_cache reset_encoder_cache
    sleep wake_up is_sleeping pause_generation resume_generation is_paused
    add_lora remove_lora list_loras pin_lora
    check_admission checkpoint_prepare checkpoint_restore compute_weight_checksums finish_weight_update
    get_kv_event_sources get_num_queued_tokens get_status get_weight_version handle_fault init_weight_transfer_engine
    notify_kv_transfer_request_rejected release_kv_cache_memory scale_elastic_ep shutdown_weight_transfer_engine
    start_draft_weight_update start_weight_update update_weight_version update_weights wait_for_requests_to_drain
"""
LLM_ENGINE = """
    from_engine_args from_vllm_config add_request abort_request step
    get_num_unfinished_requests has_unfinished_requests has_unfinished_requests_dp get_supported_tasks
    dp_group external_launcher_dp vllm_config model_config get_tokenizer get_model_config
    do_log_stats do_log_stats_with_interval get_metrics start_profile stop_profile collective_rpc apply_model
    reset_prefix_cache reset_mm_cache reset_encoder_cache sleep wake_up is_sleeping
    add_lora remove_lora list_loras pin_lora
    get_weight_version release_kv_cache_memory set_weight_version
"""
LLM_METHODS = """
    generate chat beam_search get_tokenizer get_default_sampling_params get_metrics llm_engine
    encode embed classify score reward reset_prefix_cache sleep wake_up start_profile stop_profile
    collective_rpc apply_model reset_mm_cache from_engine_args get_world_size
    enqueue enqueue_chat wait_for_completion finish_weight_update get_weight_version init_weight_transfer_engine
    release_kv_cache_memory shutdown_weight_transfer_engine start_draft_weight_update start_weight_update
    update_weight_version update_weights
"""
MANAGER = "add add_request abort abort_request get_request_status"

CONSTRUCTOR = """
    vllm_config executor_class log_stats usage_context stat_loggers input_registry mm_registry use_cached_outputs
    log_requests start_engine_loop aggregate_engine_logging client_addresses client_count client_index profiler
"""
LLM_ENGINE_CONSTRUCTOR = """
    vllm_config executor_class log_stats aggregate_engine_logging usage_context stat_loggers mm_registry
    use_cached_outputs multiprocess_mode
"""
FROM_VLLM_CONFIG = "vllm_config start_engine_loop usage_context stat_loggers disable_log_stats"
FROM_ENGINE_ARGS = "engine_args start_engine_loop usage_context stat_loggers"
GENERATE = """
    prompt sampling_params request_id lora_request trace_headers prompt_adapter_request priority
    prompt_token_ids prefix_pos data_parallel_rank tokenization_kwargs prompt_text session_id kv_hints
    reasoning_ended reasoning_parser_kwargs
"""
ADD_REQUEST = (
    "request_id prompt params arrival_time lora_request trace_headers prompt_adapter_request priority"
)


OFFLINE_GENERATE = (
    "prompts sampling_params use_tqdm lora_request priority tokenization_kwargs mm_processor_kwargs"
)
CHAT = """
    messages sampling_params use_tqdm lora_request priority chat_template chat_template_content_format
    add_generation_prompt continue_final_message tools chat_template_kwargs tokenization_kwargs mm_processor_kwargs
"""
BEAM_SEARCH = "prompts params lora_request use_tqdm concurrency_limit"

# The methods that all three have, and those of each: parameters as `inspect.signature` lists them in vLLM 0.32.
OF_ALL = {
    "sleep": "level mode",
    "wake_up": "tags",
    "add_lora": "lora_request",
    "remove_lora": "lora_id",
    "pin_lora": "lora_id",
    "collective_rpc": "method timeout args kwargs",
    "start_profile": "profile_prefix delay_iterations max_iterations",
}
OF_EACH: dict[type, dict[str, str]] = {
    AsyncLLM: OF_ALL
    | {
        "encode": """
            prompt pooling_params request_id lora_request trace_headers priority tokenization_kwargs
            reasoning_ended
        """,
        "pause_generation": "mode clear_cache",
        "update_weights": "request",
        "shutdown": "timeout",
    },
    LLM: OF_ALL
    | {
        "encode": "prompts pooling_params use_tqdm lora_request pooling_task tokenization_kwargs",
        "embed": "prompts use_tqdm pooling_params lora_request tokenization_kwargs",
        "classify": "prompts pooling_params use_tqdm lora_request tokenization_kwargs",
        "score": "data_1 data_2 use_tqdm pooling_params lora_request tokenization_kwargs chat_template",
        "apply_model": "func",
    },
    LLMEngine: OF_ALL | {"apply_model": "func"},
}


def names(listed: str, *classes: type) -> Iterator[Any]:
    for one in classes:
        yield from (pytest.param(one, name, id=f"{one.__name__}.{name}") for name in listed.split())


@pytest.mark.parametrize(
    ("face", "name"),
    [
        *names(ASYNC_LLM, AsyncLLM),
        *names(LLM_ENGINE, LLMEngine),
        *names(LLM_METHODS, LLM),
        *names(MANAGER, RequestManager),
    ],
)
def test_the_name_is_there_and_says_what_it_is(face: type, name: str) -> None:
    if name == "llm_engine":
        assert "self.llm_engine" in inspect.getsource(face.__init__)  # type: ignore[misc]
        return
    assert inspect.getdoc(getattr(face, name))


REFUSING = [(AsyncLLM, ASYNC_METHODS), (LLMEngine, METHODS), (LLM, OFFLINE_METHODS)]


@pytest.mark.parametrize(
    ("face", "name"), [(face, name) for face, methods in REFUSING for name in methods], ids=str
)
def test_what_is_not_offered_raises_a_typed_error_that_names_it(face: type, name: str) -> None:
    empty: object = object.__new__(face)
    with pytest.raises(UnsupportedFeature, match=f"^{name} is not offered: .+") as caught:
        getattr(empty, name)("anything", level=1)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        *((AsyncLLM.__init__, name) for name in CONSTRUCTOR.split()),
        *((AsyncLLM.from_engine_args, name) for name in FROM_ENGINE_ARGS.split()),
        *((AsyncLLM.generate, name) for name in GENERATE.split()),
        *((AsyncLLM.from_vllm_config, name) for name in FROM_VLLM_CONFIG.split()),
        *((AsyncLLM.add_request, name) for name in ADD_REQUEST.split()),
        *((AsyncLLM.reset_prefix_cache, name) for name in "reset_running_requests reset_connector".split()),
        *((AsyncLLM.abort, name) for name in "request_id internal".split()),
        *((AsyncLLM.stream_generate, name) for name in GENERATE.split()),
        *((LLMEngine.__init__, name) for name in LLM_ENGINE_CONSTRUCTOR.split()),
        *((LLM.generate, name) for name in OFFLINE_GENERATE.split()),
        *((LLM.chat, name) for name in CHAT.split()),
        *((LLM.beam_search, name) for name in BEAM_SEARCH.split()),
        *((LLM.reset_prefix_cache, name) for name in "reset_running_requests reset_connector".split()),
        *((LLMEngine.from_engine_args, name) for name in "engine_args usage_context stat_loggers".split()),
        *(
            (LLMEngine.from_vllm_config, name)
            for name in FROM_VLLM_CONFIG.split()
            if name != "start_engine_loop"
        ),
        *((LLMEngine.add_request, name) for name in ADD_REQUEST.split()),
        *((LLMEngine.abort_request, name) for name in "request_ids internal".split()),
        *((LLMEngine.reset_prefix_cache, name) for name in "reset_running_requests reset_connector".split()),
        *(
            (getattr(face, method), name)
            for face, methods in OF_EACH.items()
            for method, listed in methods.items()
            for name in listed.split()
        ),
    ],
    ids=lambda value: getattr(value, "__qualname__", value),
)
def test_a_parameter_is_taken_or_refused_by_name(function: Any, name: str) -> None:
    parameters = inspect.signature(function).parameters
    takes_others = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    taken = set(parameters)
    if function in (
        AsyncLLM.add_request,
        AsyncLLM.stream_generate,
    ):  # hand what they do not name on to `generate`
        taken |= set(inspect.signature(AsyncLLM.generate).parameters)
    assert name in taken or (takes_others and name in PARAMETERS)


def refused(listed: str) -> list[str]:
    return [name for name in listed.split() if name in PARAMETERS]


@pytest.mark.parametrize(
    ("face", "name"),
    [
        *((AsyncLLM, name) for name in refused(CONSTRUCTOR)),
        *((LLMEngine, name) for name in refused(LLM_ENGINE_CONSTRUCTOR)),
    ],
)
def test_a_constructor_that_is_called_with_what_is_not_offered_refuses_it_by_name(
    face: Any, name: str
) -> None:
    with pytest.raises(UnsupportedFeature, match=f"^{name} is not offered: ."):
        face(EngineConfig(), **{name: "something"})


def test_a_constructor_takes_every_parameter_without_a_value() -> None:
    nothing: dict[str, Any] = dict.fromkeys(refused(CONSTRUCTOR))
    llm = AsyncLLM(EngineConfig(), **nothing)
    assert not llm.is_running


async def test_pieces_of_text_take_or_refuse_what_generate_does(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine, AsyncLLM.around(engine) as llm:
        names = [name for name in refused(GENERATE) if name != "prompt_adapter_request"]
        assert names
        for name in names:
            given: dict[str, Any] = {name: "something"}
            with pytest.raises(UnsupportedFeature, match=f"^{name} is not offered: ."):
                llm.stream_generate("ABC", **given)
        params = SamplingParams(max_tokens=2, seed=1)
        pieces = llm.stream_generate("ABC", params, priority=1, **dict.fromkeys(names))
        assert len([piece async for piece in pieces]) == 2


@pytest.mark.parametrize(
    ("output", "listed"),
    [
        (
            RequestOutput,
            (
                "request_id prompt prompt_token_ids prompt_logprobs outputs finished metrics lora_request "
                "num_cached_tokens num_cache_creation_tokens kv_transfer_params encoder_prompt "
                "encoder_prompt_token_ids prompt_token_id_logprobs ec_transfer_params"
            ),
        ),
        (
            CompletionOutput,
            (
                "index text token_ids cumulative_logprob logprobs finish_reason stop_reason lora_request "
                "routed_experts sampling_mask spec_decode_metrics weight_versions"
            ),
        ),
        (
            RequestMetrics,
            (
                "num_generation_tokens num_preemptions arrival_time queued_ts scheduled_ts first_token_ts "
                "last_token_ts first_token_latency"
            ),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_outputs_have_their_fields(output: type, listed: str) -> None:
    assert set(listed.split()) <= set(dir(output)) | set(inspect.signature(output).parameters)


def test_statuses_have_their_names() -> None:
    assert {status.value for status in RequestStatus} == {
        "waiting",
        "running",
        "completed",
        "cancelled",
        "failed",
    }
