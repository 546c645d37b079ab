"""Write this step's keys and values into their slots of the paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from triolet.errors import KernelShapeError
from triolet.kernels._triton import kernel, next_power_of_2, run_or_reference
from triolet.kernels.float8 import as_bytes, fits_cache, float8_codes, mantissa_of, to_float8

if TYPE_CHECKING:
    import triton.language as tl


@kernel.with_widths("new_stride_t", "new_stride_h", "slots_stride_s", "slots_stride_h")
def _kv_write_kernel(
    new_ptr,  # [num_tokens, num_kv_heads, head_dim]
    slots_ptr,  # [num_slots, num_kv_heads, head_dim]; MANTISSA: codes of float8
    slot_mapping_ptr,  # [num_tokens]
    scale, new_stride_t, new_stride_h, slots_stride_s, slots_stride_h,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)  # int64: slot * stride passes 2**31 on large caches
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot < 0:
        return
    dim = tl.arange(0, PADDED_DIM)
    row_ptr = new_ptr + token * new_stride_t + head * new_stride_h
    row = tl.load(row_ptr + dim, mask=dim < HEAD_DIM, other=0.0)  # [PADDED_DIM]
    if MANTISSA:
        row = float8_codes(row.to(tl.float32), scale, MANTISSA)
    tl.store(slots_ptr + slot * slots_stride_s + head * slots_stride_h + dim, row, mask=dim < HEAD_DIM)


def kv_write(new: Tensor, cache: Tensor, slot_mapping: Tensor, scale: float = 1.0) -> None:
    """Write this step's keys (or values) into their slots, in place.

    Args:
        new: [num_tokens, num_kv_heads, head_dim], last dim contiguous.
        cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous, dtype of `new` or float8, device of `new`.
        slot_mapping: [num_tokens] int64, block_id * block_size + offset; negative = padding.
        scale: what numbers are divided by that become float8; those beyond its range become its greatest.

    Raises:
        KernelShapeError: `new` and `cache` disagree on (num_kv_heads, head_dim), dtype or device,
            `slot_mapping` on the number of tokens, or `cache` is not contiguous.

    Source: PagedAttention, arXiv 2309.06180. Moves 2 * new.nbytes + slot_mapping.nbytes.
    """
    _check(new, cache, slot_mapping)
    if new.is_cuda:
        run_or_reference(kv_write_triton, kv_write_reference, new, cache, slot_mapping, scale)
    else:
        kv_write_reference(new, cache, slot_mapping, scale)


def kv_write_triton(new: Tensor, cache: Tensor, slot_mapping: Tensor, scale: float = 1.0) -> None:
    """`kv_write` in Triton, without its checks."""
    if new.numel() == 0:
        return
    slots = as_bytes(cache).flatten(0, 1)
    _kv_write_kernel[new.shape[0], new.shape[1]](
        new, slots, slot_mapping, scale, new.stride(0), new.stride(1), slots.stride(0), slots.stride(1),
        HEAD_DIM=new.shape[2], PADDED_DIM=next_power_of_2(new.shape[2]), MANTISSA=mantissa_of(cache.dtype),
    )  # fmt: skip


def kv_write_reference(new: Tensor, cache: Tensor, slot_mapping: Tensor, scale: float = 1.0) -> None:
    """`kv_write` in torch."""
    live = slot_mapping >= 0
    if not live.all():
        new, slot_mapping = new[live], slot_mapping[live]
    if cache.dtype != new.dtype:
        new = to_float8(new, cache.dtype, scale).view(torch.uint8)
    as_bytes(cache).flatten(0, 1).index_copy_(0, slot_mapping, new)


def _check(new: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    if new.ndim != 3 or cache.ndim != 4 or new.shape[1:] != cache.shape[2:]:
        raise KernelShapeError("(num_kv_heads, head_dim)", new=tuple(new.shape), cache=tuple(cache.shape))
    if slot_mapping.shape != new.shape[:1]:
        raise KernelShapeError("num_tokens", new=tuple(new.shape), slot_mapping=tuple(slot_mapping.shape))
    if not fits_cache(new.dtype, cache.dtype):
        raise KernelShapeError("dtype", new=new.dtype, cache=cache.dtype)
    if not new.device == cache.device == slot_mapping.device:
        raise KernelShapeError("device", new=new.device, cache=cache.device, slot_mapping=slot_mapping.device)
    if not cache.is_contiguous() or new.stride(2) != 1:
        raise KernelShapeError("strides with contiguous rows", new=new.stride(), cache=cache.stride())
