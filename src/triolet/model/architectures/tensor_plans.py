"""Plans of the decoder's tensors: which tensors of a checkpoint each one is read from."""

from __future__ import annotations

from collections.abc import Container

import attrs

from triolet.model.architectures.decoder_config import TensorNames

Shape = tuple[int, ...]


@attrs.frozen
class TensorPlan:
    """One tensor of the decoder."""

    # Name and stored shape of each tensor of the checkpoint; joined along the output dimension.
    sources: tuple[tuple[str, Shape], ...]
    transposed: bool = False  # the sources lie as [in, out]
    # Heads, if the source has the rows of a head's query, key and value after those of the head before; 0 if it has all
    # queries first.
    num_joined_heads: int = 0


@attrs.define
class Planner:
    """Collects the plans of one model."""

    names: TensorNames
    prefix: str
    available: Container[str]
    plans: dict[str, TensorPlan] = attrs.field(factory=dict)

    def vector(self, ours: str, theirs: str, size: int, *, bias: bool = False) -> None:
        """Plan a norm's weight and, with `bias`, its bias."""
        for part in ("weight", "bias") if bias else ("weight",):
            self.plans[f"{ours}.{part}"] = TensorPlan(((f"{theirs}.{part}", (size,)),))

    def number(self, ours: str, theirs: str, shape: Shape) -> None:
        """Plan a number of a layer."""
        self.plans[ours] = TensorPlan(((theirs, shape),))

    def head_norms(self, ours: str, theirs: str, num_heads: int, head_dim: int) -> None:
        """Plan the weights of norms of which each head has one: tensors of their own, or rows of one."""
        each: tuple[tuple[str, Shape], ...]
        if "{head}" in theirs:
            each = tuple((theirs.format(head=head) + ".weight", (head_dim,)) for head in range(num_heads))
        else:
            each = ((f"{theirs}.weight", (num_heads, head_dim)),)
        self.plans[f"{ours}.weight"] = TensorPlan(each)

    def table(self, ours: str, theirs: str, rows: int, columns: int) -> None:
        """Plan a matrix that is loaded unchanged: an embedding or a head."""
        self.plans[f"{ours}.weight"] = TensorPlan(((f"{theirs}.weight", (rows, columns)),))

    def linear(self, ours: str, theirs: tuple[str, ...], outs: Shape, size_in: int, *, bias: bool) -> None:
        """Plan projections to `outs`, joined into one; a single name is a checkpoint that has them joined already."""
        # The checkpoint has them joined already, in the same order.
        if len(theirs) == 1:
            outs = (sum(outs),)
        flip = self.names.transposed
        weights = tuple(
            (f"{name}.weight", (size_in, out) if flip else (out, size_in))
            for name, out in zip(theirs, outs, strict=True)
        )
        self.plans[f"{ours}.weight"] = TensorPlan(weights, transposed=flip)
        if bias:
            biases = tuple((f"{name}.bias", (out,)) for name, out in zip(theirs, outs, strict=True))
            self.plans[f"{ours}.bias"] = TensorPlan(biases)
