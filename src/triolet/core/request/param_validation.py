"""Converters of `SamplingParams`, each of which turns a caller's value into that of the field or raises an error that
names it; and the table of sampling parameters.

The converters are strict: a text does not become a number, nor a number a flag. An accepted value fits in 64 bits, is
finite, and is short enough that a request cannot fill the memory with it; the limits of an engine (`RequestLimits`) are
narrower.
"""

from __future__ import annotations

import enum
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

import attrs

from triolet.errors import InvalidParams, InvalidRequest, shown

MAX_ENTRIES = 65_536  # of any list or mapping
MAX_LOGPROB_TOKEN_IDS = 128  # vLLM's
MAX_STOP_STRING_CHARS = 4_096
MAX_STOP_CHARS = 16_384  # of all stop strings: the matcher takes some 300 bytes per character
NUMBERS_WITHOUT_RANGE = ("temperature", "repetition_penalty")  # checked to be finite before their lower bound
MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1


def refuse(field: str, sentence: str, got: object) -> InvalidParams:
    """Return the error for a value that breaks a rule."""
    return InvalidParams(f"{field} {sentence}, got {shown(got)}.", field=field, got=got)


# ---------------------------------------------------------------------------------- numbers and flags


def finite(name: str, value: object) -> float:
    """Return a finite number as a float."""
    plain = number(name, value)
    try:
        converted = float(plain)
    except OverflowError:
        raise refuse(name, "must be a finite number", value) from None
    if not math.isfinite(converted):
        raise refuse(name, "must be a finite number", value)
    return converted


def number(name: str, value: object) -> float:
    """Return a number, which may be one of numpy and need not be finite."""
    if isinstance(value, bool) or not isinstance(value, int | float | numbers.Real):
        raise refuse(name, "must be a number", value)
    return value if isinstance(value, int | float) else float(value)


def int64(name: str, value: object) -> int:
    """Return a whole number of 64 bits, which may be one of numpy."""
    if isinstance(value, bool) or not isinstance(value, int | numbers.Integral):
        raise InvalidParams(f"{name} must be an integer, got {type(value).__name__}", field=name, got=value)
    if not MIN_INT64 <= (whole := int(value)) <= MAX_INT64:
        raise refuse(name, "must fit in 64 bits", value)
    return whole


def _number(value: Any, field: attrs.Attribute[Any]) -> float:
    if field.name in NUMBERS_WITHOUT_RANGE:
        finite(field.name, value)
    # Unconverted and perhaps not finite: the message about the range of the others shows what the caller wrote.
    return number(field.name, value)


def _integer(value: Any, field: attrs.Attribute[Any]) -> int:
    return int64(field.name, value)


def _integer_or_none(value: Any, field: attrs.Attribute[Any]) -> int | None:
    return None if value is None else _integer(value, field)


def _flag(value: Any, field: attrs.Attribute[Any]) -> bool:
    if not isinstance(value, bool):
        raise refuse(field.name, "must be True or False", value)
    return value


def _flag_or_none(value: Any, field: attrs.Attribute[Any]) -> bool | None:
    return None if value is None else _flag(value, field)


_OF_TYPE: dict[str, Callable[[Any, attrs.Attribute[Any]], Any]] = {
    "int": _integer,
    "int | None": _integer_or_none,
    "float": _number,
    "bool": _flag,
    "bool | None": _flag_or_none,
}


def strict_plain_fields(_cls: type, fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """Give every plain number and flag the strict converter of its type, which names the field in its message."""
    return [
        field.evolve(converter=attrs.Converter(_OF_TYPE[str(field.type)], takes_field=True))
        if field.converter is None and str(field.type) in _OF_TYPE
        else field
        for field in fields
    ]


def _num_logprobs(name: str, value: int | None) -> int | None:
    if isinstance(value, bool):  # True is one, and False only that of the chosen token, as in vLLM
        return int(value)
    return None if value is None else int64(name, value)


def logprobs(value: int | None) -> int | None:
    """Return the number of log-probabilities per position; True is 1, and False 0."""
    return _num_logprobs("logprobs", value)


def prompt_logprobs(value: int | None) -> int | None:
    """Return the number of log-probabilities per position; True is 1, and False 0."""
    return _num_logprobs("prompt_logprobs", value)


# ------------------------------------------------------------------------------------------ lists


def items(name: str, value: object, limit: int = MAX_ENTRIES) -> tuple[Any, ...]:
    """Return the entries of a list of at most `limit`; a str is not a list."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise refuse(name, "must be a list", value)
    if len(value) > limit:
        raise too_many(name, limit, len(value))
    return tuple(value)


def too_many(name: str, limit: int, count: int, setting: str = "") -> InvalidParams:
    """Return the error for a list that is too long; `setting` names the field that sets the limit."""
    named = f" ({setting})" if setting else ""
    return InvalidParams(
        f"{name} must have at most {limit} entries{named}, got {count}.", field=name, got=count
    )


def stop(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return stop strings from one or several, none of them empty."""
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else items("stop", value)
    for string in strings:
        if not isinstance(string, str):
            raise refuse("stop", "must contain only strings", value)
        if not string:
            raise InvalidParams("stop cannot contain an empty string.", field="stop", got=value)
        if len(string) > MAX_STOP_STRING_CHARS:
            raise refuse(
                "stop", f"must contain strings of at most {MAX_STOP_STRING_CHARS} characters", len(string)
            )
    if (num_chars := sum(map(len, strings))) > MAX_STOP_CHARS:
        raise refuse("stop", f"must have at most {MAX_STOP_CHARS} characters together", num_chars)
    return strings


def _token_ids(name: str, value: object, limit: int = MAX_ENTRIES) -> tuple[int, ...]:
    # The vocabulary is not known here: `SamplingParams.check_vocabulary` checks the range.
    listed = items(name, tuple(value) if isinstance(value, AbstractSet) else value, limit)
    if not all(map(_is_token_id, listed)):
        raise refuse(name, "must contain only integers", value)
    return tuple(dict.fromkeys(map(int, listed)))


def _is_token_id(value: object) -> bool:
    return isinstance(value, int | numbers.Integral) and not isinstance(value, bool)


def stop_token_ids(value: Sequence[int] | None) -> tuple[int, ...]:
    """Return token ids, each once; none for None."""
    return () if value is None else _token_ids("stop_token_ids", value)


def allowed_token_ids(value: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return token ids, each once; None allows all of them."""
    return None if value is None else _token_ids("allowed_token_ids", value)


def logprob_token_ids(value: Sequence[int] | None) -> tuple[int, ...]:
    """Return token ids, each once; none for None."""
    return () if value is None else _token_ids("logprob_token_ids", value, MAX_LOGPROB_TOKEN_IDS)


def bad_words(value: Sequence[str] | None) -> tuple[str, ...]:
    """Return texts, each once, none of them empty."""
    if value is None:
        return ()
    words = items("bad_words", value)
    if any(not isinstance(word, str) for word in words):
        raise refuse("bad_words", "must contain only strings", value)
    if any(not word for word in words):
        raise InvalidParams(
            f"bad_words cannot contain an empty string. Got bad_words={shown(list(words))}",
            field="bad_words",
            got=value,
        )
    if longest := max((len(word) for word in words if len(word) > MAX_STOP_STRING_CHARS), default=0):
        raise refuse(
            "bad_words", f"must contain words of at most {MAX_STOP_STRING_CHARS} characters", longest
        )
    return tuple(dict.fromkeys(words))


def logit_bias(value: Mapping[int, float] | None) -> dict[int, float] | None:
    """Return a finite number per token id."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise refuse("logit_bias", "must be a mapping from token id to bias", value)
    if len(value) > MAX_ENTRIES:
        raise too_many("logit_bias", MAX_ENTRIES, len(value))
    if not all(map(_is_token_id, value)):
        raise refuse("logit_bias", "must have integer token ids as keys", list(value))
    return {int(token_id): finite("logit_bias", bias) for token_id, bias in value.items()}


def clamped_logit_bias(value: Mapping[Any, Any] | None) -> dict[int, float] | None:
    """Return a bias per token id by OpenAI's rules: keys may be numbers as text, and biases are cut to [-100, 100]."""
    if not isinstance(value, Mapping):
        return logit_bias(value)
    if wrong := [key for key in value if not _names_token_id(key)]:
        raise InvalidParams(
            f"logit_bias contains key(s) that cannot be converted to integer token IDs: {shown(wrong)}",
            field="logit_bias",
            got=wrong,
        )
    named = {key if isinstance(key, bool) else int(key): bias for key, bias in value.items()}
    biases = logit_bias(named) or {}
    return {token_id: min(max(bias, -100.0), 100.0) for token_id, bias in biases.items()}


def _names_token_id(key: Any) -> bool:
    try:
        int(key)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def nothing_for_plugins(value: Mapping[str, Any] | None) -> None:
    """Refuse a value of `extra_args`, which nothing in this engine reads."""
    if value is not None and value != {}:
        raise refuse("extra_args", "must be None: this engine has no plugins that would read them", value)


# Table of sampling parameters: names, help and refusals on every route, on the command line and in the docs.
# `SamplingParams` keeps one `ParameterSpec` in the metadata of each of its fields. The HTTP and WebSocket
# routes, the command line, the documentation and the page at `/` read these entries and list no parameter
# themselves, so a new parameter reaches all of them at once. A place that does not take a parameter says why,
# and refuses it with that reason.
SPEC: Final = "triolet.sampling_parameter"
"""Key of the entry in the metadata of an attrs field."""


class ApiFamily(enum.Enum):
    """Group of routes with the same names of fields."""

    CHAT = "Chat Completions"
    COMPLETIONS = "Completions"
    RESPONSES = "Responses"


@attrs.frozen(kw_only=True)
class PageControl:
    """Input element of one parameter on the page at `/`."""

    label: str  # text beside the element
    kind: str  # `range` for a slider, `number`, or `line` for text
    minimum: float | None = None  # smallest value; None for no limit
    maximum: float | None = None  # largest value; None for no limit
    step: float | None = None  # distance from one value to the next


@attrs.frozen(kw_only=True)
class ParameterSpec:
    """Names and documentation of one field of `SamplingParams`."""

    help: str  # one line of documentation, for `--help` and docs/sampling.md
    # True if the model runner reads it per row of a step; False if the engine applies it to the request.
    per_row: bool
    # Name in the body of a request, per family of routes that takes the parameter.
    wire_names: Mapping[ApiFamily, str]
    refused: Mapping[ApiFamily, str]  # reason, per family of routes that refuses it
    no_flag: str | None  # reason why the command line has no flag for it; None if there is one
    may_be_single: bool = False  # True if the wire takes a single value in place of a list of one
    control: PageControl | None = None  # element on the page at `/`; None for none


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
        named: names in the families that do not use the name of the field.
        refused: reason for all families, or per family.
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
    """Row of the table: a field of `SamplingParams` with its entry."""

    name: str
    annotation: str  # type as it is written in the source, such as `int | None`
    default: Any
    spec: ParameterSpec  # entry of the field

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


def check_type(field: str, value: object, kind: type, rule: str) -> None:
    """Refuse an argument of another type.

    Raises:
        InvalidRequest: naming the field, the rule and what came.
    """
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidRequest(f"{field} must be {rule}, got {type(value).__name__}", field=field, got=value)
