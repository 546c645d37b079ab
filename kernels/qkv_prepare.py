"""What lies between the merged projection and attention, in one launch: head norms, rotation and cache writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from torch import Tensor

from triolet.errors import KernelShapeError
from triolet.kernels._triton import kernel, next_power_of_2, run_or_reference
from triolet.kernels.float8 import as_bytes, fits_cache, float8_codes, mantissa_of
from triolet.kernels.kv_write import kv_write_reference
from triolet.kernels.rms_norm import rms_norm_reference
from triolet.kernels.rotary import rotary_reference, rotated

if TYPE_CHECKING:
    import triton.language as tl


@kernel.with_widths("heads_stride_t")
def _qkv_prepare_kernel(
    heads_ptr,  # [num_tokens, num_heads + 2 * num_kv_heads, HEAD_DIM], heads contiguous; queries are changed in place
    keys_ptr,  # [num_slots, num_kv_heads, HEAD_DIM], contiguous; MANTISSA: codes of float8
    values_ptr,  # like keys_ptr
    slot_mapping_ptr,  # [num_tokens]
    query_weight_ptr,  # HAS_NORM only: [HEAD_DIM]
    key_weight_ptr,  # HAS_NORM only: [HEAD_DIM]
    cos_sin_ptr,  # HALF > 0 only: [max_positions, 2 * HALF], contiguous
    positions_ptr,  # [num_tokens]
    num_heads, num_kv_heads, eps, weight_offset, key_scale, value_scale, heads_stride_t,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr, PADDED_REST: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_OFFSET: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    """Prepare one head of one token: a query stays where it is, a key or a value goes to its slot.

    The head is in two halves that turn against each other, and the rest, which does not turn.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row_ptr = heads_ptr + token * heads_stride_t + head * HEAD_DIM
    is_query = head < num_heads
    is_value = head >= num_heads + num_kv_heads
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if (slot < 0) & (head >= num_heads):
        return
    kv_head = tl.where(is_value, head - num_heads - num_kv_heads, head - num_heads).to(tl.int64)
    kept = (slot * num_kv_heads + kv_head) * HEAD_DIM
    turned = tl.arange(0, PADDED_HALF)
    rest = 2 * HALF + tl.arange(0, PADDED_REST)
    turns = turned < HALF
    stays = rest < HEAD_DIM
    dtype = heads_ptr.dtype.element_ty
    if is_value:
        for part in tl.static_range(2):
            place = part * HALF + turned
            value = tl.load(row_ptr + place, mask=turns, other=0.0)
            if MANTISSA:
                value = float8_codes(value.to(tl.float32), value_scale, MANTISSA)
            tl.store(values_ptr + kept + place, value, mask=turns)
        value_rest = tl.load(row_ptr + rest, mask=stays, other=0.0)
        if MANTISSA:
            value_rest = float8_codes(value_rest.to(tl.float32), value_scale, MANTISSA)
        tl.store(values_ptr + kept + rest, value_rest, mask=stays)
        return
    first = tl.load(row_ptr + turned, mask=turns, other=0.0).to(tl.float32)
    second = tl.load(row_ptr + HALF + turned, mask=turns, other=0.0).to(tl.float32)
    other = tl.load(row_ptr + rest, mask=stays, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = (
            tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0) + tl.sum(other * other, axis=0)
        )
        factor = 1.0 / tl.sqrt(squares / HEAD_DIM + eps)
        weight_ptr = key_weight_ptr
        if is_query:
            weight_ptr = query_weight_ptr
        first_weight = tl.load(weight_ptr + turned, mask=turns, other=0.0).to(tl.float32)
        second_weight = tl.load(weight_ptr + HALF + turned, mask=turns, other=0.0).to(tl.float32)
        other_weight = tl.load(weight_ptr + rest, mask=stays, other=0.0).to(tl.float32)
        if HAS_OFFSET:
            first = first * factor * (weight_offset + first_weight)
            second = second * factor * (weight_offset + second_weight)
            other = other * factor * (weight_offset + other_weight)
        else:
            first = (first * factor).to(dtype).to(tl.float32) * first_weight
            second = (second * factor).to(dtype).to(tl.float32) * second_weight
            other = (other * factor).to(dtype).to(tl.float32) * other_weight
        # The rounding of a norm that stands alone.
        first = first.to(dtype).to(tl.float32)
        second = second.to(dtype).to(tl.float32)
    new_first = first
    new_second = second
    if HALF > 0:
        turn_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF) + turned
        cos = tl.load(turn_ptr, mask=turns, other=0.0).to(tl.float32)
        sin = tl.load(turn_ptr + HALF, mask=turns, other=0.0).to(tl.float32)
        new_first, new_second = rotated(first, second, cos, sin)
    new_first = new_first.to(dtype)
    new_second = new_second.to(dtype)
    other = other.to(dtype)
    if MANTISSA:
        if head >= num_heads:
            code_ptr = keys_ptr + kept
            first_code = float8_codes(new_first.to(tl.float32), key_scale, MANTISSA)
            second_code = float8_codes(new_second.to(tl.float32), key_scale, MANTISSA)
            tl.store(code_ptr + turned, first_code, mask=turns)
            tl.store(code_ptr + HALF + turned, second_code, mask=turns)
            other_code = float8_codes(other.to(tl.float32), key_scale, MANTISSA)
            tl.store(code_ptr + rest, other_code, mask=stays)
            return
        out_ptr = row_ptr
    else:
        out_ptr = row_ptr
        if head >= num_heads:
            out_ptr = keys_ptr + kept
    tl.store(out_ptr + turned, new_first, mask=turns)
    tl.store(out_ptr + HALF + turned, new_second, mask=turns)
    tl.store(out_ptr + rest, other, mask=stays)


@attrs.frozen(eq=False, kw_only=True)
class HeadNorms:
    """Norms of each query and each key head; see `triolet.kernels.rms_norm`."""

    query_weight: Tensor  # [head_dim]
    key_weight: Tensor  # [head_dim]
    eps: float
    weight_offset: float


def qkv_prepare(
    heads: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    *,
    num_heads: int,
    norms: HeadNorms | None,
    cos_sin: Tensor | None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Normalise and turn queries and keys, and write keys and values into their slots.

    Args:
        heads: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], heads contiguous: queries, keys, values. The
            queries are changed in place, and in the reference the keys.
        keys: [num_blocks, block_size, num_kv_heads, head_dim], contiguous, dtype of `heads` or float8.
        values: the same.
        slot_mapping: [num_tokens] int64; a negative slot keeps nothing.
        positions: [num_tokens] int64.
        num_heads: number of query heads.
        norms: None = they are not normalised.
        cos_sin: [max_positions, rotary_dim] float32; None = they are not turned; see `triolet.kernels.rotary`.
        key_scale: what keys are divided by that become float8; see `triolet.kernels.kv_write`.
        value_scale: the same of values.

    Returns:
        [num_tokens, num_heads, head_dim], the queries, a view of `heads`.

    Raises:
        KernelShapeError: the tensors disagree on heads, dtype or head_dim.

    Source: the norms, RMSNorm, arXiv 1910.07467; the rotation, RoFormer, arXiv 2104.09864. Moves 2 * heads.nbytes.
    """
    num_kv_heads, head_dim = keys.shape[2:]
    if heads.shape[1:] != (num_heads + 2 * num_kv_heads, head_dim) or keys.shape != values.shape:
        raise KernelShapeError("heads and caches", heads=tuple(heads.shape), keys=tuple(keys.shape))
    if (
        not fits_cache(heads.dtype, keys.dtype)
        or keys.dtype != values.dtype
        or heads.stride()[1:] != (head_dim, 1)
    ):
        raise KernelShapeError(
            "dtype and contiguous heads", heads=(heads.dtype, heads.stride()), keys=keys.dtype
        )
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise KernelShapeError("contiguous caches", keys=keys.stride(), values=values.stride())
    args = heads, keys, values, slot_mapping, positions
    if heads.is_cuda:
        return run_or_reference(
            qkv_prepare_triton,
            qkv_prepare_reference,
            *args,
            num_heads=num_heads,
            norms=norms,
            cos_sin=cos_sin,
            key_scale=key_scale,
            value_scale=value_scale,
        )
    return qkv_prepare_reference(
        *args,
        num_heads=num_heads,
        norms=norms,
        cos_sin=cos_sin,
        key_scale=key_scale,
        value_scale=value_scale,
    )


def qkv_prepare_triton(
    heads: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    *,
    num_heads: int,
    norms: HeadNorms | None,
    cos_sin: Tensor | None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """`qkv_prepare` in Triton, without its checks."""
    num_tokens, all_heads, head_dim = heads.shape
    half = 0 if cos_sin is None else cos_sin.shape[1] // 2
    if num_tokens:
        _qkv_prepare_kernel[num_tokens, all_heads](
            heads, as_bytes(keys), as_bytes(values), slot_mapping,
            heads if norms is None else norms.query_weight,
            heads if norms is None else norms.key_weight,
            heads if cos_sin is None else cos_sin,
            positions, num_heads, keys.shape[2],
            0.0 if norms is None else norms.eps, 0.0 if norms is None else norms.weight_offset,
            key_scale, value_scale, heads.stride(0),
            HEAD_DIM=head_dim, HALF=half, PADDED_HALF=next_power_of_2(max(half, 1)),
            PADDED_REST=next_power_of_2(max(head_dim - 2 * half, 1)),
            HAS_NORM=norms is not None, HAS_OFFSET=norms is not None and norms.weight_offset != 0.0,
            MANTISSA=mantissa_of(keys.dtype),
            num_warps=1,
        )  # fmt: skip
    return heads.narrow(1, 0, num_heads)


def qkv_prepare_reference(
    heads: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    *,
    num_heads: int,
    norms: HeadNorms | None,
    cos_sin: Tensor | None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """`qkv_prepare` in torch, as the three operations that it is made of."""
    num_kv_heads = keys.shape[2]
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)  # views
    if norms is not None:
        for part, weight in ((query, norms.query_weight), (key, norms.key_weight)):
            normed, _ = rms_norm_reference(
                part, weight, norms.eps, residual=None, weight_offset=norms.weight_offset
            )
            part.copy_(normed)
    if cos_sin is not None:
        rotary_reference(query, key, cos_sin, positions)
    kv_write_reference(key, keys, slot_mapping, key_scale)
    kv_write_reference(value, values, slot_mapping, value_scale)
    return heads.narrow(1, 0, num_heads)
