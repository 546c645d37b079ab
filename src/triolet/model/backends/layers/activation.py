"""Activations of feed-forward blocks, plain and multiplied by a second projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Self

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from triolet.kernels.silu_mul import gelu_tanh_mul, silu_mul
from triolet.model.architectures.decoder_config import ClampedGate

Activation = Callable[[Tensor], Tensor]


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _squared_relu(x: Tensor) -> Tensor:
    return functional.relu(x).square()


PLAIN: Final[dict[str, Activation]] = {
    "silu": functional.silu,
    "gelu_tanh": _gelu_tanh,
    "gelu": functional.gelu,
    "relu": functional.relu,
    "relu2": _squared_relu,
}
"""Activations by their names in `DecoderConfig`."""

_GATED: dict[str, Activation] = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}


@attrs.frozen
class Xielu:
    """An activation with a slope, and curves above and below 0, that a layer has learned. Source: arXiv 2411.13010."""

    positive: float  # factor of the square above 0
    negative: float  # factor of exp(x) - 1 - x from 0 down
    slope: float
    largest: float  # exp(x) - 1 is of numbers up to this one, just below 0

    @classmethod
    def of(cls, alpha_p: float, alpha_n: float, beta: float, eps: float) -> Self:
        """Return the activation of numbers as they are stored."""
        positive, negative = functional.softplus(
            torch.tensor([alpha_p, alpha_n], dtype=torch.float32)
        ).tolist()
        return cls(positive, negative + beta, beta, eps)

    def __call__(self, x: Tensor) -> Tensor:
        above = self.positive * x * x
        below = (x.clamp(max=self.largest).expm1() - x) * self.negative
        return torch.where(x > 0, above, below) + self.slope * x


def feed_forward_activation(name: str, *, gated: bool) -> Activation:
    """Return the activation; a gated one maps [..., 2 * n], gate and up side by side, to [..., n]."""
    plain = PLAIN[name]
    if not gated:
        return plain

    def activate_and_multiply(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return plain(gate) * up

    return _GATED.get(name, activate_and_multiply)


def scaled_gate(name: str, gate_scale: float, scale: float, gate_up: Tensor) -> Tensor:
    """Compute a gated activation whose gate and whose result are multiplied by a number (Falcon-H1).

    [..., 2 * n], gate and up side by side, to [..., n].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return PLAIN[name](gate * gate_scale) * up * scale


def clamped_gate(config: ClampedGate, gate_up: Tensor) -> Tensor:
    """Compute the activation of gpt-oss: [..., 2 * n], gate and up side by side, to [..., n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=config.limit)
    return (up.clamp(-config.limit, config.limit) + 1) * (gate * torch.sigmoid(gate * config.alpha))
