"""`EngineArgs` as programs for vLLM use it beside making one: flags, `vars`, and values that are set afterwards."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from argparse import ArgumentParser
from typing import Any

import pytest

from tests.compat.test_llm_engine import FakeRunner, make_engine
from tests.compat.vllm_arguments import VLLM_DEFAULTS
from triolet.compat import (
    LLM,
    AsyncEngineArgs,
    EngineArgs,
    FlexibleArgumentParser,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from triolet.errors import ConfigError, UnsupportedFeature

NGRAM = {"speculative": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 5}


@pytest.mark.parametrize("kind", [EngineArgs, AsyncEngineArgs])
@pytest.mark.parametrize("parser_kind", [ArgumentParser, FlexibleArgumentParser])
def test_a_command_line_without_flags_is_the_defaults(
    kind: type[EngineArgs], parser_kind: type[ArgumentParser]
) -> None:
    parser = parser_kind()
    parser.add_argument("--mine", default=3)
    assert kind.add_cli_args(parser) is parser
    parsed = parser.parse_args([])
    assert kind.from_cli_args(parsed) == kind()
    whole = vars(parsed)
    assert whole.pop("mine") == 3 and kind(**whole) == kind()
    assert (parsed.swap_space, parsed.data_parallel_size, parsed.seed) == (4, 1, kind().seed)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("--model m --max-model-len 4k", {"model": "m", "max_model_len": 4000}),
        ("--max_model_len 4096 --tokenizer=my_folder", {"max_model_len": 4096, "tokenizer": "my_folder"}),
        ("--scheduling-policy priority --num-kv-blocks 7", {"policy": "priority", "num_kv_blocks": 7}),
        ("--num-gpu-blocks-override 7", {"num_kv_blocks": 7}),
        ("--no-enable-prefix-caching --async-scheduling", {"enable_prefix_caching": False, "async_scheduling": True}),
        ("--served-model-name a b,c", {"served_model_name": ("a", "b", "c")}),
        ('--speculative-config {"method":"ngram","num_speculative_tokens":3}', NGRAM),
        ("--swap-space 4 --pipeline-parallel-size 1 --tensor-parallel-size 2", {"tensor_parallel_size": 2}),
        ("--distributed-executor-backend mp --disable-log-stats", {"runner": "process", "log_stats": False}),
    ],
)  # fmt: skip
def test_flags_of_vllm_and_ours_are_arguments(words: str, given: dict[str, Any]) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    assert EngineArgs.from_cli_args(parser.parse_args(words.split())) == EngineArgs(**given)


@pytest.mark.parametrize("words", ["--swap-space 9", "--enable-expert-parallel", "--task reward"])
def test_a_flag_that_is_not_honoured_is_refused_by_name(words: str) -> None:
    parser = EngineArgs.add_cli_args(ArgumentParser())
    name = words.split()[0].strip("-").replace("-", "_")
    with pytest.raises(UnsupportedFeature, match=name):
        EngineArgs.from_cli_args(parser.parse_args(words.split()))


def test_an_argument_that_is_set_afterwards_is_honoured_or_refused() -> None:
    args = AsyncEngineArgs("m", max_model_len=64, policy="priority")
    args.max_model_len = 32
    args.scheduling_policy = "fair"
    args.enable_log_requests = True
    config = args.create_engine_config()
    assert (config.max_model_len, config.policy) == (args.max_model_len, args.policy) == (32, "fair")
    assert (args.enable_log_requests, args.disable_log_requests) == (True, False)
    with pytest.raises(ConfigError, match="max_model_len"):
        args.max_model_len = -7
    with pytest.raises(UnsupportedFeature, match="swap_space"):
        args.swap_space = 9
    with pytest.raises(ConfigError, match="max_modell_len"):
        args.max_modell_len = 7
    assert (args.max_model_len, args.create_engine_config()) == (32, config)


def test_the_variables_of_arguments_make_the_same_ones() -> None:
    args = EngineArgs("m", dtype="half", swap_space=4, num_gpu_blocks_override=9)
    assert EngineArgs(**vars(args)) == args == copy.deepcopy(args) == pickle.loads(pickle.dumps(args))  # noqa: S301
    assert vars(args)["dtype"] == args.dtype == "half"


def test_prompts_are_made_by_vllms_names() -> None:
    prompts = [
        TokensPrompt(prompt_token_ids=[1, 2]),
        TextPrompt(prompt="BC"),
        TokensPrompt(prompt_token_ids=[1, 2], cache_salt="s"),
    ]
    outputs = LLM(engine=make_engine(FakeRunner())).generate(
        prompts, SamplingParams(max_tokens=3, seed=3), use_tqdm=False
    )
    assert [output.prompt_token_ids for output in outputs] == [(1, 2)] * 3


GIVEN: list[dict[str, Any]] = [
    {},
    {"model": "m", "max_model_len": 128, "scheduling_policy": "fair", "swap_space": 4},
    {"policy": "priority", "num_kv_blocks": 7, "log_stats": False},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "distributed_executor_backend": "mp"},
    {"hf_overrides": {"classifier_from_token": ["no", "yes"]}, "disable_log_stats": True},
    {**NGRAM, "runner": "thread", "served_model_name": ["a", "b"]},
]  # fmt: skip


@pytest.mark.parametrize("kind", [EngineArgs, AsyncEngineArgs])
@pytest.mark.parametrize("given", GIVEN)
def test_arguments_are_a_dataclass_with_values_that_make_the_same_arguments(
    kind: type[EngineArgs], given: dict[str, Any]
) -> None:
    args: Any = kind(**given)
    values = dataclasses.asdict(args)
    assert kind(**values) == args
    assert dataclasses.replace(args) == args
    in_vllm = {"policy": "scheduling_policy", "num_kv_blocks": "num_gpu_blocks_override"}
    assert {name: values[in_vllm.get(name, name)] for name in given} == given


def test_the_fields_of_arguments_are_those_of_vllms_dataclass_and_our_own() -> None:
    fields = {field.name: field for field in dataclasses.fields(EngineArgs)}  # type: ignore[arg-type]
    assert VLLM_DEFAULTS.keys() | {"model", "fair_ttft_factor"} <= fields.keys()
    assert (fields["swap_space"].default, fields["max_model_len"].default) == (4, None)
    patterns: Any = fields["ignore_patterns"].default_factory
    assert patterns() == ["original/**/*"]


@pytest.mark.parametrize(
    ("before", "changes", "after"),
    [
        ({"max_num_seqs": 3}, {"max_model_len": 64}, {"max_num_seqs": 3, "max_model_len": 64}),
        (GIVEN[3], {"speculative_config": None}, {"runner": "process"}),
        ({"distributed_executor_backend": "mp"}, {"distributed_executor_backend": None}, {}),
        ({"disable_log_stats": True}, {"disable_log_stats": False}, {}),
        ({"log_stats": False}, {"seed": 3}, {"log_stats": False, "seed": 3}),
        ({"policy": "fair"}, {"scheduling_policy": "priority"}, {"policy": "priority"}),
    ],
)
def test_replaced_arguments_are_what_the_changed_ones_say(
    before: dict[str, Any], changes: dict[str, Any], after: dict[str, Any]
) -> None:
    args: Any = EngineArgs(**before)
    assert dataclasses.replace(args, **changes) == EngineArgs(**after)
    assert args == EngineArgs(**before)


def test_a_replaced_argument_is_checked() -> None:
    args: Any = EngineArgs()
    with pytest.raises(UnsupportedFeature, match="swap_space is not offered"):
        dataclasses.replace(args, swap_space=8)
    with pytest.raises(ConfigError, match="model_ must be a field"):
        dataclasses.replace(args, model_=3)


def test_requests_in_the_log_can_be_replaced_in_both_directions() -> None:
    args: Any = AsyncEngineArgs(enable_log_requests=True, max_log_len=3)
    assert dataclasses.replace(args, enable_log_requests=False) == AsyncEngineArgs(max_log_len=3)
    assert (
        dataclasses.replace(dataclasses.replace(args, enable_log_requests=False), enable_log_requests=True)
        == args
    )
