from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from triolet.model.sampling import noise
from triolet.model.sampling.noise import _stream_output, answer_streams, position_streams

MASK = 2**64 - 1


def mix(bits: int) -> int:
    bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & MASK
    return bits ^ bits >> 31


def output(start: int, index: int) -> int:
    return mix((start + (index + 1) * 0x9E3779B97F4A7C15) & MASK)


def expected_bits(seed: int, position: int, token_id: int) -> int:
    return output(output(output(seed & MASK, 0), position), token_id)


def streams(seeds: Tensor, positions: Tensor) -> Tensor:
    return position_streams(answer_streams(seeds), positions)


def random_bits(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    return noise.random_bits(streams(seeds, positions), token_ids)


def uniform_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    return noise.uniform_noise(streams(seeds, positions), token_ids)


def exponential_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    return noise.exponential_noise(streams(seeds, positions), token_ids)


def grid(num_seeds: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """Every pair of a small seed and a small position."""
    seeds, positions = torch.meshgrid(torch.arange(num_seeds), torch.arange(num_positions), indexing="ij")
    return seeds.flatten(), positions.flatten()


def test_a_stream_gives_the_published_outputs_of_splitmix64() -> None:
    # The first outputs of the reference program splitmix64.c for the start 1234567.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    outputs = _stream_output(torch.tensor([1234567]), torch.arange(4)).tolist()
    assert [bits & MASK for bits in outputs] == published


def test_the_bits_are_those_of_exact_integer_arithmetic() -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 123456789]
    positions, token_ids = [0, 1, 2, 7, 4095, 2**20], [0, 1, 151935, 2**31]
    bits = random_bits(torch.tensor(seeds), torch.tensor(positions), torch.tensor(token_ids))
    expected = [
        [expected_bits(seed, position, token_id) for token_id in token_ids]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert [[value & MASK for value in row] for row in bits.tolist()] == expected


def test_noise_at_some_token_ids_is_the_noise_of_the_whole_vocabulary_there() -> None:
    seeds, positions = torch.tensor([3, 4]), torch.tensor([10, 11])
    whole = exponential_noise(seeds, positions, torch.arange(1000))
    some = torch.tensor([[5, 999, 0], [17, 17, 400]])
    assert torch.equal(
        uniform_noise(seeds, positions, some),
        uniform_noise(seeds, positions, torch.arange(1000)).gather(1, some),
    )
    assert torch.allclose(exponential_noise(seeds, positions, some), whole.gather(1, some), rtol=1e-6, atol=0)


def test_noise_does_not_depend_on_the_rows_beside_it() -> None:
    seeds, positions = grid(5, 4)
    together = uniform_noise(seeds, positions, torch.arange(50))
    for i in range(len(seeds)):
        alone = uniform_noise(seeds[i : i + 1], positions[i : i + 1], torch.arange(50))
        assert torch.equal(alone[0], together[i])


def test_uniform_numbers_are_strictly_between_zero_and_one_and_keep_small_ones() -> None:
    numbers = uniform_noise(*grid(100, 20), torch.arange(1000))
    assert 0.0 < numbers.min() < 1e-5
    assert 1 - 1e-5 < numbers.max() < 1.0
    waits = exponential_noise(*grid(100, 20), torch.arange(1000))
    assert 0.0 < waits.min() < 1e-5
    assert 13.0 < waits.max() < 17.0
    small = waits[waits < 2.0**-10]
    assert len(small.unique()) > 0.99 * len(small)  # a grid of 2**-24 would hold them in 2**14 places


@pytest.mark.parametrize("axis", ["token_ids", "positions", "seeds"])
def test_uniform_numbers_fill_their_interval_evenly_along_every_axis(axis: str) -> None:
    count, num_bins = 200_000, 1000
    along, fixed = torch.arange(count), torch.tensor([7])
    seeds = along if axis == "seeds" else fixed
    positions = along if axis == "positions" else fixed.expand(len(seeds))
    token_ids = along if axis == "token_ids" else fixed
    numbers = uniform_noise(seeds.expand(len(positions)), positions, token_ids).flatten().double().numpy()
    assert len(numbers) == count
    observed = np.bincount((numbers * num_bins).astype(int), minlength=num_bins)
    chi_square = float(((observed - count / num_bins) ** 2 / (count / num_bins)).sum())
    # Mean num_bins - 1 and standard deviation sqrt(2 (num_bins - 1)) for honest dice; four of them either way.
    assert abs(chi_square - (num_bins - 1)) < 4 * math.sqrt(2 * (num_bins - 1))


@pytest.mark.parametrize("lag", [1, *(pytest.param(lag, marks=pytest.mark.slow) for lag in (2, 16, 64))])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_neighbours_are_not_correlated(axis: int, lag: int) -> None:
    size = 160
    cube = uniform_noise(*grid(size, size), torch.arange(size)).double().view(size, size, size)
    here, there = cube.narrow(axis, 0, size - lag).flatten(), cube.narrow(axis, lag, size - lag).flatten()
    correlation = torch.corrcoef(torch.stack((here, there)))[0, 1].item()
    assert abs(correlation) < 4 / math.sqrt(len(here))


def test_neighbouring_seeds_positions_and_ids_flip_half_of_the_bits() -> None:
    def flipped(first: Tensor, second: Tensor) -> float:
        changed = (first ^ second).numpy().view(np.uint8)
        return float(np.unpackbits(changed).mean())

    seeds, positions = grid(64, 64)
    token_ids = torch.arange(64)
    bits = random_bits(seeds, positions, token_ids)
    assert abs(flipped(bits, random_bits(seeds + 1, positions, token_ids)) - 0.5) < 1e-3
    assert abs(flipped(bits, random_bits(seeds, positions + 1, token_ids)) - 0.5) < 1e-3
    assert abs(flipped(bits, random_bits(seeds, positions, token_ids + 1)) - 0.5) < 1e-3


def test_exponential_noise_has_the_moments_of_the_exponential_distribution() -> None:
    waits = exponential_noise(*grid(100, 100), torch.arange(100)).double()
    assert waits.mean().item() == pytest.approx(1.0, abs=4e-3)
    assert waits.var().item() == pytest.approx(1.0, abs=2e-2)


def test_the_largest_share_of_probability_over_noise_is_a_draw_from_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.0499, 0.0001])
    count = 200_000
    waits = exponential_noise(torch.full((count,), 11), torch.arange(count), torch.arange(5))
    drawn = torch.bincount((probabilities / waits).argmax(dim=1), minlength=5).double() / count
    spread = (probabilities * (1 - probabilities) / count).sqrt()
    assert ((drawn - probabilities).abs() < 4 * spread).all()


@pytest.mark.gpu
def test_the_noise_is_the_same_on_the_gpu() -> None:
    seeds, positions, token_ids = *grid(16, 16), torch.arange(1000)
    on_gpu = uniform_noise(seeds.cuda(), positions.cuda(), token_ids.cuda()).cpu()
    assert torch.equal(on_gpu, uniform_noise(seeds, positions, token_ids))
