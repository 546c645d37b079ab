"""A group of processes refuses what it does not honour, and results in which its ranks disagree."""

from __future__ import annotations

from typing import Any

import pytest

from triolet.actors.executors.group import LocalGroup, _agreed
from triolet.config.engine import EngineConfig
from triolet.core.step_plan import SampledToken, StepResult
from triolet.errors import ConfigError, RunnerFailed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("runner", "inline"),
        ("quantization", "int8"),
        ("enable_lora", True),
        ("convert", "embed"),
        ("classifier_from_token", ("no", "yes")),
        ("weights_cache", "folder"),
        ("kv_store", "folder"),
        ("kv_pool_bytes", 2**20),
        ("profile_dir", "folder"),
        ("device", "cuda:1"),
    ],
)
def test_what_a_group_does_not_honour_is_refused_by_name(field: str, value: Any) -> None:
    fields: dict[str, Any] = {"model": "folder", "tensor_parallel_size": 2, field: value}
    with pytest.raises(ConfigError, match=f"tensor_parallel_size must be 1 with {field} ") as caught:
        LocalGroup(EngineConfig(**fields))
    assert caught.value.field == "tensor_parallel_size"


def result_of(token_id: int, elapsed_s: float = 0.0) -> StepResult:
    return StepResult(3, (SampledToken("a", 0, 5, token_id),), elapsed_s)


def test_a_step_has_the_result_of_rank_0_if_the_ranks_agree_on_its_tokens() -> None:
    assert _agreed([result_of(7, 0.1), result_of(7, 0.2)]) == result_of(7, 0.1)


def test_ranks_that_choose_different_tokens_end_the_step() -> None:
    with pytest.raises(RunnerFailed, match="rank 2 chose"):
        _agreed([result_of(7), result_of(7), result_of(8)])
