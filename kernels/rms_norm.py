"""Root-mean-square normalisation, with the residual addition before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor
from torch.nn import functional

from triolet.errors import KernelShapeError
from triolet.kernels._triton import kernel, next_power_of_2, run_or_reference

if TYPE_CHECKING:
    import triton.language as tl


@kernel.with_widths("x_stride_t", "x_stride_h", "residual_stride_t", "residual_stride_h")
def _rms_norm_kernel(
    x_ptr,  # [num_tokens, num_heads, dim]
    residual_ptr,  # [num_tokens, num_heads, dim], or anything without HAS_RESIDUAL
    weight_ptr,  # [dim]
    out_ptr,  # [num_tokens, num_heads, dim], contiguous
    new_residual_ptr,  # like out_ptr
    eps, weight_offset, x_stride_t, x_stride_h, residual_stride_t, residual_stride_h,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, PADDED_DIM)
    inside = column < DIM
    out_row = (token * tl.num_programs(1) + head) * DIM
    dtype = out_ptr.dtype.element_ty
    x_row_ptr = x_ptr + token * x_stride_t + head * x_stride_h
    x = tl.load(x_row_ptr + column, mask=inside, other=0.0).to(tl.float32)  # [PADDED_DIM]
    if HAS_RESIDUAL:
        residual_row_ptr = residual_ptr + token * residual_stride_t + head * residual_stride_h
        x += tl.load(residual_row_ptr + column, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(dtype)  # what is normalised is the sum as it is stored
        tl.store(new_residual_ptr + out_row + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    normed = x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) / DIM + eps))  # [PADDED_DIM]
    if HAS_OFFSET:
        out = normed * (weight_offset + weight)
    else:
        out = normed.to(dtype).to(tl.float32) * weight
    tl.store(out_ptr + out_row + column, out.to(dtype), mask=inside)


@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: None = None, weight_offset: float = 0.0
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, weight_offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise each row to a root mean square of one and scale it; out of place.

    The rounding is that of transformers: Llama's when `weight_offset` is 0 (normalise in float32, round to
    the dtype of `x`, then multiply), Gemma's otherwise (multiply with `weight_offset + weight` in float32,
    round last).

    Args:
        x: [num_tokens, dim], or [num_tokens, num_heads, dim] for a norm per head; last dim contiguous.
        weight: [dim], dtype of `x`.
        eps: added to the mean square.
        residual: shape and dtype of `x`; added to `x` first.
        weight_offset: added to `weight`; Gemma stores its weights minus 1.

    Returns:
        The normalised rows, or with `residual` (normalised rows, `x + residual`); shape and dtype of `x`.

    Raises:
        KernelShapeError: `weight` or `residual` does not fit `x`.

    Source: RMSNorm, arXiv 1910.07467. Moves 2 * x.nbytes, 4 * x.nbytes with `residual`.
    """
    _check(x, weight, residual)
    if x.is_cuda:
        normed, new_residual = run_or_reference(
            rms_norm_triton,
            rms_norm_reference,
            x,
            weight,
            eps,
            residual=residual,
            weight_offset=weight_offset,
        )
    else:
        normed, new_residual = _rms_norm_cpu(x, weight, eps, residual=residual, weight_offset=weight_offset)
    return normed if residual is None else (normed, new_residual)


def rms_norm_triton(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None, weight_offset: float
) -> tuple[Tensor, Tensor]:
    """`rms_norm` in Triton, always as a pair; without `residual` the second is `x`."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    new_residual = x if residual is None else torch.empty_like(out)
    heads = x if x.ndim == 3 else x.unsqueeze(1)
    added = heads if residual is None else residual.view(heads.shape)
    if out.numel():
        _rms_norm_kernel[heads.shape[0], heads.shape[1]](
            heads, added, weight, out, new_residual, eps, weight_offset,
            heads.stride(0), heads.stride(1), added.stride(0), added.stride(1),
            DIM=x.shape[-1], PADDED_DIM=next_power_of_2(x.shape[-1]),
            HAS_RESIDUAL=residual is not None, HAS_OFFSET=weight_offset != 0.0,
        )  # fmt: skip
    return out, new_residual


def _rms_norm_cpu(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None, weight_offset: float
) -> tuple[Tensor, Tensor]:
    if x.dtype != torch.float32:  # torch's own would round once, the models round twice
        return rms_norm_reference(x, weight, eps, residual=residual, weight_offset=weight_offset)
    total = x if residual is None else x + residual
    factor = weight + weight_offset if weight_offset else weight
    return functional.rms_norm(total, weight.shape, factor, eps), total


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None, weight_offset: float
) -> tuple[Tensor, Tensor]:
    """`rms_norm` in torch, always as a pair; without `residual` the second is `x`."""
    total = x if residual is None else x + residual
    wide = total.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight_offset:
        return (normed * (weight_offset + weight.float())).to(x.dtype), total
    return normed.to(x.dtype) * weight, total


def _check(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    if x.ndim not in (2, 3) or weight.shape != x.shape[-1:]:
        raise KernelShapeError("dim", x=tuple(x.shape), weight=tuple(weight.shape))
    if x.dtype != weight.dtype or x.device != weight.device:
        raise KernelShapeError(
            "dtype and device", x=(x.dtype, str(x.device)), weight=(weight.dtype, str(weight.device))
        )
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise KernelShapeError("strides with contiguous rows", x=x.stride())
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise KernelShapeError(
            "shape and dtype", x=(tuple(x.shape), x.dtype), residual=(tuple(residual.shape), residual.dtype)
        )
