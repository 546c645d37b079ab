"""The products of all experts at once agree with those of each token alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels.targets import Target, on_every_triton_target
from triolet.errors import KernelShapeError
from triolet.kernels.linear.grouped import (
    ExpertTiles,
    StackedWeights,
    grouped_linear,
    grouped_linear_reference,
    grouped_linear_triton,
    longest_of_tiles,
)

SHAPES = [  # tokens, experts, experts of a token, inputs, outputs
    (1, 8, 2, 32, 48),
    (5, 3, 3, 33, 70),
    (40, 4, 1, 70, 17),
    (9, 16, 4, 1, 1),
]


def make(
    target: Target, shape: tuple[int, ...], *, has_bias: bool
) -> tuple[Tensor, StackedWeights, Tensor, Tensor]:
    """Return tokens, weights, the experts of each token, and their shares."""
    num_tokens, num_experts, top_k, num_in, num_out = shape
    x, weight = target.randn(num_tokens, num_in), target.randn(num_experts, num_out, num_in)
    bias = target.randn(num_experts, num_out) if has_bias else None
    # the first expert is chosen by none, so that empty ones stand before and between others
    scores = torch.rand(num_tokens, num_experts)
    scores[:, 0] -= 2.0 if top_k < num_experts else 0.0
    chosen = scores.topk(top_k, dim=-1).indices.to(target.device)
    shares = torch.rand(num_tokens, top_k).to(target.dtype).to(target.device)
    return x, StackedWeights(weight, bias), chosen, shares


def numbers(target: Target, num_experts: int) -> Tensor:
    return torch.arange(num_experts, device=target.device)


def product(x: Tensor, weights: StackedWeights, expert: int) -> Tensor:
    """[num_out] float64."""
    y = weights.weight[expert].cpu().double() @ x.cpu().double()
    return y if weights.bias is None else y + weights.bias[expert].cpu().double()


@on_every_triton_target
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("run", [grouped_linear_triton, grouped_linear_reference])
def test_each_token_is_multiplied_with_its_experts(
    target: Target, shape: tuple[int, ...], has_bias: bool, run: Callable[..., Tensor]
) -> None:
    x, weights, chosen, shares = make(target, shape, has_bias=has_bias)
    tiles = ExpertTiles.of(chosen, numbers(target, shape[1]), x.itemsize)
    pairs = [(token, expert) for token, row in enumerate(chosen.tolist()) for expert in row]
    expected = torch.stack([product(x[token], weights, expert) for token, expert in pairs])
    places = tiles.places.tolist()
    assert sorted(places) == list(range(len(pairs)))
    assert [pairs[place][1] for place in places] == sorted(expert for _, expert in pairs)

    tolerance = {"rtol": target.tolerance["rtol"] * 4, "atol": target.tolerance["atol"] * shape[3]}
    torch.testing.assert_close(run(x, weights, tiles, None).cpu().double(), expected[places], **tolerance)
    again = x[tiles.places // shape[2]]  # sorted inputs, results in the order of the tokens
    torch.testing.assert_close(
        run(again, weights, tiles, shares).cpu().double(),
        expected * shares.cpu().double().view(-1, 1),
        **tolerance,
    )


@on_every_triton_target
def test_the_tiles_of_many_pairs_are_enough_for_any_choice(target: Target) -> None:
    num_experts = 3
    weights = StackedWeights(target.randn(num_experts, 5, 4))
    for num_tokens in longest_of_tiles(num_experts, 1):
        x = target.randn(num_tokens, 4)
        for chosen in (
            torch.zeros(num_tokens),
            torch.arange(num_tokens) % 2 + 1,
            torch.arange(num_tokens) > 0,
        ):
            experts = chosen.long().view(-1, 1).to(target.device)
            tiles = ExpertTiles.of(experts, numbers(target, num_experts), x.itemsize)
            assert tiles.tile_ends[-1] <= tiles.num_tiles
            torch.testing.assert_close(
                grouped_linear_triton(x, weights, tiles, None),
                grouped_linear_reference(x, weights, tiles, None),
                **target.tolerance,
            )


def test_tensors_that_do_not_fit_are_refused() -> None:
    target = Target("cpu", torch.float32)
    x, weights, chosen, shares = make(target, SHAPES[0], has_bias=False)
    tiles = ExpertTiles.of(chosen, numbers(target, SHAPES[0][1]), x.itemsize)
    with pytest.raises(KernelShapeError, match="tokens, num_in and num_experts"):
        grouped_linear(x[:, :-1], weights, tiles, None)
    with pytest.raises(KernelShapeError, match="tokens, num_in and num_experts"):
        grouped_linear(x, weights, tiles, shares)
    with pytest.raises(KernelShapeError, match="dtype"):
        grouped_linear(x.half(), weights, tiles, None)
