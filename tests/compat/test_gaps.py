"""What programs for vLLM's versions write, item by item: arguments in their order, names, awaited answers, defaults."""

from __future__ import annotations

import inspect
from argparse import Namespace
from dataclasses import field, make_dataclass
from importlib import import_module
from typing import Any

import attrs
import pytest
import torch
from trio.testing import MockClock

from tests.actors.harness import FakeExecutor, LetterTokenizer, fake_engine, model_info
from tests.compat.vllm_arguments import CONFIGURATIONS, VLLM_DEFAULTS
from tests.core.fake_model import FakeModel
from triolet import SamplingParams, compat
from triolet.compat import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    EngineArgs,
    EngineClient,
    LLMEngine,
    LoRARequest,
    PromptAdapterRequest,
    RequestManager,
    RequestStatus,
    StreamingRequest,
    UsageContext,
    VllmConfig,
)
from triolet.compat.engine_args import DEFAULTS
from triolet.compat.views import Tokenizer
from triolet.config.engine import EngineConfig
from triolet.config.vllm_names import DROPPED
from triolet.errors import (
    AdapterError,
    ConfigError,
    EngineClosed,
    InvalidRequest,
    StreamMisused,
    UnsupportedFeature,
)
from triolet.nano import PATH

PARAMS = SamplingParams(max_tokens=3, seed=1)
KEPT = ["gpu_memory_utilization"]  # has another default here
NAMES = """
    PoolingParams EmbeddingRequestOutput PoolingRequestOutput LoRARequest PromptAdapterRequest VllmConfig ModelConfig
    StatLoggerBase UsageContext PromptType EngineClient AnyTokenizer EngineCoreRequest
"""


@pytest.mark.parametrize("name", NAMES.split())
def test_a_name_that_programs_import_is_there(name: str) -> None:
    assert getattr(import_module("triolet.compat"), name) is not None
    assert name in compat.__all__


def order(function: Any, names: str) -> None:
    parameters = list(inspect.signature(function).parameters.values())
    assert all(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters[: len(names.split())])
    assert [one.name for one in parameters][: len(names.split())] == names.split()


def test_arguments_come_in_the_order_of_vllm() -> None:
    start = "self request_id prompt params arrival_time lora_request"
    order(
        AsyncLLM.generate,
        "self prompt sampling_params request_id lora_request trace_headers prompt_adapter_request",
    )
    order(AsyncLLM.add_request, start)
    order(LLMEngine.add_request, f"{start} tokenization_kwargs trace_headers priority")
    order(AsyncLLM.__init__, "self vllm_config executor_class log_stats")
    order(
        LLMEngine.__init__, "self vllm_config executor_class log_stats aggregate_engine_logging usage_context"
    )
    order(StreamingRequest, "request_id prompt sampling_params arrival_time lora_request")


def test_what_programs_ask_vllms_parameters_can_be_asked() -> None:
    params = SamplingParams(stop_token_ids=[3, 4], logprobs=2)
    assert (params.all_stop_token_ids, params.num_logprobs) == ({3, 4}, 2)
    assert params.clone() == params
    assert SamplingParams(logprobs=0).num_logprobs == 0
    assert SamplingParams(logprob_token_ids=[5, 6, 7]).num_logprobs == 3
    assert (SamplingParams().num_logprobs, SamplingParams().all_stop_token_ids) == (None, set())
    with pytest.raises(UnsupportedFeature, match=r"^verify is not offered: "):
        params.verify("model_config", None, None, None)


async def test_positional_calls_without_a_value_pass_and_adapters_need_an_engine_with_them(
    autojump_clock: MockClock,
) -> None:
    async with fake_engine() as engine, AsyncLLM.around(engine) as llm:
        outputs = [output async for output in llm.generate("ABC", PARAMS, "r", None, None, None, 0)]
        assert outputs[-1].finished
        with pytest.raises(InvalidRequest, match="LoRA is not enabled"):
            await anext(llm.generate("ABC", PARAMS, "s", LoRARequest("a", 1, "/a")))
        with pytest.raises(AdapterError, match="this model takes no prompt adapters"):
            await anext(llm.generate("ABC", PARAMS, "s", prompt_adapter_request=adapter()))
        generation = await llm.add_request("v", "ABC", PARAMS)
        with pytest.raises(UnsupportedFeature, match=r"^get_nowait is not offered"):
            generation.get_nowait()
        while not (output := await generation.get()).finished:
            pass
        assert len(output.outputs[0].token_ids) == 3
        with pytest.raises(StreamMisused, match="its last output has been read"):
            await generation.get()
        generation = await llm.add_request("t", "ABC", PARAMS, None, None, None, None, 0)
        assert [output async for output in generation][-1].finished
        with pytest.raises(UnsupportedFeature, match=r"^arrival_time is not offered"):
            await llm.add_request("u", "ABC", PARAMS, 3.0)


def adapter() -> PromptAdapterRequest:
    return PromptAdapterRequest("p", 1, "/p", 8)


async def test_what_some_versions_await_may_be_awaited(autojump_clock: MockClock) -> None:
    class Logger:
        def record(self, *arguments: object) -> None: ...

    async with fake_engine() as engine, AsyncLLM.around(engine) as llm:
        assert llm.get_num_unfinished_requests() == 0
        assert await llm.get_num_unfinished_requests() == 0
        tokenizer = await llm.get_tokenizer(None)
        assert tokenizer.encode("AB") == llm.get_tokenizer().encode("AB") == [0, 1]
        await tokenizer.ping()
        logger: Any = Logger()
        await llm.add_logger("mine", logger)
        await llm.remove_logger("mine")
        await llm.reset_mm_cache()
        await llm.reset_encoder_cache()
        assert await llm.list_loras() == set()
        assert isinstance(llm, EngineClient)
        assert llm.dead_error is None
        await llm.shutdown_background_loop()
        assert isinstance(llm.dead_error, EngineClosed)


async def test_a_request_manager_takes_a_request_by_its_fields_and_keeps_it(
    autojump_clock: MockClock,
) -> None:
    async with fake_engine(FakeExecutor(64, 4)) as engine, AsyncLLM.around(engine) as llm:
        manager = RequestManager(llm)
        await manager.add_request("r", "ABC", PARAMS)  # the result is dropped, and the request goes on
        await manager.add_request("s", None, PARAMS, prompt_token_ids=[1, 2])
        assert await manager.get_request_status("r") in (RequestStatus.WAITING, RequestStatus.RUNNING)
        while llm.has_unfinished_requests():
            await engine._progress.stepped.park()
        assert [await manager.get_request_status(name) for name in "rs"] == [RequestStatus.COMPLETED] * 2
        request = StreamingRequest("t", "ABC", PARAMS, None, None)
        assert [output async for output in await manager.add_request(request)][-1].finished


def test_arguments_with_the_defaults_of_vllm_pass_and_can_be_read() -> None:
    given: dict[str, Any] = {name: DEFAULTS[name] for name in DEFAULTS}
    args = AsyncEngineArgs(**given)
    for name in DROPPED:
        assert getattr(args, name) == DEFAULTS[name]
        assert getattr(EngineArgs(), name) == DEFAULTS[name]
        for value in (True, "something", 17):
            wrong: dict[str, Any] = {name: value}
            with pytest.raises(UnsupportedFeature, match=f"^{name} is not offered"):
                EngineArgs(**wrong)
    assert args.tensor_parallel_size == 1
    assert EngineArgs(quantization="int8").config.quantization == "int8"


def test_every_default_of_vllm_may_be_spelled_out() -> None:
    for name, value in VLLM_DEFAULTS.items():
        assert AsyncEngineArgs(**{name: value}).config == AsyncEngineArgs().config or name in KEPT, name
    kind = make_dataclass("Settings", [("size", int, field(default=3))])
    whole = {**VLLM_DEFAULTS, **{name: kind() for name in CONFIGURATIONS}}
    config = AsyncEngineArgs(**whole).config
    assert config == attrs.evolve(EngineConfig(), **{name: VLLM_DEFAULTS[name] for name in KEPT})
    for name in CONFIGURATIONS:
        with pytest.raises(UnsupportedFeature, match=f"^{name} is not offered"):
            AsyncEngineArgs(**{name: kind(4)})


@pytest.mark.parametrize(
    "name", ["nnodes", "optimization_level", "watermark", "use_tqdm_on_load", "ubatch_size"]
)
def test_another_value_than_the_default_of_vllm_is_refused_by_name(name: str) -> None:
    wrong: dict[str, Any] = {name: 5}
    with pytest.raises(UnsupportedFeature, match=f"^{name} is not offered"):
        AsyncEngineArgs(**wrong)


def test_the_default_of_an_argument_that_is_not_honoured_can_be_read() -> None:
    assert (EngineArgs().nnodes, EngineArgs().mm_processor_cache_type) == (1, "lru")


def test_the_formats_of_gpt_oss_may_have_the_names_that_vllm_gives_them() -> None:
    assert EngineConfig(tool_parser="openai").tool_parser == "gpt_oss"
    assert EngineArgs(reasoning_parser="openai_gptoss").config.reasoning_parser == "gpt_oss"
    assert EngineArgs(reasoning_parser="deepseek_r1").config.reasoning_parser == "deepseek_r1"
    with pytest.raises(ConfigError, match="reasoning_parser must be "):
        EngineArgs(reasoning_parser="step3")


def test_the_kinds_of_models_of_vllm_mean_what_the_folder_says() -> None:
    for given in ({"runner": "pooling"}, {"convert": "none"}, {"runner": "pooling", "convert": "auto"}):
        assert EngineArgs(**given).config == EngineConfig()  # type: ignore[arg-type]
    assert EngineArgs(runner="pooling", convert="embed").config.convert == "embed"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hf_overrides", {"rope_theta": 1.0}),
        ("override_generation_config", {"temperature": 0.5}),
        ("logits_processors", ["a:B"]),
        ("kv_transfer_config", {"kv_connector": "x"}),
        ("enable_prompt_embeds", True),
        ("pipeline_parallel_size", 2),
    ],
)
def test_arguments_of_a_command_line_are_honoured_or_refused_as_those_of_a_program(
    name: str, value: object
) -> None:
    with pytest.raises(UnsupportedFeature, match=f"^{name}(=2)? is not offered"):
        EngineArgs.from_cli_args(Namespace(**{**VLLM_DEFAULTS, name: value}))


def test_a_command_line_with_all_defaults_of_vllm_gives_the_default_configuration() -> None:
    spelled = Namespace(**VLLM_DEFAULTS, port=8000, uvicorn_log_level="info")
    args = AsyncEngineArgs.from_cli_args(spelled)
    assert args.config == attrs.evolve(EngineConfig(), **{name: VLLM_DEFAULTS[name] for name in KEPT})
    spelled.hf_overrides = {"classifier_from_token": ["no", "yes"]}
    assert EngineArgs.from_cli_args(spelled).config.classifier_from_token == ("no", "yes")


def test_an_engine_takes_a_configuration_that_was_made_before_and_a_usage_context_of_none() -> None:
    config = VllmConfig(max_num_seqs=3)
    made = AsyncLLM.from_engine_args(EngineArgs(), engine_config=config)
    assert made.vllm_config.max_num_seqs == 3
    assert not AsyncLLM.from_engine_args(EngineArgs(), engine_config=None).is_running
    assert not AsyncLLM.from_engine_args(EngineArgs(), usage_context=UsageContext.API_SERVER).is_running
    with pytest.raises(InvalidRequest, match=r"^usage_context must be a UsageContext; got 'somewhere'"):
        AsyncLLM.from_engine_args(EngineArgs(), usage_context="somewhere")
    early = AsyncLLM.from_engine_args(EngineArgs(), config, False, UsageContext.LLM_CLASS, None)  # type: ignore[arg-type]
    assert early.vllm_config.max_num_seqs == 3
    assert not AsyncLLM.from_engine_args(EngineArgs(), None, True).is_running  # type: ignore[arg-type]
    assert not AsyncLLM(EngineConfig(), None, True).is_running


def test_llm_engine_takes_positional_arguments_and_clears_caches_that_it_does_not_have() -> None:
    loaded: Any = (FakeModel(64, 4, 50), model_info(64, 4), LetterTokenizer())
    engine = LLMEngine(EngineConfig(), None, False, False, None, None, loaded=loaded)
    engine.reset_mm_cache()
    engine.reset_encoder_cache()
    assert engine.list_loras() == set()
    assert engine.add_request("r", "ABC", PARAMS, None, None, None, None, 0) == "r"
    with pytest.raises(UnsupportedFeature, match=r"^arrival_time is not offered"):
        engine.add_request("s", "ABC", PARAMS, 1.0)


@pytest.mark.slow
def test_the_tokenizer_has_what_transformers_has() -> None:
    from transformers import AutoTokenizer

    own: Any = AutoTokenizer.from_pretrained(str(PATH))
    tokenizer = Tokenizer(LetterTokenizer(), str(PATH))
    assert tokenizer("Hello")["input_ids"] == own("Hello")["input_ids"]
    assert tokenizer.batch_decode([[5, 6], [7]]) == own.batch_decode([[5, 6], [7]])
    assert (tokenizer.eos_token_id, len(tokenizer)) == (own.eos_token_id, len(own))
    assert tokenizer.convert_ids_to_tokens([5]) == own.convert_ids_to_tokens([5])
    assert tokenizer.encode("AB") == [0, 1]  # as the engine encodes


CHAT = [{"role": "user", "content": "Hello?"}]
OTHERS = [CHAT, [{"role": "user", "content": "Who are you?"}]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "options"),
    [
        ("encode", ("Hello, you",), {"add_special_tokens": False}),
        ("encode", ("Hello, you", "and you"), {}),
        ("encode", ("Hello, you",), {"truncation": True, "max_length": 2}),
        ("decode", ([719, 5, 4],), {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}),
        ("decode", ([[719, 5], [4]],), {}),
        ("decode", (torch.tensor([719, 5]),), {}),
        ("apply_chat_template", (CHAT,), {"tokenize": False}),
        ("apply_chat_template", (CHAT, None), {"add_generation_prompt": True, "return_dict": False}),
        ("apply_chat_template", (CHAT,), {"add_generation_prompt": True, "return_dict": True}),
        ("apply_chat_template", (OTHERS,), {"tokenize": False, "add_generation_prompt": True}),
        ("apply_chat_template", (OTHERS,), {"padding": True, "return_dict": True}),
        ("apply_chat_template", (CHAT,), {"tokenize": False, "continue_final_message": True}),
        (
            "apply_chat_template",
            (CHAT,),
            {"tokenize": False, "chat_template": "{{ messages[0].content }}{{ mood }}", "mood": "!"},
        ),
    ],
)
def test_the_tokenizer_takes_the_calls_of_transformers(
    name: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    from transformers import AutoTokenizer

    own: Any = AutoTokenizer.from_pretrained(str(PATH))
    tokenizer = LLM(str(PATH), num_gpu_blocks_override=8).get_tokenizer()
    found, expected = (getattr(one, name)(*arguments, **options) for one in (tokenizer, own))
    if options.get("return_dict"):
        found, expected = dict(found), dict(expected)
    assert found == expected


def test_a_second_request_of_an_id_is_what_either_version_of_vllm_raises() -> None:
    loaded: Any = (FakeModel(64, 4, 50), model_info(64, 4), LetterTokenizer())
    engine = LLMEngine(EngineConfig(), loaded=loaded)
    engine.add_request("r", "ABC", PARAMS)
    for kind in (KeyError, ValueError, InvalidRequest):
        with pytest.raises(kind) as caught:
            engine.add_request("r", "ABC", PARAMS)
        assert str(caught.value) == "request_id must not belong to a live request; got 'r'"
