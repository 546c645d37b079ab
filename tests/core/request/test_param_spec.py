"""The table of sampling parameters: each field has an entry with its names, or the reason why it has none."""

from __future__ import annotations

import ast
from typing import Any

import attrs
import pytest

from tests.source_tree import ROOT, parse, python_files
from triolet.core.request.param_validation import ApiFamily, PageControl, SamplingParameter
from triolet.core.request.params import SAMPLING_PARAMETERS, SamplingParams
from triolet.errors import InvalidParams


def taken_with(name: str, value: Any) -> SamplingParams:
    return SamplingParams(**{name: value})


def test_every_field_has_an_entry() -> None:
    assert [one.name for one in SAMPLING_PARAMETERS] == [field.name for field in attrs.fields(SamplingParams)]


@pytest.mark.parametrize("parameter", SAMPLING_PARAMETERS, ids=lambda parameter: parameter.name)
def test_an_entry_has_a_sentence_and_a_name_or_a_reason_per_family(parameter: SamplingParameter) -> None:
    assert parameter.spec.help.endswith(".")
    assert "\n" not in parameter.spec.help
    for family in ApiFamily:
        assert (parameter.wire_name(family) is None) == (family in parameter.spec.refused)
    assert parameter.spec.no_flag is None or parameter.spec.no_flag
    assert parameter.spec.control is None or parameter.spec.control.kind in ("range", "number", "line")


def test_what_the_model_reads_of_the_parameters_is_read_per_row() -> None:
    names = {one.name for one in SAMPLING_PARAMETERS}
    per_row = {one.name for one in SAMPLING_PARAMETERS if one.spec.per_row}
    read = {
        node.attr
        for path in python_files(ROOT / "src" / "triolet" / "model")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] in ("params", "one")
    }
    assert read & names
    assert (read & names) - per_row == set()
    # A row has what became of these: a number that may have been drawn, and token ids.
    assert per_row - read == {"seed", "bad_words"}


@pytest.mark.parametrize("parameter", SAMPLING_PARAMETERS, ids=lambda parameter: parameter.name)
def test_a_list_may_be_single_on_the_wire_if_it_may_be_in_python(parameter: SamplingParameter) -> None:
    try:
        taken_with(parameter.name, "a")
    except InvalidParams:
        takes_one_text = False
    else:
        takes_one_text = True
    assert parameter.spec.may_be_single is takes_one_text


# ---------------------------------------------------------------------------- controls of the page

CONTROLS = {one.name: one for one in SAMPLING_PARAMETERS if one.spec.control is not None}


def control_of(name: str) -> PageControl:
    control = CONTROLS[name].spec.control
    assert control is not None
    return control


def is_taken(name: str, value: float) -> bool:
    """Whether a parameter may have a value that the page sends, where whole numbers are integers."""
    try:
        taken_with(name, int(value) if value == int(value) else value)
    except InvalidParams:
        return False
    return True


@pytest.mark.parametrize("name", CONTROLS)
def test_the_ends_of_a_control_are_taken_and_the_default_lies_between(name: str) -> None:
    control, default = control_of(name), CONTROLS[name].default
    ends = [end for end in (control.minimum, control.maximum) if end is not None]
    assert [end for end in ends if not is_taken(name, end)] == []
    if isinstance(default, int | float) and control.minimum is not None:
        assert control.minimum <= default
    if isinstance(default, int | float) and control.maximum is not None:
        assert default <= control.maximum


@pytest.mark.parametrize(
    ("name", "has_end"),
    [
        ("temperature", True),
        ("top_p", True),
        ("min_p", True),
        ("presence_penalty", True),
        ("frequency_penalty", True),
        ("max_tokens", False),
    ],
)
def test_a_control_offers_everything_that_a_bounded_parameter_takes(name: str, has_end: bool) -> None:
    control = control_of(name)
    assert control.minimum is not None
    assert control.step is not None
    assert not is_taken(name, control.minimum - control.step)
    assert (control.maximum is not None) is has_end
    assert control.maximum is None or not is_taken(name, control.maximum + control.step)


@pytest.mark.parametrize("name", [name for name in CONTROLS if control_of(name).kind == "range"])
def test_a_slider_has_two_ends_and_enough_steps(name: str) -> None:
    control = control_of(name)
    assert control.minimum is not None
    assert control.maximum is not None
    assert control.step is not None
    assert (control.maximum - control.minimum) / control.step > 18


@pytest.mark.parametrize("name", [name for name in CONTROLS if CONTROLS[name].value_type == "int"])
def test_the_control_of_a_whole_number_goes_from_one_to_the_next(name: str) -> None:
    assert (control_of(name).kind, control_of(name).step) == ("number", 1)
