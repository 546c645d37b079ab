"""Rotary position embedding, NeoX style: a head's first half turns against its second half."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from triolet.errors import KernelShapeError
from triolet.kernels._triton import kernel, next_power_of_2

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def _rotary_kernel(
    query_ptr,  # [num_tokens, num_heads, head_dim]
    key_ptr,  # [num_tokens, num_kv_heads, head_dim]
    cos_sin_ptr,  # [max_positions, rotary_dim], contiguous
    positions_ptr,  # [num_tokens]
    num_heads, query_stride_t, query_stride_h, key_stride_t, key_stride_h,
    HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
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
    first = tl.load(row_ptr + dim, mask=inside, other=0.0).to(tl.float32)  # [PADDED_HALF]
    second = tl.load(row_ptr + HALF + dim, mask=inside, other=0.0).to(tl.float32)  # [PADDED_HALF]
    dtype = query_ptr.dtype.element_ty
    tl.store(row_ptr + dim, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(row_ptr + HALF + dim, (second * cos + first * sin).to(dtype), mask=inside)


def rotary(query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    """Turn queries and keys to their positions, in place; they may be views of one merged projection.

    Element i of a head turns with element i + rotary_dim / 2; what lies past `rotary_dim` stays.

    Args:
        query: [num_tokens, num_heads, head_dim], last dim contiguous.
        key: [num_tokens, num_kv_heads, head_dim], last dim contiguous, dtype of `query`.
        cos_sin: [max_positions, rotary_dim] float32, contiguous: cosines in the first half of the columns,
            sines in the second, with any scaling of the model already in them.
        positions: [num_tokens] int64, each below max_positions.

    Raises:
        KernelShapeError: the tensors disagree on num_tokens, head_dim or dtype, or `rotary_dim` is odd or
            larger than head_dim.

    Source: RoFormer, arXiv 2104.09864. Moves 2 * (query.nbytes + key.nbytes) * rotary_dim / head_dim.
    """
    _check(query, key, cos_sin, positions)
    if query.is_cuda:
        rotary_triton(query, key, cos_sin, positions)
    else:
        rotary_reference(query, key, cos_sin, positions)


def rotary_triton(query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    """`rotary` in Triton, without its checks."""
    half = cos_sin.shape[1] // 2
    if query.shape[0] == 0 or half == 0:
        return
    _rotary_kernel[query.shape[0], query.shape[1] + key.shape[1]](
        query, key, cos_sin, positions, query.shape[1],
        query.stride(0), query.stride(1), key.stride(0), key.stride(1),
        HALF=half, PADDED_HALF=next_power_of_2(half),
    )  # fmt: skip


def rotary_reference(query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    """`rotary` in torch, computed in float32 and rounded once."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # each [num_tokens, 1, rotary_dim / 2]
    for heads in (query, key):
        first, second = heads[..., : cos_sin.shape[1]].chunk(2, dim=-1)
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
