"""A step for which there is no memory is said to be one, changes nothing, and is computed when it is smaller."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.model.backends.fake_causal_model import FakeCausalModel
from tests.model.test_runner import expected_answer, make_runner, run_all, start
from triolet.core.request.params import SamplingParams
from triolet.core.request.request import FinishReason, Request
from triolet.core.scheduling.scheduler import SchedulerConfig
from triolet.core.step_plan import PlanRow, StepPlan
from triolet.model.interface import ForwardBatch
from triolet.model.memory.out_of_memory import lack_of_memory

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    MemoryError("Unable to allocate 2.00 GiB"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 2147483648 bytes"
    ),
    RuntimeError("std::bad_alloc"),
]


class NarrowModel(FakeCausalModel):
    """Finds memory for so many tokens only; notes what it wrote into the cache before it noticed."""

    def __init__(self, most_tokens: int, error: Exception) -> None:
        super().__init__()
        self.most_tokens, self.error, self.num_errors = most_tokens, error, 0

    def forward_logits(self, batch: ForwardBatch) -> Tensor:
        logits = super().forward_logits(batch)
        if len(batch.token_ids) > self.most_tokens:
            self.num_errors += 1
            raise self.error
        return logits


@pytest.mark.parametrize("is_ahead", [False, True], ids=["", "two steps in flight"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_every_answer_is_the_right_one_however_little_memory_there_is(
    error: Exception, is_ahead: bool
) -> None:
    model = NarrowModel(5, error)
    requests = [
        Request(
            request_id=f"r{number}",
            prompt_token_ids=tuple(range(number, number + 3 + 2 * number)),
            params=SamplingParams(max_tokens=12),
            seed=number,
            max_tokens=12,
        )
        for number in range(8)
    ]
    config = SchedulerConfig(
        num_blocks=40,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        max_model_len=64,
        cache_key=b"k",
        async_scheduling=is_ahead,
    )
    runner = make_runner(model, num_blocks=40, block_size=4, max_num_seqs=8, max_model_len=64)
    entries, _ = run_all(runner, config, requests)
    assert model.num_errors > 0
    for entry in entries:
        request = entry.request
        assert entry.finish_reason is FinishReason.LENGTH
        assert entry.output_token_ids == expected_answer(
            request.prompt_token_ids, 12, request.params, seed=request.seed
        )


def test_what_was_said_comes_with_the_result_and_any_other_error_is_still_a_crash() -> None:
    plan = StepPlan(1, (), (start(0, [1, 2, 3]),), (PlanRow(0, 0, 3, (0,), sample=True),))
    result = make_runner(NarrowModel(2, MemoryError("no more"))).execute(plan)
    assert (result.tokens, result.out_of_memory) == ((), "MemoryError: no more")
    with pytest.raises(RuntimeError, match="device-side assert"):
        make_runner(NarrowModel(2, RuntimeError("CUDA error: device-side assert triggered"))).execute(plan)


def test_torch_itself_says_it_like_that() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert lack_of_memory(caught.value) is not None
    assert lack_of_memory(ValueError("out of memory")) is None
