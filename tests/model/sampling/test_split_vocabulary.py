"""Processes that each have the logits of a part of the vocabulary choose the tokens that one with all of them does."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from triolet.core.request.params import SamplingParams
from triolet.model.sampling.sampler import Samples, SamplingBatch
from triolet.model.sampling.sampling_row import SamplingRow

CPU = torch.device("cpu")
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.9, min_p=0.02),
)


class Gathering:
    """What `gather` is between processes, here between threads."""

    def __init__(self, size: int) -> None:
        self._parts: list[Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size)

    def of(self, rank: int) -> Callable[[Tensor], Tensor]:
        def gather(part: Tensor) -> Tensor:
            self._parts[rank] = part
            self._barrier.wait()
            whole = torch.stack(self._parts)
            self._barrier.wait()
            return whole

        return gather


def batch_of(params: list[SamplingParams], vocab_size: int, first_seed: int = 0) -> SamplingBatch:
    rows = [SamplingRow(params=p, seed=first_seed + i, vocab_size=vocab_size) for i, p in enumerate(params)]
    return SamplingBatch(rows, vocab_size, CPU)


def sample_split(
    params: list[SamplingParams], logits: Tensor, size: int, first_seed: int = 0
) -> list[Samples]:
    """Sample in as many threads as there are parts."""
    gathering, width = Gathering(size), logits.shape[1] // size

    def rank(number: int) -> Samples:
        part = logits[:, number * width : (number + 1) * width].clone()
        batch = batch_of(params, logits.shape[1], first_seed)
        assert batch.is_open
        return batch.sample_part(part, number * width, gathering.of(number))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


@pytest.mark.parametrize("size", [2, 3])
def test_five_thousand_rows_get_the_tokens_that_the_whole_vocabulary_gives(size: int) -> None:
    generator = torch.Generator().manual_seed(7)
    for number in range(20):
        params = [KINDS[i % len(KINDS)] for i in range(250)]
        logits = 3.0 * torch.randn(250, 600, generator=generator)
        whole = batch_of(params, 600, 250 * number).sample(logits.clone())
        for samples in sample_split(params, logits, size, 250 * number):
            assert samples.token_ids == whole.token_ids


def test_of_equal_logits_in_two_parts_the_first_token_is_chosen() -> None:
    logits = torch.zeros(2, 8)
    logits[0, [2, 6]] = 1.0
    logits[1, [5, 7]] = 1.0
    for samples in sample_split([KINDS[0]] * 2, logits, 2):
        assert samples.token_ids == [2, 5]


@pytest.mark.parametrize("column", [1, 6])
def test_a_row_with_a_nan_in_any_part_fails_alone_in_every_process(column: int) -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    logits[1, column] = math.nan
    for samples in sample_split([KINDS[0], KINDS[1], KINDS[1]], logits, 2):
        assert list(samples.failures) == [1]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.9),
        SamplingParams(logprobs=1),
        SamplingParams(temperature=0.0, logit_bias={3: 1.0}),
        SamplingParams(presence_penalty=1.0),
    ],
)
def test_a_row_that_needs_more_than_its_own_part_makes_the_batch_gather_all_logits(
    params: SamplingParams,
) -> None:
    assert not batch_of([KINDS[0], params], 100).is_open
