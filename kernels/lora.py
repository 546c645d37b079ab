"""LoRA pair of a linear layer, and what it adds to the layer's output, in torch.

y += scaling * B (A x) for the tokens of one adapter; the scaling is folded into B. A layer that joins several modules
of the checkpoint (q, k and v) has a pair for each of them, which adds to that module's range of the output.

Source: LoRA, arXiv 2106.09685; DoRA, arXiv 2402.09353.
"""

from __future__ import annotations

import attrs
from torch import Tensor
from torch.nn import functional


@attrs.frozen(eq=False, kw_only=True)
class LowRankPair:
    """A and B of one module."""

    start: int  # first of its outputs in the layer
    a: Tensor  # [rank, num_in]
    b: Tensor  # [num_out, rank], with the scaling
    bias: Tensor | None = None  # [num_out], with the scaling
    # DoRA: the plain output, without the bias of the layer, and that of the pair are multiplied by it; [num_out].
    magnitude: Tensor | None = None
    layer_bias: Tensor | None = None  # [num_out], where there is a magnitude


def add_low_rank(y: Tensor, x: Tensor, pair: LowRankPair, tokens: Tensor | None) -> None:
    """Add what a pair makes of the input `x` of a layer to its output `y`, in place.

    Args:
        y: [num_tokens, num_out].
        x: [num_tokens, num_in].
        pair: of the layer, in any dtype.
        tokens: [num] int64, those of the adapter; None for all.
    """
    x = x if tokens is None else x[tokens]
    added = functional.linear(functional.linear(x.to(pair.a.dtype), pair.a), pair.b, pair.bias)
    part = y[:, pair.start : pair.start + len(pair.b)]
    if pair.magnitude is not None:
        plain = part if tokens is None else part[tokens]
        if pair.layer_bias is not None:
            plain = plain - pair.layer_bias
        added = added * pair.magnitude + plain * (pair.magnitude - 1)
    if tokens is None:
        part += added.to(y.dtype)
    else:
        part.index_add_(0, tokens, added.to(y.dtype))
