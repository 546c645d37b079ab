"""Sampling parameters that the command line, presets and the chat set: their flags, and the check of their values."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Final

import attrs

from triolet.core.request.param_validation import SamplingParameter
from triolet.core.request.params import SAMPLING_PARAMETERS, SamplingParams

SAMPLING_OPTIONS: Final = tuple(one for one in SAMPLING_PARAMETERS if one.spec.no_flag is None)
"""Sampling parameters that the command line has a flag for."""
_KINDS: Final[Mapping[str, type[int | float | str]]] = {
    "int": int,
    "float": float,
    "tuple[str, ...]": str,
}


def kind_of(option: SamplingParameter) -> type[int | float | str]:
    """Return the type that the text of a sampling flag is read as."""
    return _KINDS[option.value_type]


def with_sampling_values(
    defaults: SamplingParams, sampling: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Check sampling parameters; return them, and the sentences to show for values that had to be changed.

    Args:
        defaults: parameters that hold where `sampling` has none.
        sampling: values by field.
    Raises:
        InvalidParams: a wrong value.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        params = attrs.evolve(defaults, **sampling)
    if not caught:
        return dict(sampling), ()
    # The changed value is kept, so that the next request does not warn again.
    return {name: getattr(params, name) for name in sampling}, tuple(str(one.message) for one in caught)
