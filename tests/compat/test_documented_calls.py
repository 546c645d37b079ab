"""Calls as the documents of vLLM's versions write them: positions, prompts, ids, and parts that are not there."""

from __future__ import annotations

import asyncio
import copy
import inspect
from importlib import import_module
from typing import Any

import pytest
from trio.testing import MockClock

from tests.actors.harness import FakeExecutor, LetterTokenizer, answer_of, fake_engine, model_info
from tests.bridge.harness import FastExecutor, no_thread_is_left
from tests.compat.vllm_arguments import VLLM_DEFAULTS
from tests.core.fake_model import FakeModel
from tests.server.routes.harness import HELLO, serving
from triolet.actors.executors.group import LocalGroup
from triolet.actors.executors.in_process import InlineExecutor, ThreadExecutor
from triolet.actors.executors.process import ProcessExecutor
from triolet.actors.executors.remote.executor import RemoteExecutor, RemoteGroup
from triolet.compat import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    BeamSearchParams,
    EngineArgs,
    EngineCoreRequest,
    LLMEngine,
    LoRARequest,
    PoolingParams,
    RequestManager,
    SamplingParams,
    StreamingRequest,
    UsageContext,
)
from triolet.compat.refusals import ASYNC_ATTRIBUTES, ENGINE_ATTRIBUTES, STAND_INS
from triolet.config.engine import EngineConfig
from triolet.config.vllm_names import ELSEWHERE
from triolet.errors import ConfigError, EngineClosed, InvalidPrompt, InvalidRequest, UnsupportedFeature

PARAMS = SamplingParams(max_tokens=4, seed=3)
EXPECTED = answer_of([0, 1, 2], 3, 4)


def make_engine(**arguments: Any) -> LLMEngine:
    loaded: Any = (FakeModel(64, 4, 50), model_info(64, 4), LetterTokenizer())
    return LLMEngine(EngineConfig(), **arguments, loaded=loaded)


async def read(outputs: Any) -> tuple[int, ...]:
    return [tuple(output.outputs[0].token_ids) async for output in outputs][-1]


def run(engine: LLMEngine) -> dict[str, tuple[int, ...]]:
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = tuple(output.outputs[0].token_ids)
    return found


# -------------------------------------------------------------------------------- prompts, ids, positions


def core_request(**fields: Any) -> EngineCoreRequest:
    return EngineCoreRequest("inner", [0, 1, 2], None, PARAMS, None, 0.0, None, None, None, **fields)


PROMPTS = [
    core_request(),
    {"type": "token", "prompt_token_ids": [0, 1, 2]},
    {"type": "token", "prompt_token_ids": [0, 1, 2], "prompt": "ABC", "arrival_time": 1.0, "cache_salt": "s"},
    {"type": "text", "prompt": "ABC"},
]


@pytest.mark.parametrize("prompt", PROMPTS, ids=range(len(PROMPTS)))
async def test_prompts_of_the_engines_core_are_taken(prompt: Any, autojump_clock: MockClock) -> None:
    engine = make_engine()
    engine.add_request("r", prompt, PARAMS)
    assert run(engine) == {"r": EXPECTED}
    async with fake_engine() as native, AsyncLLM.around(native) as llm:
        assert await read(llm.generate(prompt, PARAMS, "r")) == EXPECTED


async def test_a_request_of_the_core_brings_what_the_call_does_not_say(autojump_clock: MockClock) -> None:
    request = core_request(priority=3)
    assert request.params is PARAMS
    async with fake_engine() as native, AsyncLLM.around(native) as llm:
        assert await read(llm.generate(request)) == EXPECTED
        assert await llm.add_request("s", request) is not None
        for name in ("mm_features", "prompt_embeds"):
            odd: dict[str, Any] = {name: [1]}
            with pytest.raises(InvalidRequest, match=f"^{name} must be None"):
                llm.generate(EngineCoreRequest("r", [1], **odd))
        with pytest.raises(InvalidPrompt, match="prompt_token_ids must be a list of integers; got None"):
            llm.generate(EngineCoreRequest("r", None))
        with pytest.raises(ValueError, match="data_parallel_rank"):
            llm.generate(EngineCoreRequest("r", [1], data_parallel_rank=2))


async def test_requests_may_be_numbered(autojump_clock: MockClock) -> None:
    async with fake_engine() as native, AsyncLLMEngine.around(native) as llm:
        numbers: Any = llm
        outputs = await numbers.add_request(0, "ABC", PARAMS)
        assert outputs.request_id == "0"
        assert numbers.get_request_status(0) == "waiting"
        await numbers.abort(0)
        await numbers.abort([0, "1"])
        assert numbers.get_request_status(0) == "cancelled"
        assert await read(numbers.generate("ABC", PARAMS, 7)) == EXPECTED
        manager: Any = RequestManager(llm)
        await manager.add_request(8, "ABC", PARAMS)
        assert await manager.get_request_status(8) in ("waiting", "running")
        for wrong in (True, 1.5, b"r"):
            with pytest.raises(TypeError, match="request_id must be a string"):
                numbers.generate("ABC", PARAMS, wrong)


async def test_arguments_after_the_named_ones_come_in_the_order_of_vllm(autojump_clock: MockClock) -> None:
    order = inspect.signature(AsyncLLM.encode).parameters
    assert list(order)[1:7] == [
        *("prompt", "pooling_params", "request_id", "lora_request", "trace_headers", "priority")
    ]
    assert list(inspect.signature(LLMEngine.add_request).parameters)[1:10] == [
        *("request_id", "prompt", "params", "arrival_time", "lora_request", "tokenization_kwargs"),
        *("trace_headers", "priority", "prompt_text"),
    ]
    assert list(inspect.signature(LLMEngine.__init__).parameters)[1:9] == [
        *("vllm_config", "executor_class", "log_stats", "aggregate_engine_logging", "usage_context"),
        *("stat_loggers", "mm_registry", "multiprocess_mode"),
    ]
    assert list(inspect.signature(LLM.chat).parameters)[1:12] == [
        *("messages", "sampling_params", "use_tqdm", "lora_request", "priority", "chat_template"),
        *("chat_template_content_format", "add_generation_prompt", "continue_final_message", "tools"),
        "chat_template_kwargs",
    ]
    assert list(inspect.signature(LLM.beam_search).parameters)[1:7] == [
        *("prompts", "params", "lora_request", "use_tqdm", "concurrency_limit", "priority")
    ]
    for function in (AsyncLLM.encode, LLMEngine.add_request, LLMEngine.__init__, LLM.chat, LLM.beam_search):
        kinds = [one.kind for one in inspect.signature(function).parameters.values()]
        assert set(kinds[:7]) == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_an_adapter_may_be_the_next_argument_of_chat_and_beam_search() -> None:
    llm = LLM(engine=make_engine())
    adapter = LoRARequest("a", 1, "/a")
    chat = [{"role": "user", "content": "ABC"}]
    with pytest.raises(InvalidRequest, match="LoRA is not enabled"):
        llm.beam_search(["ABC"], BeamSearchParams(beam_width=2, max_tokens=2), adapter)
    with pytest.raises(InvalidRequest, match="LoRA is not enabled"):
        llm.chat(chat, PARAMS, False, adapter)
    found = llm.generate(["ABC", "ABC"], PARAMS, use_tqdm=False, priority=2)
    assert [tuple(output.outputs[0].token_ids) for output in found] == [EXPECTED] * 2
    with pytest.raises(InvalidRequest, match=r"lengths of prompts \(1\) and priority \(2\)"):
        llm.beam_search(["ABC"], BeamSearchParams(beam_width=2, max_tokens=2), None, False, None, [1, 2])
    with pytest.raises(UnsupportedFeature, match=r"^concurrency_limit is not offered"):
        llm.beam_search(["ABC"], BeamSearchParams(beam_width=2, max_tokens=2), None, False, 3)


# ------------------------------------------------------------------------------------ engines that are made


def test_the_class_of_the_executor_may_be_named() -> None:
    for runner, kind in (
        ("inline", InlineExecutor),
        ("thread", ThreadExecutor),
        ("process", ProcessExecutor),
    ):
        config = EngineConfig.create(EngineConfig(), runner=runner)
        assert AsyncLLM._get_executor_cls(config) is kind
        assert not AsyncLLM(config, AsyncLLM._get_executor_cls(config), True).is_running
        with pytest.raises(UnsupportedFeature, match=r"^executor_class is not offered"):
            AsyncLLM(config, object())


@pytest.mark.parametrize(
    ("given", "runner"),
    [
        (None, "auto"),
        ("uni", "thread"),
        ("mp", "process"),
        ("ray", "ray"),
        ("remote", "remote"),
        ("vllm.v1.executor.multiproc_executor.MultiprocExecutor", "process"),
        ("vllm.v1.executor.ray_executor.RayDistributedExecutor", "ray"),
        (type("UniProcExecutor", (), {}), "thread"),
        (type("MultiprocExecutor", (), {}), "process"),
        (InlineExecutor, "inline"),
        (ThreadExecutor, "thread"),
        (ProcessExecutor, "process"),
        (LocalGroup, "process"),
        (RemoteExecutor, "remote"),
        (RemoteGroup, "remote"),
    ],
)
def test_executors_are_given_by_name_or_class_to_the_engine_and_its_arguments(
    given: Any, runner: str
) -> None:
    assert AsyncLLM(EngineConfig(), given).vllm_config.runner == runner
    args = AsyncEngineArgs(distributed_executor_backend=given)
    assert args.create_engine_config().runner == runner
    assert args.distributed_executor_backend == given


def test_an_executor_that_contradicts_the_configuration_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match="executor_class must be one for the configuration's runner 'thread'; got 'mp'"
    ):
        AsyncLLM(EngineConfig(runner="thread"), "mp")
    assert AsyncLLM(EngineConfig(runner="ray"), RemoteExecutor).vllm_config.runner == "ray"
    for wrong in ("external_launcher", "my.Executor", type("MyExecutor", (), {})):
        with pytest.raises(UnsupportedFeature, match=r"^executor_class is not offered: it must be None or"):
            AsyncLLM(EngineConfig(), wrong)
        with pytest.raises(
            UnsupportedFeature, match=r"^distributed_executor_backend is not offered: it must be"
        ):
            AsyncEngineArgs(distributed_executor_backend=wrong)


def test_an_engine_that_is_stepped_by_its_caller_takes_executors_of_its_own_process() -> None:
    assert make_engine(executor_class="uni") is not None
    with pytest.raises(UnsupportedFeature, match=r"executor_class is not offered: .*AsyncLLM takes others"):
        make_engine(executor_class="mp")


def test_flags_of_early_versions_pass_with_their_defaults_and_the_configuration_comes_first() -> None:
    quiet: dict[str, Any] = {"worker_use_ray": False, "engine_use_ray": False, "max_log_len": None}
    assert not AsyncLLMEngine(EngineConfig(), **quiet, log_requests=True, start_engine_loop=True).is_running
    for name in ("worker_use_ray", "engine_use_ray"):
        wrong: dict[str, Any] = {name: True}
        with pytest.raises(UnsupportedFeature, match=f"^{name} is not offered"):
            AsyncLLMEngine(EngineConfig(), **wrong)
    with pytest.raises(ConfigError, match="vllm_config must be an EngineConfig"):
        AsyncLLMEngine(False, False)  # type: ignore[arg-type]
    for place in UsageContext:
        assert not AsyncLLM(EngineConfig(), usage_context=place).is_running
        assert make_engine(usage_context=place).observability_config.otlp_traces_endpoint is None


def test_a_loop_that_was_not_started_is_started_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_fake(config: EngineConfig) -> object:
        return fake_engine(FastExecutor(step_s=0.001))

    monkeypatch.setattr("triolet.compat.async_llm.open_engine", open_fake)

    async def main() -> None:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(), start_engine_loop=False)
        assert llm.errored
        await llm.start_background_loop()
        assert llm.is_running
        with pytest.raises(RuntimeError, match="already running"):
            llm.start_background_loop()
        assert await read(llm.generate([0, 1, 2], PARAMS, "r")) == EXPECTED
        await llm.shutdown_background_loop()
        assert llm.errored

    with no_thread_is_left():
        asyncio.run(main())


async def test_under_trio_the_scope_starts_the_loop(autojump_clock: MockClock) -> None:
    with pytest.raises(EngineClosed):
        AsyncLLM(EngineConfig(), start_engine_loop=False).start_background_loop()
    async with fake_engine() as native, AsyncLLM.around(native) as llm:
        with pytest.raises(RuntimeError, match="already running"):
            llm.start_background_loop()


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_an_argument_of_vllm_without_a_counterpart_is_refused_by_name_and_let_through_without_a_value(
    name: str,
) -> None:
    values: tuple[Any, ...] = (None, False, {}, [], "")
    for nothing in values:
        given: dict[str, Any] = {name: nothing}
        assert getattr(AsyncEngineArgs(**given), name) == nothing
    assert getattr(AsyncEngineArgs(), name) in (None, VLLM_DEFAULTS.get(name))
    wrong: dict[str, Any] = {name: {"some": "thing"}}
    with pytest.raises(UnsupportedFeature, match=f"^{name} is not offered: .+"):
        EngineArgs(**wrong)


def test_a_runner_of_vllm_is_a_kind_of_model_and_one_of_triolet_a_place() -> None:
    default = EngineConfig().runner
    assert [EngineArgs(runner=name).config.runner for name in ("auto", "generate", "process")] == [
        *(default, default, "process")
    ]
    with pytest.raises(ConfigError, match="runner"):
        EngineArgs(runner="nowhere")


# ------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize(
    ("face", "name"),
    [
        *((AsyncLLM, name) for name in ASYNC_ATTRIBUTES),
        *((LLMEngine, name) for name in ENGINE_ATTRIBUTES),
    ],
)
def test_a_part_of_vllms_engine_is_not_there_and_says_so(face: type, name: str) -> None:
    engine: Any = make_engine() if face is LLMEngine else AsyncLLM(EngineConfig())
    assert not hasattr(engine, name)
    with pytest.raises(UnsupportedFeature, match=f"^{name} is not offered: .+"):
        getattr(engine, name)
    with pytest.raises(AttributeError):
        getattr(engine, name)


async def test_what_engines_tell_of_themselves_has_the_names_of_vllm(autojump_clock: MockClock) -> None:
    engine = make_engine()
    assert engine.should_execute_dummy_batch is False
    engine._cleanup_instance_caches(None)
    assert (engine.log_stats, engine.is_sleeping(), engine.get_weight_version()) == (True, False, "0")
    async with fake_engine() as native, AsyncLLM.around(native) as llm:
        assert (llm.log_stats, llm.stat_loggers) == (True, {})
        assert llm.model_config == await llm.get_model_config()
        assert llm.tokenizer.decode([0]) == (await llm.get_tokenizer(None)).decode([0])
        assert await llm.get_num_unfinished_requests() == 0
        assert await (await llm.get_tokenizer()).ping() is None  # type: ignore[func-returns-value]


async def test_a_manager_without_an_engine_can_be_made_and_not_used(autojump_clock: MockClock) -> None:
    manager = RequestManager()
    for call in (
        lambda: manager.add_request("r", "ABC", PARAMS),
        lambda: manager.add_request(StreamingRequest("r", "ABC")),
        lambda: manager.abort_request("r"),
        lambda: manager.get_request_status("r"),
    ):
        with pytest.raises(UnsupportedFeature, match="needs the engine of its requests"):
            await call()


def test_every_name_of_the_package_can_be_imported() -> None:
    package = import_module("triolet.compat")
    assert [name for name in package.__all__ if not hasattr(package, name)] == []


@pytest.mark.parametrize("name", sorted(STAND_INS))
def test_a_class_of_vllms_engine_can_be_imported_and_not_made(name: str) -> None:
    package = import_module("triolet.compat")
    kind = getattr(package, name)
    assert (kind.__name__, kind) == (name, getattr(package, name))
    assert name in dir(package)
    with pytest.raises(UnsupportedFeature, match=f"^{name} is not offered: .+"):
        kind("anything", model=1)


def test_arguments_read_as_they_were_given() -> None:
    for name, value in (
        ("enforce_eager", False),
        ("enable_sleep_mode", True),
        ("load_format", "safetensors"),
    ):
        given: dict[str, Any] = {name: value}
        assert getattr(AsyncEngineArgs(**given), name) == value
    assert copy.deepcopy(AsyncEngineArgs(enforce_eager=False)).enforce_eager is False
    assert AsyncEngineArgs().enforce_eager is False
    assert AsyncEngineArgs(enforce_eager=True).config.enforce_eager is True
    with pytest.raises(AttributeError, match="no_such_thing"):
        AsyncEngineArgs().no_such_thing  # noqa: B018


async def test_pooled_requests_are_for_encode(autojump_clock: MockClock) -> None:
    async with fake_engine() as native, AsyncLLM.around(native) as llm:
        with pytest.raises(UnsupportedFeature, match=r"encode\(\) takes them"):
            await llm.add_request("r", "ABC", PoolingParams())


async def test_profiles_of_so_many_steps_are_refused_by_name(autojump_clock: MockClock) -> None:
    async with fake_engine() as native, AsyncLLM.around(native) as llm:
        for name in ("delay_iterations", "max_iterations", "profiler_kwargs"):
            with pytest.raises(UnsupportedFeature, match=f"^{name} is not offered"):
                await llm.start_profile("a", **{name: 3})
            with pytest.raises(UnsupportedFeature, match=f"^{name} is not offered"):
                LLM(engine=make_engine()).start_profile("a", **{name: 3})


async def test_adapters_in_a_body_are_refused_and_say_what_to_ask_for(autojump_clock: MockClock) -> None:
    async with serving(FakeExecutor(64, 4)) as scene:
        for path, body in (
            ("/v1/chat/completions", HELLO),
            ("/v1/completions", {"model": HELLO["model"], "prompt": "ABC"}),
            ("/v1/responses", {"model": HELLO["model"], "input": "ABC"}),
        ):
            for name in ("lora_request", "prompt_adapter_request"):
                answer = await scene.post(path, {**body, name: {"lora_name": "a"}})
                assert answer.error == (400, "unsupported_parameter", name)
                assert "by its name, as the model" in answer.json["error"]["message"]
            assert (await scene.post(path, {**body, "lora_request": None})).status == 200
