"""Random draws in Triton against those in torch, and their noise against exact integers."""

from __future__ import annotations

import math
import random
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from tests.conftest import HAS_NVIDIA_DRIVER
from tests.scale import num_cases, one_in
from triolet.core.request.params import SamplingParams
from triolet.kernels.random_draw import TILE, draw_triton
from triolet.model.sampling.noise import answer_streams
from triolet.model.sampling.random_draw import GpuDraws, RandomDraw
from triolet.model.sampling.sampling_row import SamplingRow

DEVICE = torch.device("cuda" if HAS_NVIDIA_DRIVER else "cpu")
pytest.importorskip("triton")


def make_params(roll: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=roll.choice([0.3, 0.73, 1.0, 1.0, 2.0]),
        top_k=roll.choice([0, 0, 1, 2, 5, 20, 200, 10**6]),
        top_p=roll.choice([1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, roll.uniform(0.01, 1.0)]),
        min_p=roll.choice([0.0, 0.0, 1.0, 0.5, 0.05, roll.random()]),
    )


def make_logits(roll: random.Random, vocab_size: int) -> Tensor:
    logits = torch.randn(vocab_size) * roll.choice([0.1, 0.5, 3.0, 10.0])
    if roll.random() < 0.5:  # many ties, and zeros of both signs
        logits = (logits * 2).round() / 2
    if roll.random() < 0.2:
        logits[torch.rand(vocab_size) < 0.5] = -math.inf
        logits[roll.randrange(vocab_size)] = 1.0
    return logits


def draws(logits: Tensor, params: list[SamplingParams], seeds: list[int], positions: list[int]) -> Tensor:
    """Draw in Triton."""
    num_rows, vocab_size = logits.shape
    padded = torch.full((num_rows, vocab_size + 3), math.nan)  # what is behind a row is not read
    padded[:, :vocab_size] = logits
    on_device = padded.to(DEVICE)[:, :vocab_size]
    batch = GpuDraws.of(params, answer_streams(torch.tensor(seeds)), vocab_size, DEVICE)
    return batch.draw(on_device, on_device.max(dim=1).values, positions).cpu()


def draws_in_torch(
    logits: Tensor, params: list[SamplingParams], seeds: list[int], positions: list[int]
) -> Tensor:
    rows = [
        SamplingRow(params=p, seed=seed, vocab_size=logits.shape[1])
        for p, seed in zip(params, seeds, strict=True)
    ]
    batch = attrs.evolve(RandomDraw.of(rows, logits.shape[1], torch.device("cpu")), on_cpu=None)
    return batch.draw(logits.clone(), logits.max(dim=1).values, positions)


@pytest.mark.parametrize(
    ("vocab_size", "num_rows"),
    [
        (1, 4), (2, 10), (40, 10), (TILE, 4), (TILE + 1, 4), (3003, 2),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((40, 40), (300, num_cases(5000)))),
    ],
)  # fmt: skip
def test_rows_of_mixed_parameters_get_the_tokens_that_torch_draws(vocab_size: int, num_rows: int) -> None:
    roll = random.Random(vocab_size)
    params = [make_params(roll) for _ in range(num_rows)]
    logits = torch.stack([make_logits(roll, vocab_size) for _ in range(num_rows)])
    seeds = [roll.getrandbits(63) for _ in range(num_rows)]
    positions = [roll.randrange(1000) for _ in range(num_rows)]
    ours = draws(logits, params, seeds, positions)
    theirs = draws_in_torch(logits, params, seeds, positions)
    assert (ours != theirs).nonzero()[:, 0].tolist() == []


def stream(start: int, index: int) -> int:
    """Return a number of SplitMix64 by Python's exact integers."""
    z = (start + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def test_the_bits_of_the_noise_are_those_of_exact_integers() -> None:
    roll = random.Random(0)
    num_rows, vocab_size = 50, 200  # 10,000 of (seed, position, id)
    seeds = [roll.randrange(-(2**63), 2**63) for _ in range(num_rows)]
    positions = [roll.choice([0, 1, roll.randrange(10**6), 2**62]) for _ in range(num_rows)]
    bits = torch.empty(num_rows, vocab_size, dtype=torch.int64, device=DEVICE)
    ones = torch.ones(num_rows, device=DEVICE)
    draw_triton(
        torch.zeros(num_rows, vocab_size, device=DEVICE),
        torch.zeros_like(ones),
        temperature=ones,
        log_min_p=torch.full_like(ones, -math.inf),
        top_k=torch.full_like(ones, vocab_size, dtype=torch.int64),
        top_p=ones.double(),
        answers=answer_streams(torch.tensor(seeds)).to(DEVICE),
        positions=torch.tensor(positions, device=DEVICE),
        tolerance=0.0,
        bits=bits,
    )
    for seed, position, row in zip(seeds, positions, bits.cpu().tolist(), strict=True):
        noise = stream(stream(seed % 2**64, 0), position)
        assert [number % 2**64 for number in row] == [
            stream(noise, token_id) for token_id in range(vocab_size)
        ]


@pytest.mark.parametrize(
    ("logits", "fields", "expected"),
    one_in(
        2,
        [
            ([2.0, 2.0, 2.0, 2.0], {"top_p": 0.5}, {0, 1}),  # of equal tokens the lower ids
            ([2.0, 2.0, 2.0, 2.0], {"top_p": 0.51}, {0, 1, 2}),
            ([0.0, 1.0, 1.0, -1.0], {"top_k": 1}, {1, 2}),  # ties with the last of a top_k stay
            ([0.0, 1.0, 1.0, 1.0], {"top_k": 2, "top_p": 0.6}, {1, 2}),  # a share of all its ties
            ([0.0, -0.0, -3.0, -3.0], {"top_k": 1}, {0, 1}),
            ([-5.0, 1.0, 1.0, -5.0], {"top_p": 1e-9}, {1}),
            ([-math.inf, 1.0, -math.inf, 0.9], {"top_k": 3}, {1, 3}),
            ([1.0, 0.0, 1.0, -1.0], {"min_p": 1.0}, {0, 2}),
        ],
    ),
)
def test_exactly_the_tokens_that_are_kept_are_drawn(
    logits: list[float], fields: dict[str, Any], expected: set[int]
) -> None:
    params = SamplingParams(temperature=1.0, **fields)
    tokens = draws(torch.tensor([logits] * 12), [params] * 12, list(range(12)), [3] * 12)
    assert set(tokens.tolist()) == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of sums of infinities in the interpreter
def test_a_row_without_numbers_gets_some_token_and_changes_no_other() -> None:
    logits = torch.randn(5, 70)
    params = [SamplingParams(temperature=1.0, top_k=9, top_p=0.8)] * 5
    whole = draws(logits, params, list(range(5)), [0] * 5)
    for poison in (math.nan, math.inf, -math.inf):
        logits[2] = poison
        tokens = draws(logits, params, list(range(5)), [0] * 5)
        assert tokens[[0, 1, 3, 4]].tolist() == whole[[0, 1, 3, 4]].tolist()
        assert 0 <= tokens[2] < 70


@pytest.mark.slow
def test_a_row_gets_the_same_token_alone_and_beside_others() -> None:
    roll = random.Random(1)
    params = [make_params(roll) for _ in range(12)]
    logits = torch.stack([make_logits(roll, 500) for _ in range(12)])
    together = draws(logits, params, list(range(12)), list(range(12)))
    for row in range(12):
        alone = draws(logits[row : row + 1], params[row : row + 1], [row], [row])
        assert alone.tolist() == [together[row]]
