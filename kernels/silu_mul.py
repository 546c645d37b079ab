"""The gate of a gated feed-forward block: an activation of one half of a row times the other half."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from triolet.errors import KernelShapeError
from triolet.kernels._triton import kernel, run_or_reference

if TYPE_CHECKING:
    import triton.language as tl

_TILE = 1024


@kernel.with_widths("dim", "gate_up_stride")
def _gate_mul_kernel(
    gate_up_ptr,  # [num_rows, 2 * dim]
    out_ptr,  # [num_rows, dim], contiguous
    dim, gate_up_stride,
    GELU: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < dim
    gate_ptr = gate_up_ptr + row * gate_up_stride + column
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)  # [TILE]
    up = tl.load(gate_ptr + dim, mask=inside, other=0.0).to(tl.float32)  # [TILE]
    if GELU:
        # 0.5 * (1 + tanh(z)) is sigmoid(2 * z), with z = sqrt(2 / pi) * (gate + 0.044715 * gate**3)
        argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        argument = gate
    # exp of a negative number only: the other branch would overflow
    small = tl.exp(-tl.abs(argument))
    sigmoid = tl.where(argument >= 0, 1.0, small) / (1.0 + small)
    tl.store(out_ptr + row * dim + column, (gate * sigmoid * up).to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Multiply the SiLU of the first half of each row with its second half.

    Args:
        gate_up: [..., 2 * dim]; gate in the first `dim` columns, up in the last.

    Returns:
        [..., dim], dtype of `gate_up`, contiguous.

    Raises:
        KernelShapeError: the last dimension is odd.

    Source: SwiGLU, arXiv 2002.05202. Moves 1.5 * gate_up.nbytes.
    """
    _check(gate_up)
    if gate_up.is_cuda:
        return run_or_reference(silu_mul_triton, silu_mul_reference, gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    """`silu_mul` in Triton."""
    return _gate_mul_triton(gate_up, gelu=False)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """`silu_mul` in plain arithmetic, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """Multiply the GELU (tanh form) of the first half of each row with its second half.

    Without a gate, as in GPT-2, `torch.nn.functional.gelu(x, approximate="tanh")` is one kernel already.

    Args:
        gate_up: [..., 2 * dim]; gate in the first `dim` columns, up in the last.

    Returns:
        [..., dim], dtype of `gate_up`, contiguous.

    Raises:
        KernelShapeError: the last dimension is odd.

    Source: GEGLU, arXiv 2002.05202; GELU's tanh form, arXiv 1606.08415. Moves 1.5 * gate_up.nbytes.
    """
    _check(gate_up)
    if gate_up.is_cuda:
        return run_or_reference(gelu_tanh_mul_triton, gelu_tanh_mul_reference, gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def gelu_tanh_mul_triton(gate_up: Tensor) -> Tensor:
    """`gelu_tanh_mul` in Triton."""
    return _gate_mul_triton(gate_up, gelu=True)


def gelu_tanh_mul_reference(gate_up: Tensor) -> Tensor:
    """`gelu_tanh_mul` in plain arithmetic, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return (0.5 * gate * (1 + torch.tanh(inner)) * up).to(gate_up.dtype)


def _gate_mul_triton(gate_up: Tensor, *, gelu: bool) -> Tensor:
    dim = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * dim)
    out = gate_up.new_empty(*gate_up.shape[:-1], dim)
    if out.numel():
        _gate_mul_kernel[len(rows), -(-dim // _TILE)](rows, out, dim, rows.stride(0), GELU=gelu, TILE=_TILE)
    return out


def _check(gate_up: Tensor) -> None:
    if gate_up.ndim < 1 or gate_up.shape[-1] % 2:
        raise KernelShapeError("the widths of gate and up", gate_up=tuple(gate_up.shape))
