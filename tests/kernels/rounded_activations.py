"""How activations are rounded to int8 for products with the blocks of quantised checkpoints: the oracle's formula."""

from __future__ import annotations

from torch import Tensor

GROUP = 32
BLOCK = 256


def rounded(x: Tensor) -> Tensor:
    """Return what int8 stands for in `x` [..., num_in], in its dtype.

    There is a scale for every 32 inputs; of whole 256, it is rounded up to eighths of the largest of the 256.
    """
    groups = x.unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    if x.shape[-1] % BLOCK == 0:
        of_blocks = scales.unflatten(-2, (-1, BLOCK // GROUP))
        eighths = of_blocks.amax(-2, keepdim=True) / 8
        scales = ((of_blocks / eighths).ceil().clamp(1, 8) * eighths).flatten(-3, -2)
    found: Tensor = ((groups / scales).round() * scales).flatten(-2)
    return found
