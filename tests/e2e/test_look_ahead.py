"""A real model with two steps in flight, and its answers in a cache that is too small: those of one step at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_speculation import answers, folder, logprobs, make_requests, told

__all__ = ["folder"]


@pytest.mark.parametrize("runner", ["inline", "thread", pytest.param("process", marks=pytest.mark.slow)])
async def test_answers_are_the_same_with_and_without_a_second_step_in_flight(
    folder: Path, runner: str
) -> None:
    requests = make_requests(14)
    fields: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_model_len": 128, "max_num_seqs": 8}
    fields |= {"num_kv_blocks": 60, "max_num_batched_tokens": 48, "runner": runner}
    plain, _ = await answers(str(folder), requests, **fields)
    ahead, statistics = await answers(str(folder), requests, **fields, async_scheduling=True)
    assert statistics.num_preemptions > 0
    assert list(map(told, ahead)) == list(map(told, plain))
    for one, other in zip(ahead, plain, strict=True):
        assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-4)
