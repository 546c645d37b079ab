"""Table entry of one sampling parameter: names, help and refusals on every route, on the command line and in the docs.

`SamplingParams` keeps one `ParameterSpec` in the metadata of each of its fields. The HTTP and WebSocket routes, the
command line, the documentation and the page at `/` read these entries and list no parameter themselves, so a new
parameter reaches all of them at once. A place that does not take a parameter says why, and refuses it with that reason.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final

import attrs

SPEC: Final = "triolet.sampling_parameter"
"""Key of the entry in the metadata of an attrs field."""


class ApiFamily(enum.Enum):
    """Group of routes with the same names of fields."""

    CHAT = "Chat Completions"
    COMPLETIONS = "Completions"
    RESPONSES = "Responses"


@attrs.frozen(kw_only=True)
class PageControl:
    """Input element of one parameter on the page at `/`.

    Args:
        label: text beside the element.
        kind: `range` for a slider, `number`, or `line` for text.
        minimum: smallest value; None for no limit.
        maximum: largest value; None for no limit.
        step: distance from one value to the next.
    """

    label: str
    kind: str
    minimum: float | None = None
    maximum: float | None = None
    step: float | None = None


@attrs.frozen(kw_only=True)
class ParameterSpec:
    """Names and documentation of one field of `SamplingParams`.

    Args:
        help: one line of documentation, for `--help` and docs/sampling.md.
        per_row: True if the model runner reads it per row of a step; False if the engine applies it to the request.
        wire_names: name in the body of a request, per family of routes that takes the parameter.
        refused: reason, per family of routes that refuses it.
        no_flag: reason why the command line has no flag for it; None if there is one.
        may_be_single: True if the wire takes a single value in place of a list of one.
        control: element on the page at `/`; None for none.
    """

    help: str
    per_row: bool
    wire_names: Mapping[ApiFamily, str]
    refused: Mapping[ApiFamily, str]
    no_flag: str | None
    may_be_single: bool = False
    control: PageControl | None = None


def sampling_parameter(
    text: str,
    *,
    per_row: bool = False,
    named: Mapping[ApiFamily, str] | None = None,
    refused: str | Mapping[ApiFamily, str] | None = None,
    no_flag: str | None = None,
    may_be_single: bool = False,
    control: PageControl | None = None,
) -> dict[str, ParameterSpec]:
    """Return the metadata of a field; without further arguments every route and the command line take it.

    Args:
        text: its `ParameterSpec.help`.
        per_row: see `ParameterSpec`.
        named: names in the families that do not use the name of the field.
        refused: reason for all families, or per family.
        no_flag: see `ParameterSpec`.
        may_be_single: see `ParameterSpec`.
        control: see `ParameterSpec`.
    """
    reasons = dict.fromkeys(ApiFamily, refused) if isinstance(refused, str) else dict(refused or {})
    names = {family: (named or {}).get(family, "") for family in ApiFamily if family not in reasons}
    spec = ParameterSpec(
        help=text,
        per_row=per_row,
        wire_names=names,
        refused=reasons,
        no_flag=no_flag,
        may_be_single=may_be_single,
        control=control,
    )
    return {SPEC: spec}


@attrs.frozen
class SamplingParameter:
    """Row of the table: a field of `SamplingParams` with its entry.

    Args:
        name: of the field.
        annotation: type as it is written in the source, such as `int | None`.
        default: of the field.
        spec: entry of the field.
    """

    name: str
    annotation: str
    default: Any
    spec: ParameterSpec

    @property
    def may_be_none(self) -> bool:
        """True if the absence of a value is a value, such as an answer without a longest length."""
        return "None" in self.annotation or self.default == ()

    @property
    def value_type(self) -> str:
        """The annotation without its `| None`."""
        return self.annotation.removesuffix(" | None")

    def wire_name(self, family: ApiFamily) -> str | None:
        """Return the name of the parameter in bodies of a family; None if the family refuses it."""
        name = self.spec.wire_names.get(family)
        return name or self.name if name is not None else None


def table_of(cls: type) -> tuple[SamplingParameter, ...]:
    """Return one row per field of an attrs class, each of which must have an entry."""
    fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(cls)
    return tuple(
        SamplingParameter(field.name, str(field.type), field.default, field.metadata[SPEC])
        for field in fields
    )
