"""Rotary position encoding: from a config's parameters to frequencies, and from positions to cosines and sines.

Each way of stretching a model's context is one function from parameters to frequencies; what the decoder sees is only
the outcome, a `Rope`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from triolet.errors import UnsupportedModel
from triolet.model.folder.json_fields import Fields


@attrs.frozen
class Rope:
    """How queries and keys turn with their position."""

    # Radians per token, one for each pair of rotated dimensions; float32 values.
    frequencies: tuple[float, ...]
    magnitude: float = 1.0  # what cosines and sines are multiplied by
    interleaved: bool = False  # adjacent dimensions turn together, not those of the two halves

    @property
    def rotary_dim(self) -> int:
        """Return the number of leading dimensions of a head that are rotated."""
        return 2 * len(self.frequencies)


@attrs.frozen(kw_only=True)
class RopeContext:
    """What a scaling rule needs to know of the model around it."""

    rotary_dim: int  # leading dimensions of a head that turn, even
    theta: float  # base of the geometric series of wavelengths
    max_position: int  # `max_position_embeddings` of the config, tokens
    original_max_position: int  # length the model was first trained with, tokens
    long_context: bool = False  # sequences longer than `original_max_position` are wanted


def _plain_frequencies(context: RopeContext) -> Tensor:
    # [rotary_dim / 2] float32; source: RoFormer, arXiv 2104.09864
    exponents = torch.arange(0, context.rotary_dim, 2, dtype=torch.float32) / context.rotary_dim
    return 1.0 / (context.theta**exponents)


def _default(parameters: Fields, context: RopeContext) -> tuple[Tensor, float]:
    return _plain_frequencies(context), 1.0


def _linear(parameters: Fields, context: RopeContext) -> tuple[Tensor, float]:
    return _plain_frequencies(context) / _factor(parameters), 1.0


def _dynamic(parameters: Fields, context: RopeContext) -> tuple[Tensor, float]:
    # Dynamic NTK changes nothing up to `max_position`. Beyond it the base grows with the length, and keys that are in
    # the cache already would have the wrong rotation, so the engine refuses longer sequences.
    _factor(parameters)
    return _plain_frequencies(context), 1.0


def _llama3(parameters: Fields, context: RopeContext) -> tuple[Tensor, float]:
    # slow down long wavelengths, keep short ones, blend between; source: Llama 3.1 model code
    factor = _factor(parameters)
    low, high = parameters.number("low_freq_factor", 1.0), parameters.number("high_freq_factor", 4.0)
    if high <= low:
        raise parameters.wrong("high_freq_factor", f"greater than low_freq_factor ({low})")
    frequencies = _plain_frequencies(context)
    wavelengths = 2 * math.pi / frequencies
    share_kept = ((context.original_max_position / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - share_kept) * frequencies / factor + share_kept * frequencies, 1.0


def _yarn(parameters: Fields, context: RopeContext) -> tuple[Tensor, float]:
    # interpolate slow dimensions, extrapolate fast ones; source: YaRN, arXiv 2309.00071
    factor = _factor(parameters)
    bounds = [
        context.rotary_dim
        * math.log(context.original_max_position / (rotations * 2 * math.pi))
        / (2 * math.log(context.theta))
        for rotations in (_positive(parameters, "beta_fast", 32.0), _positive(parameters, "beta_slow", 1.0))
    ]
    if parameters.flag("truncate", True):
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    low, high = max(bounds[0], 0), min(bounds[1], context.rotary_dim - 1)
    steps = torch.arange(context.rotary_dim // 2, dtype=torch.float32)
    share_stretched = ((steps - low) / ((high - low) or 0.001)).clamp(0.0, 1.0)
    frequencies = _plain_frequencies(context)
    frequencies = frequencies / factor * share_stretched + frequencies * (1 - share_stretched)
    return frequencies, _yarn_magnitude(parameters, factor)


def _yarn_magnitude(parameters: Fields, factor: float) -> float:
    def of(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = parameters.optional_number("attention_factor")
    if given is not None:
        return given
    mscale, mscale_all_dim = parameters.number("mscale", 0.0), parameters.number("mscale_all_dim", 0.0)
    if mscale_all_dim < 0.0:
        raise parameters.wrong("mscale_all_dim", "a number of at least 0")
    return of(mscale) / of(mscale_all_dim) if mscale and mscale_all_dim else of(1.0)


def _longrope(parameters: Fields, context: RopeContext) -> tuple[Tensor, float]:
    # one divisor per dimension, from a list for short or for long contexts; source: LongRoPE, arXiv 2402.13753
    name = "long_factor" if context.long_context else "short_factor"
    divisors = parameters.numbers(name)
    if len(divisors) != context.rotary_dim // 2 or not all(divisor > 0 for divisor in divisors):
        raise parameters.wrong(name, f"{context.rotary_dim // 2} positive numbers")
    stretch = parameters.optional_number("factor") or context.max_position / context.original_max_position
    magnitude = parameters.optional_number("attention_factor")
    if magnitude is None:
        growth = math.log(stretch) / math.log(context.original_max_position) if stretch > 1 else 0.0
        magnitude = math.sqrt(1 + growth)
    return _plain_frequencies(context) / torch.tensor(divisors, dtype=torch.float32), magnitude


def _proportional(parameters: Fields, context: RopeContext) -> tuple[Tensor, float]:
    # a share of the head turns by the first frequencies of the whole head; source: Gemma 4 in transformers
    share = _positive(parameters, "partial_rotary_factor", 1.0)
    frequencies = _plain_frequencies(context)
    frequencies[min(int(share * context.rotary_dim // 2), context.rotary_dim) :] = 0.0
    return frequencies / _positive(parameters, "factor", 1.0), 1.0


def _positive(parameters: Fields, name: str, default: float) -> float:
    value = parameters.number(name, default)
    if value <= 0.0:
        raise parameters.wrong(name, "a number greater than 0")
    return value


def _factor(parameters: Fields) -> float:
    factor = parameters.number("factor", 0.0)
    if factor < 1.0:
        raise parameters.wrong("factor", "a number of at least 1")
    return factor


_RULES: dict[str, Callable[[Fields, RopeContext], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}


def rope_type(parameters: Fields) -> str:
    """Return the name of the scaling rule; older configs say `type`, and `su` for `longrope`.

    Raises:
        UnsupportedModel: a rule that the native decoder does not know.
    """
    name = parameters.text("rope_type", parameters.text("type", "default"))
    # Of text, the positions of `mrope` in time, height and width are the same.
    name = {"su": "longrope", "mrope": "default"}.get(name, name)
    if name not in _RULES:
        raise UnsupportedModel(
            f"{parameters.path}: {parameters.prefix}rope_type must be one of {', '.join(_RULES)}; got {name!r}"
        )
    return name


def build_rope(parameters: Fields, context: RopeContext) -> Rope:
    """Compute the frequencies that `parameters` ask for.

    Raises:
        UnsupportedModel: the rule is not known.
        ModelFileError: a parameter of the rule is wrong.
    """
    frequencies, magnitude = _RULES[rope_type(parameters)](parameters, context)
    return Rope(tuple(frequencies.tolist()), magnitude)


def rope_table(rope: Rope, num_positions: int, device: torch.device) -> Tensor:
    """Tabulate cosines and sines, as `triolet.kernels.rotary` reads them.

    Returns:
        [num_positions, rotary_dim] float32: cosines in the first half of the columns, sines in the second.
    """
    frequencies = torch.tensor(rope.frequencies, dtype=torch.float32, device=device)
    angles = torch.arange(num_positions, dtype=torch.float32, device=device)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(rope.magnitude)
