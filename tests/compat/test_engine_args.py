"""`EngineArgs` as programs for vLLM use it beside making one: flags, `vars`, and values that are set afterwards."""

from __future__ import annotations

import copy
import pickle
from argparse import ArgumentParser
from typing import Any

import pytest

from tests.compat.test_llm_engine import FakeRunner, make_engine
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
