"""Sampling parameters in the body of a request, for all routes, derived from `SAMPLING_PARAMETERS`.

A parameter is read under the name that the table gives it for the family of the route, with the strict type that its
annotation says. Values stay as the client wrote them: `SamplingParams` checks their ranges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from triolet.core.request.param_spec import ApiFamily, SamplingParameter
from triolet.core.request.params import MIN_TEMPERATURE, SAMPLING_PARAMETERS, SamplingParams
from triolet.protocol.errors import unsupported, wrong
from triolet.protocol.structuring import CONVERTER, Wrong, structure_field


@attrs.frozen
class Strings:
    """One string or several."""

    values: tuple[str, ...]


@attrs.frozen
class TokenBiases:
    """Biases by token id, which JSON writes as a string."""

    values: dict[int, float]


def _strings(value: Any, _: Any) -> Strings:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(type(item) is str for item in values):
        raise Wrong("a string or a list of strings", value)
    return Strings(tuple(values))


def _token_biases(value: Any, _: Any) -> TokenBiases:
    if not isinstance(value, dict):
        raise Wrong("an object", value)
    biases = {}
    for token_id, bias in value.items():
        # 18 digits fit in 64 bits; longer texts would cost time to read as a number.
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) <= 18):
            raise Wrong("an object with token ids as keys", token_id)
        if type(bias) not in (int, float):
            raise Wrong("a number", bias, at=token_id)
        biases[int(token_id)] = bias
    return TokenBiases(biases)


CONVERTER.register_structure_hook(Strings, _strings)
CONVERTER.register_structure_hook(TokenBiases, _token_biases)

_WIRE_TYPES: Final[Mapping[str, Any]] = {
    "int": int,
    "float": float,
    "bool": bool,
    "tuple[int, ...]": tuple[int, ...],
    "tuple[str, ...]": tuple[str, ...],
    "Mapping[int, float]": TokenBiases,
    "RepetitionDetectionParams": Mapping[str, Any],
    "StructuredOutputsParams": Mapping[str, Any],
}


def _wire_type(parameter: SamplingParameter) -> Any:
    return Strings if parameter.spec.may_be_single else _WIRE_TYPES[parameter.value_type]


# Looked up at import, so that a parameter of a new type cannot be forgotten here.
_READERS: Final = {
    family: tuple(
        (parameter.name, name, _wire_type(parameter))
        for parameter in SAMPLING_PARAMETERS
        if (name := parameter.wire_name(family)) is not None
    )
    for family in ApiFamily
}
WIRE_NAMES: Final[Mapping[ApiFamily, Mapping[str, str]]] = {
    family: {field: name for field, name, _ in readers} for family, readers in _READERS.items()
}
"""Name on the wire of each field of `SamplingParams` that the family takes."""

_DEFAULTS_ELSEWHERE: Final[Mapping[str, tuple[Any, ...]]] = {"logprobs": (False,), "top_logprobs": (0,)}
"""Values that ask for nothing in Chat Completions, by names that mean something else or nothing elsewhere."""


def read_sampling(payload: Mapping[str, Any], family: ApiFamily) -> dict[str, Any]:
    """Return the sampling parameters of a body, by field of `SamplingParams`; null is the same as absent.

    Raises:
        WireError: a value has the wrong type; names the field as the client wrote it.
    """
    found = {}
    for field, name, kind in _READERS[family]:
        if (value := payload.get(name)) is not None:
            structured = structure_field(name, value, kind)
            found[field] = structured.values if isinstance(structured, Strings | TokenBiases) else structured
    return found


def write_sampling(sampling: Mapping[str, Any], family: ApiFamily) -> dict[str, Any]:
    """Return the fields of a body that `read_sampling` reads as `sampling`."""
    return {WIRE_NAMES[family][field]: _as_json(value) for field, value in sampling.items()}


def _as_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    return value


def refuse_sampling(payload: Mapping[str, Any], family: ApiFamily, declared: frozenset[str]) -> None:
    """Refuse sampling parameters that the family does not take, or takes under another name.

    Args:
        payload: body of the request.
        family: of its route.
        declared: names that the route reads itself.
    Raises:
        WireError: names the parameter and the reason.
    """
    taken = declared | set(WIRE_NAMES[family].values())
    for parameter in SAMPLING_PARAMETERS:
        reason = parameter.spec.refused.get(family)
        names = {parameter.name, *filter(None, map(parameter.wire_name, ApiFamily))} - taken
        for name in sorted(names):
            value = payload.get(name)
            # A client that spells defaults out asks for nothing.
            if (
                value is None
                or _is_one_of(value, _DEFAULTS_ELSEWHERE.get(name, ()))
                or _is_default(parameter, value)
            ):
                continue
            if reason is not None:
                raise unsupported(name, f"{name} is not supported here: {reason}")
            raise unsupported(name, f"{name} is called {parameter.wire_name(family)} in {family.value}")


def _is_one_of(value: object, values: tuple[object, ...]) -> bool:
    # False == 0 in Python, and means something else here.
    return any(type(value) is type(one) and value == one for one in values)


def _is_default(parameter: SamplingParameter, value: object) -> bool:
    default = parameter.default
    if isinstance(default, tuple):
        return value == list(default)
    return type(value) is type(default) and value == default


def sampling_params(defaults: SamplingParams, **fields: Any) -> SamplingParams:
    """Return the model's default parameters with the fields of a request over them.

    A temperature that is too small to divide by is raised here, without the warning that `SamplingParams` gives: a
    client could not read it.

    Raises:
        InvalidParams: a value is out of its range.
    """
    if 0 < (fields.get("temperature") or 0) < MIN_TEMPERATURE:
        fields["temperature"] = MIN_TEMPERATURE
    return attrs.evolve(defaults, **fields)


def check_object_fields(name: str, value: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return `value`, whose keys must all be fields of the attrs class `kind`.

    Raises:
        WireError: a key is not; names it by its path.
    """
    fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(kind)
    known = {field.name for field in fields}
    for key in value:
        if key not in known:
            raise wrong(name, "an object of " + ", ".join(sorted(known)), key)
    return dict(value)
