"""Linear layers that multiply float8 weights with inputs that are rounded to float8 as well."""

from __future__ import annotations

import operator
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor

from triolet.kernels.linear.scaled import ScaledWeight, round_tokens, scaled_linear
from triolet.model.backends.layers.linear import WeightOnlyLinear

T = TypeVar("T")


@attrs.frozen(eq=False, slots=True)
class ScaledLinear:
    """x @ weight.T + bias with an x that is rounded to float8."""

    weight: ScaledWeight
    bias: Tensor | None
    dtype: torch.dtype

    @classmethod
    def of(cls, layer: WeightOnlyLinear) -> ScaledLinear | None:
        """Return the same layer with rounded inputs; None if a part has other weights, or scales of blocks."""
        parts = [ScaledWeight.of(part) for part in layer.parts]
        known = [part for part in parts if part is not None]
        return cls(ScaledWeight.joined(known), layer.bias, layer.dtype) if len(known) == len(parts) else None

    def __call__(self, x: Tensor) -> Tensor:
        # [num_tokens, in] -> [num_tokens, out]
        y = scaled_linear(*round_tokens(x), self.weight, self.dtype)
        return y if self.bias is None else y + self.bias

    def stored(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight [num_out, num_in], dequantised, and the bias."""
        return (self.weight.values.float() * self.weight.scales.T).to(self.dtype), self.bias


def with_rounded_inputs(model: T) -> tuple[T, int]:
    """Return a decoder with a `ScaledLinear` in each place where one can be, and their number."""
    count = 0

    def changed(value: Any) -> Any:
        # the value itself if nothing in it changes
        nonlocal count
        if isinstance(value, WeightOnlyLinear):
            scaled = ScaledLinear.of(value)
            count += scaled is not None
            return value if scaled is None else scaled
        if type(value) is tuple:
            members = tuple(map(changed, value))
            return value if all(map(operator.is_, members, value)) else members
        if not attrs.has(type(value)):
            return value
        before = {field.name: getattr(value, field.name) for field in attrs.fields(type(value)) if field.init}
        after = {name: changed(member) for name, member in before.items()}
        new = {name: member for name, member in after.items() if member is not before[name]}
        return attrs.evolve(value, **new) if new else value

    return changed(model), count
