"""Linear layers of all experts of a mixture at once: each token is multiplied with the weights of its experts.

The pairs of a token and one of its experts are sorted by expert, and cut into tiles of one expert. Where the tiles
begin is on the device, and the grid has room for the most tiles that so many pairs can make: the host waits for
nothing, and a graph may hold it all.

Source: sorted tokens, MegaBlocks, arXiv 2211.15841.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from triolet.errors import KernelShapeError
from triolet.kernels._triton import INTERPRETING, kernel, run_or_reference

if TYPE_CHECKING:
    import triton.language as tl

FEW_ROWS, MANY_ROWS = 16, 64
"""Pairs of an expert, on average, up to which tiles of few or of some rows are taken."""


@kernel.with_widths("num_in", "num_out", "x_stride", "out_stride")
def _grouped_kernel(
    x_ptr,  # GATHERS: [num_tokens, num_in]; else [num_pairs, num_in], sorted by expert
    weight_ptr,  # [num_experts, num_out, num_in], contiguous
    bias_ptr,  # HAS_BIAS only: [num_experts, num_out], contiguous
    shares_ptr,  # not GATHERS only: [num_pairs], in the order of the tokens
    out_ptr,  # GATHERS: [num_pairs, num_out], sorted by expert; else the same in the order of the tokens
    places_ptr,  # [num_pairs] int64, place in the order of the tokens of each sorted pair
    ends_ptr,  # [num_experts] int32, where the pairs of each expert end
    tile_ends_ptr,  # [num_experts] int32, where its tiles end
    num_experts, top_k, num_in, num_out, x_stride, out_stride,
    GATHERS: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of the pairs of one expert with some rows of its weight."""
    tile = tl.program_id(1)
    if tile >= tl.load(tile_ends_ptr + num_experts - 1):
        return
    expert = 0
    last = num_experts - 1
    while expert < last:
        middle = (expert + last) // 2
        if tl.load(tile_ends_ptr + middle) > tile:
            last = middle
        else:
            expert = middle + 1
    begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    first_tile = tl.load(tile_ends_ptr + expert - 1, mask=expert > 0, other=0)
    row = begin + (tile - first_tile) * ROWS + tl.arange(0, ROWS)
    row_live = row < tl.load(ends_ptr + expert)
    place = tl.load(places_ptr + row, mask=row_live, other=0)
    out = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    out_live = out < num_out
    if GATHERS:
        source = place // top_k
        target = row.to(tl.int64)
    else:
        source = row.to(tl.int64)
        target = place
    # int64: the weights of all experts are more than 2 ** 31 numbers
    weight_row = tl.zeros([1], tl.int64) + expert
    weight_row = weight_row * num_out + out  # [OUTS]

    sums = tl.zeros([ROWS, OUTS], tl.float32)
    for start in range(0, num_in, DEPTH):
        k = start + tl.arange(0, DEPTH)
        k_live = k < num_in
        x = tl.load(
            x_ptr + (source * x_stride)[:, None] + k[None, :], mask=row_live[:, None] & k_live[None, :], other=0.0
        )  # [ROWS, DEPTH]  # fmt: skip
        weight = tl.load(
            weight_ptr + (weight_row * num_in)[None, :] + k[:, None], mask=k_live[:, None] & out_live[None, :],
            other=0.0,
        )  # [DEPTH, OUTS]  # fmt: skip
        if WIDEN:
            x = x.to(tl.float32)
            weight = weight.to(tl.float32)
        sums += tl.dot(x, weight, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias_ptr + weight_row, mask=out_live, other=0.0).to(tl.float32)[None, :]
    if not GATHERS:
        sums *= tl.load(shares_ptr + place, mask=row_live, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out_ptr + (target * out_stride)[:, None] + out[None, :], sums.to(out_ptr.dtype.element_ty),
        mask=row_live[:, None] & out_live[None, :],
    )  # fmt: skip


@attrs.frozen(eq=False)
class StackedWeights:
    """Weights of one linear layer of all experts."""

    weight: Tensor  # [num_experts, num_out, num_in], contiguous
    bias: Tensor | None = None  # [num_experts, num_out], contiguous


@attrs.frozen(eq=False)
class ExpertTiles:
    """Pairs of a step's tokens and their experts, sorted by expert and cut into tiles."""

    places: Tensor  # [num_pairs] int64, place in the order of the tokens of each sorted pair
    ends: Tensor  # [num_experts] int32, where the pairs of each expert end
    tile_ends: Tensor  # [num_experts] int32, where its tiles end
    num_tiles: int  # at most
    rows: int  # of a tile
    top_k: int  # experts of a token

    @classmethod
    def of(cls, chosen: Tensor, numbers: Tensor, itemsize: int) -> ExpertTiles:
        """Sort the pairs of a step.

        Args:
            chosen: [num_tokens, top_k] int64, the experts of each token.
            numbers: [num_experts] int64, those of the layer's experts, from 0 on.
            itemsize: of the numbers to be multiplied, bytes.
        """
        num_pairs, num_experts = chosen.numel(), len(numbers)
        rows = _tile(num_pairs, num_experts, itemsize)[0]
        experts, places = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        begins = torch.searchsorted(experts, numbers, out_int32=True)
        tile_ends = torch.cumsum((ends - begins + rows - 1) // rows, dim=0, dtype=torch.int32)
        num_tiles = min(num_pairs, num_pairs // rows + num_experts)
        return cls(places, ends, tile_ends, num_tiles, rows, chosen.shape[1])


def longest_of_tiles(num_experts: int, top_k: int) -> tuple[int, ...]:
    """Return numbers of tokens, one for each tile that steps of any length take."""
    return tuple(rows * num_experts // top_k + 1 for rows in (0, FEW_ROWS, MANY_ROWS))


def _tile(num_pairs: int, num_experts: int, itemsize: int) -> tuple[int, int, int, int]:
    """Return pairs, outputs and inputs of a tile, and its warps."""
    if itemsize == 4:
        return 16, 32, 32, 4  # more does not fit into the registers without tensor cores
    if num_pairs <= FEW_ROWS * num_experts:
        return 16, 64, 64, 4
    if num_pairs <= MANY_ROWS * num_experts:
        return 64, 64, 64, 4
    return 128, 128, 64, 8


def grouped_linear(x: Tensor, weights: StackedWeights, tiles: ExpertTiles, shares: Tensor | None) -> Tensor:
    """Multiply each token with the weight of each of its experts.

    Args:
        x: without `shares` [num_tokens, num_in], else [num_pairs, num_in] sorted by expert; rows contiguous.
        weights: of all experts, dtype of `x`.
        tiles: of the step.
        shares: [num_tokens, top_k] dtype of `x`, contiguous: factors of the products; None = 1.

    Returns:
        [num_pairs, num_out], dtype of `x`: without `shares` sorted by expert, else in the order of the tokens.

    Raises:
        KernelShapeError: the tensors do not fit each other.

    Moves x.nbytes, the result's bytes, and the weight of each expert that has tokens, once per tile of them.
    """
    num_pairs, (num_experts, _, num_in) = len(tiles.places), weights.weight.shape
    num_rows = num_pairs // tiles.top_k if shares is None else num_pairs
    if x.shape != (num_rows, num_in) or len(tiles.ends) != num_experts:
        raise KernelShapeError(
            "tokens, num_in and num_experts", x=tuple(x.shape), weight=tuple(weights.weight.shape)
        )
    if x.dtype != weights.weight.dtype or x.stride(1) != 1 or not weights.weight.is_contiguous():
        raise KernelShapeError(
            "dtype and contiguous rows", x=(x.dtype, x.stride()), weight=weights.weight.dtype
        )
    if x.is_cuda:
        return run_or_reference(grouped_linear_triton, grouped_linear_reference, x, weights, tiles, shares)
    return grouped_linear_reference(x, weights, tiles, shares)


def grouped_linear_triton(
    x: Tensor, weights: StackedWeights, tiles: ExpertTiles, shares: Tensor | None
) -> Tensor:
    """`grouped_linear` in Triton, without its checks."""
    num_experts, num_out, num_in = weights.weight.shape
    y = x.new_empty(len(tiles.places), num_out)
    if not len(y):
        return y
    _, outs, depth, num_warps = _tile(len(y), num_experts, x.itemsize)
    _grouped_kernel[-(-num_out // outs), tiles.num_tiles](
        x, weights.weight, x if weights.bias is None else weights.bias, x if shares is None else shares, y,
        tiles.places, tiles.ends, tiles.tile_ends,
        num_experts, tiles.top_k, num_in, num_out, x.stride(0), y.stride(0),
        GATHERS=shares is None, HAS_BIAS=weights.bias is not None, ROWS=tiles.rows, OUTS=outs, DEPTH=depth,
        WIDEN=INTERPRETING, num_warps=num_warps, num_stages=3,
    )  # fmt: skip
    return y


def grouped_linear_reference(
    x: Tensor, weights: StackedWeights, tiles: ExpertTiles, shares: Tensor | None
) -> Tensor:
    """`grouped_linear` in torch, an expert at a time; waits for the device."""
    y = x.new_empty(len(tiles.places), weights.weight.shape[1])
    begin = 0
    for expert, end in enumerate(tiles.ends.tolist()):
        if begin < end:
            places = tiles.places[begin:end]
            rows = x[places // tiles.top_k] if shares is None else x[begin:end]
            bias = None if weights.bias is None else weights.bias[expert].float()
            product = functional.linear(rows.float(), weights.weight[expert].float(), bias)
            if shares is None:
                y[begin:end] = product.to(x.dtype)
            else:
                y[places] = (product * shares.flatten()[places, None].float()).to(x.dtype)
        begin = end
    return y
