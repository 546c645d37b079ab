"""Linear layers whose weights and inputs are both float8 (E4M3), as a GPU's tensor cores multiply them.

Weights are those of a checkpoint in FP8, with a scale for each output. Inputs are rounded to float8 on the way in, with
a scale for each token. The product is torch's, in float32, times both scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import attrs
import torch
from torch import Tensor

from triolet.kernels._triton import kernel, next_power_of_2, run_or_reference
from triolet.kernels.float8 import float8_codes, to_float8
from triolet.kernels.linear.weight_only import PackedWeight

if TYPE_CHECKING:
    import triton.language as tl

GREATEST: Final = 448.0
"""Greatest number of E4M3."""
LEAST_SCALE: Final = 2.0**-100
"""Scale of a token of zeros."""
SIDES: Final = 16
"""Torch's product wants numbers of inputs and outputs that are multiples of it."""


@kernel.with_widths("x_stride")
def _round_tokens_kernel(
    x_ptr,  # [num_tokens, DIM]
    codes_ptr,  # [num_tokens, DIM] uint8, contiguous
    scales_ptr,  # [num_tokens] float32
    x_stride,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED_DIM)
    inside = column < DIM
    x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), axis=0), 448.0), LEAST)
    tl.store(scales_ptr + token, scale)
    tl.store(codes_ptr + token * DIM + column, float8_codes(x, scale, 3), mask=inside)


def round_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each token to float8, its largest number to the greatest that there is.

    Args:
        x: [num_tokens, dim], rows contiguous.

    Returns:
        [num_tokens, dim] float8 (E4M3), contiguous, and [num_tokens, 1] float32, by which to multiply it. A token with
        NaN or infinity has NaN in it.

    Moves x.nbytes, and a byte a number.
    """
    if x.is_cuda:
        return run_or_reference(round_tokens_triton, round_tokens_reference, x)
    return round_tokens_reference(x)


def round_tokens_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """`round_tokens` in Triton."""
    num_tokens, dim = x.shape
    codes = torch.empty(num_tokens, dim, dtype=torch.uint8, device=x.device)
    scales = torch.empty(num_tokens, 1, dtype=torch.float32, device=x.device)
    if num_tokens:
        padded = next_power_of_2(dim)
        _round_tokens_kernel[num_tokens,](
            x, codes, scales, x.stride(0), DIM=dim, PADDED_DIM=padded, LEAST=LEAST_SCALE,
            num_warps=8 if padded > 4096 else 4,
        )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scales


def round_tokens_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """`round_tokens` in torch."""
    wide = x.float()
    scales = (wide.abs().amax(1, keepdim=True) / GREATEST).clamp_min(LEAST_SCALE)
    return to_float8(wide / scales, torch.float8_e4m3fn, 1.0), scales


@attrs.frozen(eq=False)
class ScaledWeight:
    """Weight in float8 with a scale for each output."""

    values: Tensor  # [num_out, num_in] float8 (E4M3), contiguous
    scales: Tensor  # [1, num_out] float32, contiguous

    @classmethod
    def of(cls, weight: PackedWeight) -> ScaledWeight | None:
        """Return a packed weight in another view; None if it is no such weight."""
        is_one_group = weight.group_size >= weight.num_in and not weight.has_adjacent_outputs
        if not weight.is_float or not is_one_group or weight.num_in % SIDES or weight.num_out % SIDES:
            return None
        values = weight.words.T.view(torch.uint8).view(torch.float8_e4m3fn)
        return cls(values, weight.scales.float().contiguous())

    @classmethod
    def joined(cls, parts: Sequence[ScaledWeight]) -> ScaledWeight:
        """Join weights along the outputs."""
        # as bytes, since torch cannot join float8 on every device
        as_bytes = torch.cat([part.values.view(torch.uint8) for part in parts])
        return cls(as_bytes.view(torch.float8_e4m3fn), torch.cat([part.scales for part in parts], dim=1))


def scaled_linear(x: Tensor, scales: Tensor, weight: ScaledWeight, dtype: torch.dtype) -> Tensor:
    """Compute x @ weight.T of what `round_tokens` has rounded.

    Args:
        x: [num_tokens, num_in] float8.
        scales: [num_tokens, 1].
        weight: of the layer.
        dtype: of the result; a GPU has bfloat16 alone.

    Returns:
        [num_tokens, num_out].
    """
    return torch._scaled_mm(
        x, weight.values.T, scale_a=scales, scale_b=weight.scales, out_dtype=dtype, use_fast_accum=False
    )
