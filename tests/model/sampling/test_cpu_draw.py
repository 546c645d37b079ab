"""Tokens that C++ draws are those that torch draws from the same logits with the same noise."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from torch import Tensor

from tests.kernels.cpu_variants import compiled, on_every_cpu_variant
from triolet.core.request.params import SamplingParams
from triolet.kernels.cpu.sampling import draw
from triolet.model.sampling import random_draw
from triolet.model.sampling.random_draw import RandomDraw
from triolet.model.sampling.sampling_row import SamplingRow

CPU = torch.device("cpu")
KINDS = (
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.9, min_p=0.02),
    SamplingParams(top_k=5),
    SamplingParams(top_k=300, temperature=2.0),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.3, temperature=1.7),
    SamplingParams(top_k=40, top_p=0.8, min_p=0.01),
)


def make_rows(count: int) -> list[SamplingRow]:
    return [
        SamplingRow(params=KINDS[row % len(KINDS)], seed=100 + row, vocab_size=10**6) for row in range(count)
    ]


def make_logits(count: int, vocab_size: int, spread: float) -> Tensor:
    return spread * torch.randn(count, vocab_size, generator=torch.manual_seed(vocab_size))


@on_every_cpu_variant
@pytest.mark.parametrize("vocab_size", [7, 333, 20_000])
@pytest.mark.parametrize(
    ("spread", "dtype"), [(0.1, torch.float32), (3.0, torch.float32), (3.0, torch.bfloat16)]
)
def test_a_drawn_token_is_the_one_that_torch_draws(
    spread: float, dtype: torch.dtype, vocab_size: int, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_draw, "library", lambda: compiled(variant))
    batch = RandomDraw.of(make_rows(64), vocab_size, CPU)
    assert batch.on_cpu is not None
    logits = make_logits(64, vocab_size, spread).to(dtype)
    max_logits = logits.max(dim=1).values.float()
    for position in (0, 1, 1000):
        positions = [position + row for row in range(64)]
        ours = batch.draw(logits.clone(), max_logits, positions)
        theirs = attrs.evolve(batch, on_cpu=None).draw(
            logits.to(torch.float32, copy=True), max_logits, positions
        )
        assert ours.tolist() == theirs.tolist()


def test_masked_tokens_are_never_drawn_and_a_row_without_numbers_harms_no_other() -> None:
    logits = torch.full((64, 500), -math.inf)
    logits[:, 123] = 2.0
    logits[8] = math.nan
    logits[9] = -math.inf
    max_logits, _ = draw.row_argmax(logits)
    tokens = RandomDraw.of(make_rows(64), 500, CPU).draw(logits, max_logits, [0] * 64).tolist()
    assert all(token == 123 for row, token in enumerate(tokens) if row not in (8, 9))
    assert all(0 <= token < 500 for token in tokens)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_row_gets_the_same_token_alone_and_beside_others(num_threads: int) -> None:
    rows, logits = make_rows(16), make_logits(16, 5000, 2.0)
    max_logits = logits.max(dim=1).values
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        together = RandomDraw.of(rows, 5000, CPU).draw(logits, max_logits, [7] * 16).tolist()
    finally:
        torch.set_num_threads(before)
    for place, row in enumerate(rows):
        one = slice(place, place + 1)
        assert RandomDraw.of([row], 5000, CPU).draw(logits[one], max_logits[one], [7]).tolist() == [
            together[place]
        ]


@on_every_cpu_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 37, 9001])
def test_the_largest_are_those_of_torch(
    vocab_size: int, dtype: torch.dtype, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw, "library", lambda: compiled(variant))
    logits = make_logits(6, vocab_size, 2.0).to(dtype)
    logits[1] = 0.5
    logits[2] = -math.inf
    logits[3, vocab_size // 2 :] = math.nan
    logits[4, vocab_size // 3] = math.inf
    max_logits, tokens = draw.row_argmax(logits)
    truth = logits.max(dim=1)
    torch.testing.assert_close(max_logits, truth.values.float(), rtol=0, atol=0, equal_nan=True)
    assert tokens.tolist() == truth.indices.tolist()
