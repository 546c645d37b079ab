"""The table of sampling parameters: each field has an entry with its names, or the reason why it has none."""

from __future__ import annotations

import ast

import attrs
import pytest

from tests.source_tree import ROOT, parse, python_files
from triolet.core.request.param_validation import ApiFamily, SamplingParameter
from triolet.core.request.params import SAMPLING_PARAMETERS, SamplingParams


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
