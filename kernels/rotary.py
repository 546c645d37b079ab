"""Rotary position embedding: a head's first half turns against its second half, or even dimensions against odd ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from triolet.errors import KernelShapeError
from triolet.kernels._triton import device_function, kernel, next_power_of_2, run_or_reference

if TYPE_CHECKING:
    import triton.language as tl


@device_function
def rotated(first, second, cos, sin):
    """Turn the numbers of `first` against those of `second`."""
    return first * cos - second * sin, second * cos + first * sin


@kernel.with_widths("query_stride_t", "query_stride_h", "key_stride_t", "key_stride_h")
def _rotary_kernel(
    query_ptr,  # [num_tokens, num_heads, head_dim]
    key_ptr,  # [num_tokens, num_kv_heads, head_dim]
    cos_sin_ptr,  # [max_positions, rotary_dim], contiguous
    positions_ptr,  # [num_tokens]
    num_heads, query_stride_t, query_stride_h, key_stride_t, key_stride_h,
    HALF: tl.constexpr, PADDED_HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)  # query heads first, then key heads
    if head < num_heads:
        row_ptr = query_ptr + token * query_stride_t + head * query_stride_h
    else:
        row_ptr = key_ptr + token * key_stride_t + (head - num_heads) * key_stride_h
    dim = tl.arange(0, PADDED_HALF)
    inside = dim < HALF
    turn_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF) + dim
    cos = tl.load(turn_ptr, mask=inside, other=0.0).to(tl.float32)  # [PADDED_HALF]
    sin = tl.load(turn_ptr + HALF, mask=inside, other=0.0).to(tl.float32)  # [PADDED_HALF]
    first_ptr = row_ptr + (2 * dim if INTERLEAVED else dim)
    second_ptr = first_ptr + (1 if INTERLEAVED else HALF)
    first = tl.load(first_ptr, mask=inside, other=0.0).to(tl.float32)  # [PADDED_HALF]
    second = tl.load(second_ptr, mask=inside, other=0.0).to(tl.float32)  # [PADDED_HALF]
    dtype = query_ptr.dtype.element_ty
    new_first, new_second = rotated(first, second, cos, sin)
    tl.store(first_ptr, new_first.to(dtype), mask=inside)
    tl.store(second_ptr, new_second.to(dtype), mask=inside)


def rotary(
    query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor, *, interleaved: bool = False
) -> None:
    """Turn queries and keys to their positions, in place; they may be views of one merged projection.

    Element i of a head turns with element i + rotary_dim / 2, and with `interleaved` element 2 i with element 2 i + 1;
    what lies past `rotary_dim` stays.

    Args:
        query: [num_tokens, num_heads, head_dim], last dim contiguous.
        key: [num_tokens, num_kv_heads, head_dim], last dim contiguous, dtype of `query`.
        cos_sin: [max_positions, rotary_dim] float32, contiguous: cosines in the first half of the columns,
            sines in the second, with any scaling of the model already in them.
        positions: [num_tokens] int64, each below max_positions.
        interleaved: adjacent elements turn together.

    Raises:
        KernelShapeError: the tensors disagree on num_tokens, head_dim or dtype, or `rotary_dim` is odd or
            larger than head_dim.

    Source: RoFormer, arXiv 2104.09864. Moves 2 * (query.nbytes + key.nbytes) * rotary_dim / head_dim.
    """
    _check(query, key, cos_sin, positions)
    if query.is_cuda:
        run_or_reference(
            rotary_triton, rotary_reference, query, key, cos_sin, positions, interleaved=interleaved
        )
    else:
        rotary_reference(query, key, cos_sin, positions, interleaved=interleaved)


def rotary_triton(
    query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor, *, interleaved: bool = False
) -> None:
    """`rotary` in Triton, without its checks."""
    half = cos_sin.shape[1] // 2
    if query.shape[0] == 0 or half == 0:
        return
    _rotary_kernel[query.shape[0], query.shape[1] + key.shape[1]](
        query, key, cos_sin, positions, query.shape[1],
        query.stride(0), query.stride(1), key.stride(0), key.stride(1),
        HALF=half, PADDED_HALF=next_power_of_2(half), INTERLEAVED=interleaved,
    )  # fmt: skip


def rotary_reference(
    query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor, *, interleaved: bool = False
) -> None:
    """`rotary` in torch, computed in float32 and rounded once."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # each [num_tokens, 1, rotary_dim / 2]
    for heads in (query, key):
        turning = heads[..., : cos_sin.shape[1]]
        first, second = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.chunk(2, dim=-1)
        turned = first * cos - second * sin
        second.copy_(second * cos + first * sin)
        first.copy_(turned)


def _check(query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    if query.shape[0] != key.shape[0] or query.shape[2] != key.shape[2] or positions.shape != query.shape[:1]:
        raise KernelShapeError(
            "num_tokens and head_dim",
            query=tuple(query.shape), key=tuple(key.shape), positions=tuple(positions.shape),
        )  # fmt: skip
    if cos_sin.shape[1] % 2 or cos_sin.shape[1] > query.shape[2] or not cos_sin.is_contiguous():
        raise KernelShapeError(
            "rotary_dim and head_dim", cos_sin=tuple(cos_sin.shape), query=tuple(query.shape)
        )
    if query.dtype != key.dtype:
        raise KernelShapeError("dtype", query=query.dtype, key=key.dtype)
    if query.stride(2) != 1 or key.stride(2) != 1:
        raise KernelShapeError("strides with contiguous rows", query=query.stride(), key=key.stride())
