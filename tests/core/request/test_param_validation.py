"""Converters of parameters one by one, on values that stand alone and on a class of their own."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import attrs
import pytest

from triolet.core.request import param_validation as checks
from triolet.core.request.param_validation import (
    SPEC,
    ApiFamily,
    PageControl,
    SamplingParameter,
    sampling_parameter,
    strict_plain_fields,
    table_of,
)
from triolet.errors import InvalidParams, InvalidRequest

CHAT, COMPLETIONS, RESPONSES = ApiFamily.CHAT, ApiFamily.COMPLETIONS, ApiFamily.RESPONSES


def own(value: Any) -> Any:
    """A converter that a field brings along."""
    return ("own", value)


def plain(**values: Any) -> Any:
    """An object with a field of each plain type, one with a converter of its own, and one of another type."""

    @attrs.frozen(kw_only=True, field_transformer=strict_plain_fields)
    class Plain:
        count: int = 1
        most: int | None = None
        share: float = 0.5
        is_on: bool = False
        may_be_on: bool | None = None
        converted: int = attrs.field(default=3, converter=own)
        text: str = "a"

    return Plain(**values)


def test_plain_fields_keep_values_of_their_type() -> None:
    some = plain(count=2, most=3, share=1, is_on=True, may_be_on=True)
    assert (some.count, some.most, some.share, some.is_on, some.may_be_on) == (2, 3, 1, True, True)
    assert plain(may_be_on=False).may_be_on is False
    none = plain(most=None, may_be_on=None)
    assert (none.most, none.may_be_on) == (None, None)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("count", 1.0, "must be an integer, got float"),
        ("count", None, "must be an integer, got NoneType"),
        ("count", True, "must be an integer, got bool"),
        ("most", "1", "must be an integer, got str"),
        ("most", 2**63, "must fit in 64 bits, got 9223372036854775808."),
        ("share", "1", "must be a number, got '1'."),
        ("share", True, "must be a number, got True."),
        ("is_on", 1, "must be True or False, got 1."),
        ("is_on", None, "must be True or False, got None."),
        ("may_be_on", 0, "must be True or False, got 0."),
    ],
)
def test_plain_fields_refuse_values_of_another_type_by_name(field: str, value: Any, rule: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        plain(**{field: value})
    assert str(caught.value) == f"{field} {rule}"
    assert (caught.value.field, caught.value.got) == (field, value)


def test_a_converter_of_its_own_stays_and_other_types_have_none() -> None:
    assert plain().converted == ("own", 3)
    assert plain(converted="3").converted == ("own", "3")
    assert plain(text=5).text == 5


# ------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(("value", "number"), [(1, 1.0), (0.5, 0.5), (Fraction(1, 4), 0.25)])
def test_a_finite_number_becomes_a_float(value: Any, number: float) -> None:
    found = checks.finite("x", value)
    assert (found, type(found)) == (number, float)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400], ids=repr)
def test_a_number_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(InvalidParams, match=r"^x must be a finite number, got ") as caught:
        checks.finite("x", value)
    assert caught.value.field == "x"


@pytest.mark.parametrize("value", [True, "1", None, 1j, [1]], ids=repr)
def test_only_a_number_is_one(value: object) -> None:
    for check in (checks.finite, checks.number):
        with pytest.raises(InvalidParams, match=r"^x must be a number, got "):
            check("x", value)


def test_a_number_that_python_has_is_not_converted() -> None:
    whole, infinite = checks.number("x", 3), checks.number("x", math.inf)
    assert (whole, type(whole), infinite) == (3, int, math.inf)
    assert type(checks.number("x", Fraction(1, 2))) is float


@pytest.mark.parametrize("value", [-(2**63), 0, 2**63 - 1])
def test_a_whole_number_has_64_bits(value: int) -> None:
    assert checks.int64("x", value) == value
    for wide in (2**63, -(2**63) - 1):
        with pytest.raises(InvalidParams, match=r"^x must fit in 64 bits"):
            checks.int64("x", wide)


# --------------------------------------------------------------------------------------- lists


def test_a_list_has_at_most_the_entries_of_its_limit() -> None:
    assert checks.items("x", [1, 2], 2) == (1, 2)
    with pytest.raises(InvalidParams, match=r"^x must have at most 2 entries, got 3\.$") as caught:
        checks.items("x", [1, 2, 3], 2)
    assert (caught.value.field, caught.value.got) == ("x", 3)
    assert str(checks.too_many("x", 2, 3, "max_x")) == "x must have at most 2 entries (max_x), got 3."


@pytest.mark.parametrize("value", [5, "ab", b"ab", {1: 2}, {1, 2}, None], ids=repr)
def test_only_a_sequence_is_a_list_and_no_text_is(value: object) -> None:
    with pytest.raises(InvalidParams, match=r"^x must be a list, got "):
        checks.items("x", value)


@pytest.mark.parametrize("convert", [checks.stop, checks.bad_words])
@pytest.mark.parametrize("texts", [["a", 5], [None], [b"a"]], ids=repr)
def test_a_list_of_texts_holds_nothing_else(convert: Any, texts: list[object]) -> None:
    with pytest.raises(InvalidParams, match="must contain only strings, got "):
        convert(texts)


@pytest.mark.parametrize(
    ("convert", "nothing"),
    [
        (checks.stop, ()),
        (checks.bad_words, ()),
        (checks.stop_token_ids, ()),
        (checks.logprob_token_ids, ()),
        (checks.allowed_token_ids, None),
        (checks.logit_bias, None),
        (checks.clamped_logit_bias, None),
        (checks.logprobs, None),
        (checks.prompt_logprobs, None),
    ],
)
def test_none_asks_for_nothing(convert: Any, nothing: object) -> None:
    assert convert(None) == nothing


def test_all_stop_strings_have_at_most_16384_characters() -> None:
    longest = ["a" * 4096] * 4
    assert checks.stop(longest) == tuple(longest)
    with pytest.raises(InvalidParams, match="16384 characters together, got 16385") as caught:
        checks.stop([*longest, "b"])
    assert (caught.value.field, caught.value.got) == ("stop", 16385)


def test_the_longest_bad_word_is_named() -> None:
    with pytest.raises(InvalidParams, match="at most 4096 characters, got 4099") as caught:
        checks.bad_words(["a", "b" * 4097, "c" * 4099, "d" * 4098])
    assert (caught.value.field, caught.value.got) == ("bad_words", 4099)


@pytest.mark.parametrize("value", [None, {}])
def test_nothing_is_what_plugins_are_given(value: Any) -> None:
    checks.nothing_for_plugins(value)
    with pytest.raises(InvalidParams, match="extra_args must be None") as caught:
        checks.nothing_for_plugins({"a": 1})
    assert (caught.value.field, caught.value.got) == ("extra_args", {"a": 1})


@pytest.mark.parametrize("value", [0, False, [], "", ()], ids=repr)
def test_other_empty_values_are_not_nothing(value: Any) -> None:
    with pytest.raises(InvalidParams, match="extra_args must be None"):
        checks.nothing_for_plugins(value)


# -------------------------------------------------------------------------------------- biases


def test_biases_of_a_request_are_cut_at_a_hundred() -> None:
    biases = {"1": 100, "2": 100.5, "3": -100, "4": -100.5, "5": 0}
    assert checks.clamped_logit_bias(biases) == {1: 100.0, 2: 100.0, 3: -100.0, 4: -100.0, 5: 0.0}
    assert checks.clamped_logit_bias({}) == {}


@pytest.mark.parametrize("key", ["a", None, math.inf, (1,)], ids=repr)
def test_the_keys_that_name_no_token_are_shown(key: object) -> None:
    with pytest.raises(InvalidParams, match="cannot be converted to integer token IDs") as caught:
        checks.clamped_logit_bias({"1": 1.0, key: 1.0})
    assert (caught.value.field, caught.value.got) == ("logit_bias", [key])


def test_a_flag_names_no_token() -> None:
    with pytest.raises(InvalidParams, match="logit_bias must have integer token ids as keys") as caught:
        checks.clamped_logit_bias({True: 1.0})
    assert caught.value.got == [True]


def test_biases_have_at_most_65536_entries() -> None:
    biases = dict.fromkeys(range(65_536), 1.0)
    assert checks.logit_bias(biases) == biases
    with pytest.raises(InvalidParams, match="logit_bias must have at most 65536 entries, got 65537"):
        checks.logit_bias({**biases, 65_536: 1.0})


# ----------------------------------------------------------------------------- entries of the table


def entry(**fields: Any) -> Any:
    return sampling_parameter("What it does.", **fields)[SPEC]


def test_every_route_and_the_command_line_take_a_parameter_under_its_name() -> None:
    spec = entry()
    assert spec.help == "What it does."
    assert (spec.per_row, spec.may_be_single, spec.no_flag, spec.control) == (False, False, None, None)
    assert (spec.wire_names, spec.refused) == (dict.fromkeys(ApiFamily, ""), {})


def test_a_parameter_may_be_refused_by_all_routes_or_by_some() -> None:
    everywhere, somewhere = entry(refused="why"), entry(refused={CHAT: "why"}, named={RESPONSES: "y"})
    assert everywhere.refused == {CHAT: "why", COMPLETIONS: "why", RESPONSES: "why"}
    assert everywhere.wire_names == {}
    assert (somewhere.refused, somewhere.wire_names) == ({CHAT: "why"}, {COMPLETIONS: "", RESPONSES: "y"})


def test_what_else_an_entry_says_is_kept() -> None:
    control = PageControl(label="X", kind="number")
    spec = entry(per_row=True, no_flag="why", may_be_single=True, control=control)
    assert (spec.per_row, spec.no_flag, spec.may_be_single) == (True, "why", True)
    assert spec.control == control
    assert (control.minimum, control.maximum, control.step) == (None, None, None)


@attrs.frozen
class Two:
    """Two parameters with an entry each."""

    x: int | None = attrs.field(
        default=5, metadata=sampling_parameter("X.", named={RESPONSES: "ex"}, refused={CHAT: "why"})
    )
    y: float = attrs.field(default=0.5, metadata=sampling_parameter("Y."))


def test_the_table_has_a_row_per_field() -> None:
    x, y = table_of(Two)
    assert (x.name, x.annotation, x.default, x.spec.help) == ("x", "int | None", 5, "X.")
    assert (y.name, y.annotation, y.default, y.spec.help) == ("y", "float", 0.5, "Y.")
    assert [x.wire_name(family) for family in (CHAT, COMPLETIONS, RESPONSES)] == [None, "x", "ex"]


def test_a_class_without_entries_has_no_table() -> None:
    with pytest.raises(KeyError, match=SPEC):
        table_of(type(plain()))


@pytest.mark.parametrize(
    ("annotation", "default", "may_be_none", "value_type"),
    [
        ("int | None", 16, True, "int"),
        ("int", 0, False, "int"),
        ("tuple[str, ...]", (), True, "tuple[str, ...]"),
        ("tuple[str, ...] | None", None, True, "tuple[str, ...]"),
        ("float", 1.0, False, "float"),
    ],
)
def test_the_absence_of_a_value_is_a_value_of_lists_and_optional_parameters(
    annotation: str, default: object, may_be_none: bool, value_type: str
) -> None:
    row = SamplingParameter("x", annotation, default, entry())
    assert (row.may_be_none, row.value_type) == (may_be_none, value_type)


@pytest.mark.parametrize(
    ("value", "kind", "rule", "got"),
    [
        (True, int, "an integer", "bool"),
        (1.0, int, "an integer", "float"),
        (None, str, "a string", "NoneType"),
        (b"a", str, "a string", "bytes"),
    ],
)
def test_an_argument_of_another_type_is_refused_by_name_and_a_flag_is_no_integer(
    value: object, kind: type, rule: str, got: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checks.check_type("argument", value, kind, rule)
    assert str(caught.value) == f"argument must be {rule}, got {got}"
    assert (caught.value.field, caught.value.got) == ("argument", value)


def test_an_argument_of_its_type_or_of_a_subclass_is_taken() -> None:
    class Text(str):
        __slots__ = ()

    checks.check_type("argument", 0, int, "an integer")
    checks.check_type("argument", Text(), str, "a string")
