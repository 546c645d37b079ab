from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.kernels.targets import Target, on_every_triton_target
from triolet.errors import KernelShapeError
from triolet.kernels.rotary import rotary, rotary_reference, rotary_triton


def cos_sin_table(rotary_dim: int, max_positions: int = 64) -> Tensor:
    frequency = 10_000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angle = torch.arange(max_positions)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 8), (24, 16), (80, 32)])
def test_each_pair_turns_by_position_times_frequency_and_the_rest_stays(
    head_dim: int, rotary_dim: int, interleaved: bool
) -> None:
    query, key = torch.randn(3, 2, head_dim), torch.randn(3, 1, head_dim)
    before, positions = query.clone(), [0, 5, 63]
    rotary(query, key, cos_sin_table(rotary_dim), torch.tensor(positions), interleaved=interleaved)
    half = rotary_dim // 2
    for token, position in enumerate(positions):
        for i in range(half):
            angle = position * 10_000.0 ** (-2 * i / rotary_dim)
            pair = [2 * i, 2 * i + 1] if interleaved else [i, i + half]
            for head in range(2):
                turned = complex(*before[token, head, pair].tolist()) * complex(
                    math.cos(angle), math.sin(angle)
                )
                got = complex(*query[token, head, pair].tolist())
                assert abs(got - turned) < 1e-5
    assert query[..., rotary_dim:].equal(before[..., rotary_dim:])


def test_scores_depend_on_the_distance_alone() -> None:
    query, key = (
        torch.randn(1, 1, 16).expand(2, 1, 16).clone(),
        torch.randn(1, 1, 16).expand(2, 1, 16).clone(),
    )
    rotary(query, torch.zeros(2, 1, 16), cos_sin_table(16), torch.tensor([7, 50]))
    rotary(torch.zeros(2, 1, 16), key, cos_sin_table(16), torch.tensor([3, 46]))
    near, far = (query * key).sum(-1).flatten()
    torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-4)


@on_every_triton_target
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 8), (24, 24), (96, 32), (128, 128)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_triton_turns_the_views_of_a_merged_projection_alike(
    target: Target, num_tokens: int, interleaved: bool, head_dim: int, rotary_dim: int
) -> None:
    table = cos_sin_table(rotary_dim).to(target.device)
    positions = torch.randint(64, (num_tokens,)).to(target.device)
    merged = target.randn(num_tokens, 3 + 1 + 1, head_dim)
    expected = merged.clone()
    rotary_triton(merged[:, :3], merged[:, 3:4], table, positions, interleaved=interleaved)
    rotary_reference(expected[:, :3], expected[:, 3:4], table, positions, interleaved=interleaved)
    torch.testing.assert_close(merged, expected, **target.tolerance)
    assert merged[:, 4].equal(expected[:, 4])


@pytest.mark.parametrize(
    ("query", "key", "rotary_dim", "num_positions"),
    [
        (torch.zeros(2, 1, 8), torch.zeros(3, 1, 8), 8, 2),
        (torch.zeros(2, 1, 8), torch.zeros(2, 1, 16), 8, 2),
        (torch.zeros(2, 1, 8), torch.zeros(2, 1, 8), 8, 3),
        (torch.zeros(2, 1, 8), torch.zeros(2, 1, 8), 16, 2),
        (torch.zeros(2, 1, 8), torch.zeros(2, 1, 8), 5, 2),
        (torch.zeros(2, 1, 8), torch.zeros(2, 1, 8).half(), 8, 2),
        (torch.zeros(2, 1, 16)[..., ::2], torch.zeros(2, 1, 8), 8, 2),
    ],
    ids=[
        "num_tokens",
        "head_dim",
        "positions",
        "rotary_dim too large",
        "rotary_dim odd",
        "dtype",
        "rows with gaps",
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(
    query: Tensor, key: Tensor, rotary_dim: int, num_positions: int
) -> None:
    with pytest.raises(KernelShapeError, match="must agree"):
        rotary(query, key, torch.zeros(64, rotary_dim), torch.zeros(num_positions, dtype=torch.int64))
