"""Facts about the loaded model: the defaults of its requests, its tasks, and the layout of its cache."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from triolet.core.request.model_info import GenerationDefaults, LoadedModel, ModelInfo
from triolet.core.request.params import SamplingParams
from triolet.core.request.pooling_params import PoolingInfo
from triolet.errors import InvalidParams


def info(**fields: Any) -> ModelInfo:
    defaults: dict[str, Any] = {
        "folder": "/model",
        "architecture": "Tiny",
        "backend": "native",
        "vocab_size": 50,
        "max_position": 128,
        "max_model_len": 64,
        "num_kv_blocks": 9,
        "block_size": 4,
        "dtype": "bfloat16",
        "device": "cpu",
    }
    return ModelInfo(**(defaults | fields))


def test_a_model_without_defaults_has_those_of_every_request_and_an_answer_may_fill_the_context() -> None:
    assert GenerationDefaults().sampling_params() == SamplingParams(max_tokens=None)


def test_the_defaults_of_a_model_are_those_of_its_requests() -> None:
    defaults = GenerationDefaults(
        eos_token_ids=(2, 3),
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.2,
        max_new_tokens=33,
    )
    assert defaults.sampling_params() == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.2, max_tokens=33
    )


def test_of_the_defaults_of_a_model_only_what_ends_an_answer_is_left_where_those_of_vllm_are_chosen() -> None:
    defaults = GenerationDefaults(eos_token_ids=(2, 3), temperature=0.5, max_new_tokens=33)
    assert defaults.chosen_by("auto") == defaults
    assert defaults.chosen_by("vllm") == GenerationDefaults(eos_token_ids=(2, 3))


def test_a_default_of_zero_is_a_default() -> None:
    assert GenerationDefaults(temperature=0.0).sampling_params().temperature == 0.0


def test_a_default_out_of_its_range_is_refused() -> None:
    with pytest.raises(InvalidParams, match="top_p"):
        GenerationDefaults(top_p=3.0).sampling_params()


def test_a_model_generates_by_default_and_its_process_and_adapters_are_not_named() -> None:
    one = info()
    assert one.tasks == ("generate",)
    assert (one.cpu_kernels, one.process_id, one.pooling, one.adapters, one.soft_prompts) == (None,) * 5
    assert (one.calibration, one.generation, one.cache_windows) == ({}, GenerationDefaults(), (None,))


@pytest.mark.parametrize(
    ("generates", "pooled", "tasks"),
    [
        (True, ("embed", "score"), ("generate", "embed", "score")),
        (False, ("embed",), ("embed",)),
        (False, None, ()),
    ],
)
def test_tasks_are_generation_and_those_of_pooled_requests(
    generates: bool, pooled: tuple[str, ...] | None, tasks: tuple[str, ...]
) -> None:
    pooling = None if pooled is None else PoolingInfo(tasks=pooled)
    assert info(generates=generates, pooling=pooling).tasks == tasks


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_layout_of_the_cache_has_the_names_of_vllm(is_enabled: bool) -> None:
    assert info().cache_config(enable_prefix_caching=is_enabled) == {
        "block_size": 4,
        "num_gpu_blocks": 9,
        "cache_dtype": "bfloat16",
        "enable_prefix_caching": is_enabled,
    }


def test_facts_do_not_change_and_a_model_that_is_not_loaded_has_none() -> None:
    model = LoadedModel()
    assert (model.info, model.tokenizer) == (None, None)
    model.info = info()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        model.info.vocab_size = 51  # type: ignore[misc]
