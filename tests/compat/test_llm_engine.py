"""vLLM's `LLMEngine` and `LLM`, over the fake model: no Trio, the same answers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Self

import pytest

from tests.actors.harness import LetterTokenizer, answer_of, model_info
from tests.core.fake_model import REPETITIVE, FakeModel
from tests.source_tree import ROOT, SRC
from triolet.compat import LLM, EngineCoreRequest, LLMEngine, LoRARequest, SamplingParams
from triolet.compat.engine_args import AsyncEngineArgs, EngineArgs
from triolet.config.engine import EngineConfig
from triolet.core.output.outputs import RequestOutput
from triolet.core.request import request_builder
from triolet.core.request.params import RequestOutputKind
from triolet.core.request.request import FinishReason
from triolet.core.step_plan import StepPlan, StepResult
from triolet.errors import (
    ConfigError,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RequestIdInUse,
    UnsupportedFeature,
)

NUM_BLOCKS, BLOCK_SIZE, VOCAB = 64, 4, 50


class FakeRunner(FakeModel):
    """The fake model, as a runner; `fault` is called before every step."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_SIZE, VOCAB)
        self.fault: Callable[[StepPlan], None] = lambda plan: None

    def execute(self, plan: StepPlan) -> StepResult:
        self.fault(plan)
        return super().execute(plan)

    def reset(self) -> None:
        self.rows.clear()


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def engine(runner: FakeRunner) -> LLMEngine:
    return make_engine(runner)


def make_engine(runner: FakeRunner | None = None, **fields: Any) -> LLMEngine:
    config = EngineConfig.create(EngineConfig(max_num_seqs=4, max_num_batched_tokens=16), **fields)
    ticks = iter(range(1_000_000))
    loaded = (runner or FakeRunner(), model_info(NUM_BLOCKS, BLOCK_SIZE), LetterTokenizer())
    return LLMEngine(config, loaded=loaded, clock=lambda: next(ticks) * 0.001)


def run(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    found: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
        engine.check_health()
    return found


def seeded(seed: int, max_tokens: int = 6, **fields: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, **fields)


# ------------------------------------------------------------------------------------------- LLMEngine


def test_every_request_gets_its_answer_step_by_step(engine: LLMEngine) -> None:
    for seed in range(9):
        assert engine.add_request(f"r{seed}", {"prompt_token_ids": [seed] * 5}, seeded(seed)) == f"r{seed}"
    assert engine.get_num_unfinished_requests() == 9
    found = run(engine)
    for seed in range(9):
        lengths = [len(output.outputs[0].token_ids) for output in found[f"r{seed}"]]
        assert lengths == [1, 2, 3, 4, 5, 6]
        assert found[f"r{seed}"][-1].outputs[0].token_ids == answer_of([seed] * 5, seed, 6)
    assert engine.get_num_unfinished_requests() == 0
    assert engine.statistics().kv_blocks_in_use == 0


def test_a_plan_for_several_steps_gives_each_token_once_in_order_and_one_for_each_step(
    runner: FakeRunner,
) -> None:
    longest: list[int] = []
    runner.fault = lambda plan: longest.append(plan.num_steps)
    engine = make_engine(runner, num_scheduler_steps=4)
    engine.add_request("a", [1, 2, 3], seeded(5, 12, output_kind=RequestOutputKind.DELTA))
    told: dict[str, list[tuple[int, ...]]] = {"a": [], "b": []}
    while engine.has_unfinished_requests():
        for output in engine.step():
            told[output.request_id].append(tuple(output.outputs[0].token_ids))
        if len(told["a"]) == 3 and not told["b"]:  # in the middle of a plan: it joins the next step
            engine.add_request("b", [4, 5], seeded(6, 9, output_kind=RequestOutputKind.DELTA))
            told["b"].append(())
    assert max(longest) == 4
    assert told["a"] == [(token_id,) for token_id in answer_of([1, 2, 3], 5, 12)]
    assert told["b"] == [(), *((token_id,) for token_id in answer_of([4, 5], 6, 9))]
    assert engine.statistics().kv_blocks_in_use == 0


def test_a_text_is_tokenized_and_stop_strings_end_it(engine: LLMEngine) -> None:
    whole = "".join(chr(65 + token_id) for token_id in answer_of([0, 1, 2], 3, 12))
    engine.add_request("r", "ABC", seeded(3, 12, stop=[whole[4:6]]))
    output = run(engine)["r"][-1]
    assert (output.text, output.outputs[0].stop_reason) == (whole[:4], whole[4:6])
    assert output.prompt == "ABC"


def test_n_answers_to_one_prompt_end_together_and_count_as_n(engine: LLMEngine) -> None:
    params = seeded(5, 4, n=3, output_kind=RequestOutputKind.FINAL_ONLY)
    engine.add_request("parent", {"prompt_token_ids": [1, 2, 3, 4, 5]}, params)
    assert engine.get_num_unfinished_requests() == 3
    [output] = run(engine)["parent"]
    assert [one.token_ids for one in output.outputs] == [
        answer_of([1, 2, 3, 4, 5], seed, 4) for seed in (5, 6, 7)
    ]


def test_an_aborted_request_gives_what_it_has_and_its_id_back(engine: LLMEngine) -> None:
    engine.add_request("r", [1, 2, 3], seeded(1, 50))
    engine.step()
    engine.step()
    engine.abort_request(["r", "unknown"])
    engine.abort_request("r")
    [output] = engine.step()
    assert (output.finished, output.finish_reason) == (True, FinishReason.ABORT)
    assert output.outputs[0].token_ids == answer_of([1, 2, 3], 1, 2)
    engine.add_request("r", [1], seeded(1))
    assert run(engine)["r"][-1].finish_reason is FinishReason.LENGTH
    assert engine.statistics().kv_blocks_in_use == 0


def test_a_failing_step_is_raised_and_computed_again(engine: LLMEngine, runner: FakeRunner) -> None:
    def fail_once(plan: StepPlan) -> None:
        if plan.step_id == 3:
            raise OSError("planted")

    runner.fault = fail_once
    for seed in range(3):
        engine.add_request(str(seed), [seed] * 5, seeded(seed))
    engine.step()
    engine.step()
    with pytest.raises(OSError, match="planted"):
        engine.step()
    found = run(engine)
    for seed in range(3):
        assert found[str(seed)][-1].outputs[0].token_ids == answer_of([seed] * 5, seed, 6)


def test_a_request_that_fails_fails_alone(engine: LLMEngine, runner: FakeRunner) -> None:
    runner.failing.add("bad")
    for name in ("bad", "good"):
        engine.add_request(name, [1, 2, 3], seeded(1))
    found = run(engine)
    assert [output.finish_reason for output in found["bad"]] == [FinishReason.ERROR]
    assert found["good"][-1].finish_reason is FinishReason.LENGTH
    assert engine.statistics().num_requests_ended == {"error": 1, "length": 1}


def test_a_better_priority_is_answered_first() -> None:
    engine = make_engine(policy="priority", max_num_seqs=1)
    for name, priority in (("a", 2), ("b", 1), ("c", 0)):
        engine.add_request(name, [1, 2, 3], seeded(1), priority=priority)
    assert list(run(engine)) == ["c", "b", "a"]


def test_what_is_wrong_is_refused_and_nothing_stays() -> None:
    engine = make_engine(max_queued_requests=1, max_num_seqs=1)
    with pytest.raises(TypeError, match=r"request_id must be a string, got <class 'int'>"):
        engine.add_request(7, [1], seeded(1))  # type: ignore[arg-type]
    with pytest.raises(PromptTooLong):
        engine.add_request("long", [1] * 256, seeded(1))
    with pytest.raises(InvalidRequest, match="LoRA is not enabled"):
        engine.add_request("d", [1], seeded(1), lora_request=LoRARequest("a", 1, "/a"))
    with pytest.raises(InvalidRequest, match="lora_request must be a LoRARequest"):
        engine.add_request("d", [1], seeded(1), lora_request="a")  # type: ignore[arg-type]
    engine.add_request("a", [1], seeded(1))
    with pytest.raises(RequestIdInUse):
        engine.add_request("a", [1], seeded(1))
    engine.add_request("b", [1], seeded(1))
    with pytest.raises(Overloaded):
        engine.add_request("c", [1], seeded(1))
    with pytest.raises(TypeError, match="Unexpected keyword argument 'best_of'"):
        engine.add_request("d", [1], seeded(1), best_of=2)
    with pytest.raises(ValueError, match=r"data_parallel_rank must be in \[0, 1\)"):
        engine.add_request("d", [1], seeded(1), data_parallel_rank=1)
    assert run(engine).keys() == {"a", "b"}
    ended = engine.statistics().num_requests_ended
    assert engine.statistics().num_requests_received == sum(ended.values())


def test_the_prefix_cache_is_reset_when_no_request_is_there(engine: LLMEngine) -> None:
    engine.add_request("a", [1] * 20, seeded(1))
    engine.step()
    assert engine.reset_prefix_cache() is False
    run(engine)
    assert engine.reset_prefix_cache() is True
    assert engine.statistics().kv_blocks_cached == 0


WITHOUT_TRIO = """
import sys

class Barred:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "trio":
            raise ImportError("trio is barred here")

sys.meta_path.insert(0, Barred())

from tests.core.fake_model import REPETITIVE, FakeModel
from triolet.compat import LLM, LLMEngine, SamplingParams
from triolet.config.engine import EngineConfig
from triolet.core.request.model_info import ModelInfo

info = ModelInfo(folder="", architecture="", backend="native", vocab_size=50, max_position=99, max_model_len=99,
                 num_kv_blocks=64, block_size=4, dtype="float32", device="cpu")
llm = LLM(engine=LLMEngine(EngineConfig(), loaded=(FakeModel(64, 4, 50), info, None)))
[output] = llm.generate([1, 2, 3], SamplingParams(seed=1, max_tokens=6), use_tqdm=False)
print(*output.outputs[0].token_ids)
"""


@pytest.mark.slow
def test_it_is_imported_and_driven_without_trio() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{SRC}{os.pathsep}{ROOT}"}
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRIO], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [str(token_id) for token_id in answer_of([1, 2, 3], 1, 6)]


# ------------------------------------------------------------------------------------------------- LLM


@pytest.fixture
def llm(engine: LLMEngine) -> LLM:
    return LLM(engine=engine)


def test_a_batch_is_answered_in_its_order_with_parameters_for_each(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": [number] * 3} for number in range(7)]
    params = [seeded(number, 1 + number) for number in range(7)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for number, output in enumerate(outputs):
        assert output.outputs[0].token_ids == answer_of([number] * 3, number, 1 + number)
        assert output.finished


@pytest.mark.parametrize("prompts", ["ABC", ["ABC"], [0, 1, 2], {"prompt_token_ids": [0, 1, 2]}])
def test_one_prompt_may_come_in_any_form(llm: LLM, prompts: Any) -> None:
    [output] = llm.generate(prompts, seeded(1), use_tqdm=False)
    assert output.prompt_token_ids == (0, 1, 2)


def test_more_prompts_than_the_queue_holds_are_answered_all_the_same() -> None:
    llm = LLM(engine=make_engine(max_queued_requests=1, max_num_seqs=2))
    outputs = llm.generate(["A"] * 50, seeded(1, 2), use_tqdm=False)
    assert len(outputs) == 50


class Bar:
    """What a progress bar is told."""

    def __init__(self, total: int, desc: str, **more: object) -> None:
        self.total, self.num_updates, self.is_closed = total, 0, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.is_closed = True

    def update(self, number: int) -> None:
        self.num_updates += number


def test_the_progress_bar_counts_finished_requests(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    bars: list[Bar] = []

    def make(**arguments: Any) -> Bar:
        bars.append(Bar(**arguments))
        return bars[-1]

    llm.generate(["A", "B", "C"], seeded(1), use_tqdm=make)
    assert [(bar.total, bar.num_updates, bar.is_closed) for bar in bars] == [(3, 3, True)]
    llm.generate(["A", "B"], seeded(1))
    assert "2/2" in capsys.readouterr().err
    llm.generate(["A", "B"], seeded(1), use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_a_wrong_prompt_in_a_batch_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate(["A", "B", ""], seeded(1), use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.llm_engine.statistics().num_requests_live == 0
    with pytest.raises(
        InvalidRequest, match=r"The lengths of prompts \(2\) and params \(1\) must be the same"
    ):
        llm.generate(["A", "B"], [seeded(1)], use_tqdm=False)


def test_a_wrong_prompt_behind_more_than_the_queue_holds_is_refused_before_anything_is_computed(
    runner: FakeRunner,
) -> None:
    llm = LLM(engine=make_engine(runner, max_queued_requests=1, max_num_seqs=1))
    for wrong in ("", [VOCAB], {"prompt": "A", "odd": 1}):
        with pytest.raises(InvalidRequest):
            llm.generate(["A", "B", "C", "D", wrong], seeded(1), use_tqdm=False)
    wanted: list[SamplingParams] = [seeded(1)] * 4 + [seeded(1, n=100)]
    with pytest.raises(InvalidRequest, match="n must be at most"):
        llm.generate(["A", "B", "C", "D", "E"], wanted, use_tqdm=False)
    statistics = llm.llm_engine.statistics()
    assert (statistics.steps, statistics.num_requests_live) == (0, 0)


def test_an_interrupted_batch_leaves_nothing_behind(llm: LLM, runner: FakeRunner) -> None:
    def interrupt(plan: StepPlan) -> None:
        if plan.step_id == 3:
            raise KeyboardInterrupt

    runner.fault = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["A", "B"], seeded(1), use_tqdm=False)
    assert llm.llm_engine.statistics().num_requests_live == 0
    assert len(llm.generate(["A", "B"], seeded(1), use_tqdm=False)) == 2


def test_a_batch_leaves_the_outputs_of_the_engines_other_requests_to_their_own_steps(
    engine: LLMEngine,
) -> None:
    delta = seeded(3, 4, output_kind=RequestOutputKind.DELTA)
    engine.add_request("theirs", [1, 2], delta)
    engine.add_request("0", [3], delta)  # also the first id of the batch
    [ours] = LLM(engine=engine).generate([[1]], seeded(3, 9), use_tqdm=False)
    assert ours.outputs[0].token_ids == answer_of([1], 3, 9)
    found = run(engine)
    for name, prompt in {"theirs": [1, 2], "0": [3]}.items():
        told = [token_id for output in found[name] for token_id in output.outputs[0].token_ids]
        assert told == list(answer_of(prompt, 3, 4)) and found[name][-1].finished


def test_a_prompt_that_brings_its_parameters_is_answered_with_them(llm: LLM) -> None:
    own = EngineCoreRequest("theirs", [1, 2], sampling_params=seeded(3, 4))
    [with_its_own, with_the_models] = llm.generate([own, [1, 2]], use_tqdm=False)
    assert with_its_own.outputs[0].token_ids == answer_of([1, 2], 3, 4)
    assert len(with_the_models.outputs[0].token_ids) == 16
    [given] = llm.generate([own], seeded(3, 5), use_tqdm=False)
    assert given.outputs[0].token_ids == answer_of([1, 2], 3, 5)


# ---------------------------------------------------------------------------------------- engine arguments


def test_arguments_are_taken_by_vllms_names_and_by_ours() -> None:
    theirs = AsyncEngineArgs(
        "folder",
        dtype="half",
        num_gpu_blocks_override=32,
        scheduling_policy="priority",
        max_num_queued_reqs=7,
        served_model_name=["mine"],
        tensor_parallel_size=1,
        enable_chunked_prefill=True,
        disable_log_stats=True,
        otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces",
    )
    ours = EngineArgs(
        "folder",
        dtype="float16",
        num_kv_blocks=32,
        policy="priority",
        max_queued_requests=7,
        served_model_name="mine",
        log_stats=False,
        otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces",
    )
    assert theirs == ours
    assert theirs.create_engine_config().dtype == "float16"


def test_a_model_has_several_names_as_in_vllm() -> None:
    config = EngineArgs("folder", served_model_name=["mine", "ours"]).create_engine_config()
    assert (config.model_name, config.model_names) == ("mine", ("mine", "ours", "folder"))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"worker_use_ray": "yes"}, ConfigError),
        ({"worker_use_ray": True, "distributed_executor_backend": "mp"}, ConfigError),
        ({"distributed_executor_backend": "external_launcher"}, UnsupportedFeature),
        ({"distributed_executor_backend": object}, UnsupportedFeature),
        ({"engine_use_ray": True}, UnsupportedFeature),
        ({"gpu_memory_utilization": 1.5}, ConfigError),
        ({"pipeline_parallel_size": 2}, UnsupportedFeature),
        ({"fully_sharded_loras": True}, UnsupportedFeature),
        ({"quantization": "torchao"}, ConfigError),
        ({"generation_config": "a/folder"}, ConfigError),
        ({"speculative_config": {"method": "eagle3", "num_speculative_tokens": 3}}, UnsupportedFeature),
        ({"speculative_config": {"model": "a/draft", "num_speculative_tokens": 3}}, UnsupportedFeature),
        ({"speculative_config": "ngram"}, ConfigError),
        ({"max_log_len": -1}, InvalidRequest),
        ({"max_log_len": "all"}, InvalidRequest),
        ({"enable_log_requests": True, "disable_log_requests": True}, ConfigError),
        ({"no_such_thing": 1}, ConfigError),
    ],
)
def test_an_argument_that_is_not_honoured_is_refused_by_name(
    arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=next(iter(arguments))):
        AsyncEngineArgs(**arguments)


def test_an_engine_that_is_stepped_by_its_caller_plans_no_step_ahead() -> None:
    assert AsyncEngineArgs(async_scheduling=True).config.async_scheduling
    with pytest.raises(UnsupportedFeature, match="async_scheduling"):
        LLM(async_scheduling=True)


@pytest.mark.parametrize(
    ("arguments", "runner"),
    [
        ({"worker_use_ray": True}, "ray"),
        ({"worker_use_ray": True, "distributed_executor_backend": "ray"}, "ray"),
        ({"distributed_executor_backend": "ray"}, "ray"),
        ({"distributed_executor_backend": "mp"}, "process"),
        ({"distributed_executor_backend": "uni"}, "thread"),
        ({"distributed_executor_backend": "remote", "worker_listen": "h:1", "worker_token": "t"}, "remote"),
        ({"distributed_executor_backend": None, "worker_use_ray": False}, "auto"),
    ],
)
def test_vllms_names_of_where_the_model_is_computed_mean_a_runner(
    arguments: dict[str, Any], runner: str
) -> None:
    args = AsyncEngineArgs(**arguments)
    assert args.create_engine_config().runner == runner
    assert all(getattr(args, name) == value for name, value in arguments.items())
    assert (AsyncEngineArgs().distributed_executor_backend, AsyncEngineArgs().worker_use_ray) == (None, False)


def test_classes_that_compute_in_their_own_process_refuse_several() -> None:
    with pytest.raises(UnsupportedFeature, match=r"runner='ray'.*AsyncLLM"):
        LLM(worker_use_ray=True)
    with pytest.raises(UnsupportedFeature, match=r"tensor_parallel_size=2.*AsyncLLM"):
        LLM(tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        (None, {}),
        ({"method": "ngram", "num_speculative_tokens": 3}, {"prompt_lookup_min": 5}),
        ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}, {"prompt_lookup_min": 4}),
        (
            {"model": "[ngram]", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
            {"prompt_lookup_min": 2},
        ),
    ],
)
def test_speculation_by_ngrams_is_taken_by_vllms_names(given: Any, fields: dict[str, Any]) -> None:
    expected = {"speculative": "ngram", "num_speculative_tokens": 3, **fields} if fields else {}
    assert EngineArgs(speculative_config=given).config == EngineConfig(**expected)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"num_speculative_tokens": None}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"prompt_lookup_max": 2, "prompt_lookup_min": 3}, "prompt_lookup_max"),
        ({"prompt_lookup_max": "4"}, "prompt_lookup_m"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min"),
        ({"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size"),
    ],
)
def test_a_wrong_value_of_a_speculation_is_named(more: dict[str, Any], field: str) -> None:
    given = {"method": "ngram", "num_speculative_tokens": 3, **more}
    with pytest.raises((ConfigError, UnsupportedFeature), match=field):
        EngineArgs(speculative_config=given)


def test_an_engine_that_speculates_counts_what_came_of_it() -> None:
    speculating = make_engine(speculative="ngram", prompt_lookup_min=2)
    circle = {"prompt_token_ids": [1, 4, 6, 5, 2, 0] * 2}
    speculating.add_request("r", circle, seeded(REPETITIVE, max_tokens=40))
    assert run(speculating).keys() == {"r"}
    assert speculating.statistics().spec_decode_num_accepted_tokens > 0


# --------------------------------------------------------------- where it had parted from the engine


def test_the_answers_to_one_prompt_take_a_place_each() -> None:
    engine = make_engine(max_num_seqs=1, max_queued_requests=1)
    with pytest.raises(InvalidRequest, match="n must be at most 2"):
        engine.add_request("r", [1, 2, 3], seeded(1, n=100))
    engine.add_request("one", [1, 2, 3], seeded(1))
    with pytest.raises(Overloaded):
        engine.add_request("two", [1, 2, 3], seeded(1, n=2))
    assert len(run(engine)) == 1


def test_logprobs_of_a_prompt_are_limited_by_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_builder, "MAX_PROMPT_ENTRIES", 10)
    engine = make_engine()
    with pytest.raises(InvalidRequest, match="prompt_logprobs must be at most 1 for a prompt of 5 tokens"):
        engine.add_request("r", [1, 2, 3, 4, 5], seeded(1, prompt_logprobs=2))
    assert not engine.has_unfinished_requests()


def test_a_length_that_vllm_chooses_is_the_default_here() -> None:
    for given in (-1, "auto", None):
        assert EngineArgs(max_model_len=given).config == EngineArgs().config
    assert EngineArgs(generation_config="vllm").config.generation_config == "vllm"
    with pytest.raises(UnsupportedFeature, match="with `generation_config` vllm; requests give theirs"):
        EngineArgs(override_generation_config={"temperature": 0.5})


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "awq", "gguf"])
def test_quantization_is_honoured_as_by_the_engine(quantization: str) -> None:
    assert EngineArgs(quantization=quantization).config.quantization == quantization


def test_an_attention_backend_of_vllms_is_the_same_kernel_or_refused() -> None:
    assert EngineArgs(attention_backend="TRITON_ATTN").config.attention_backend == "triton"
    assert EngineArgs(attention_backend=None).config == EngineArgs().config
    assert EngineArgs(attention_backend="fa3").config.attention_backend == "fa3"
    with pytest.raises(
        ConfigError, match="attention_backend must be one of triton, auto, fa2, fa3, fa4; got 'FLASHINFER'"
    ):
        EngineArgs(attention_backend="FLASHINFER")


def test_no_quantization_is_none_as_in_vllm() -> None:
    assert EngineArgs(quantization=None).config == EngineArgs().config


def test_two_engines_have_different_indices_and_a_closed_one_gives_its_own_back() -> None:
    engine, other = make_engine(), make_engine()
    indices = {engine.statistics().engine_index, other.statistics().engine_index}
    assert len(indices) == 2
    del other
    assert make_engine().statistics().engine_index in range(2)


def test_a_request_that_crashes_the_runner_each_time_fails_alone(
    engine: LLMEngine, runner: FakeRunner
) -> None:
    def crash(plan: StepPlan) -> None:
        if any(start.request_id == "bad" for start in plan.starts):
            raise OSError("planted")

    runner.fault = crash
    engine.add_request("bad", [7] * 5, seeded(1))
    engine.add_request("good", [1] * 5, seeded(2))
    found: dict[str, RequestOutput] = {}
    for _ in range(40):
        try:
            found |= {output.request_id: output for output in engine.step()}
        except OSError:
            continue
    assert found["bad"].finish_reason is FinishReason.ERROR
    assert found["good"].outputs[0].token_ids == answer_of([1] * 5, 2, 6)
    assert not engine.has_unfinished_requests()
