"""Each operation of a chat template costs what its operands and its result weigh, and is charged before it runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jinja2 import Environment
from jinja2.exceptions import TemplateRuntimeError

from triolet.core.chat_template.operations import (
    LimitReached,
    Meter,
    compare,
    metered_filters,
    metered_tests,
    run_binary,
    run_method,
    sum_of_numbers,
    take_slice,
    to_json,
)

PLENTY = 10**9


def filtered(meter: Meter, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a metered filter as Jinja does, with the context that some filters take first."""
    environment = Environment(autoescape=False)
    environment.filters = metered_filters(meter)
    context = environment.from_string("").new_context()
    result = environment.call_filter(name, value, args, kwargs, context=context)
    return list(result) if isinstance(result, Iterator) else result


def cost_of(run: Callable[[Meter], Any]) -> int:
    meter = Meter(PLENTY)
    run(meter)
    return meter.work


def not_run(left: Any, right: Any) -> Any:
    raise AssertionError("the operator ran")


def nested(levels: int, around: Callable[[Any], Any]) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = around(value)
    return value


# ------------------------------------------------------------------------------------------ the meter


def test_work_may_reach_the_limit_and_not_pass_it() -> None:
    meter = Meter(5)
    meter.charge(3)
    meter.charge(2)
    assert meter.work == 5
    with pytest.raises(LimitReached, match="limit of 5 units"):
        meter.charge(1)


def test_after_the_limit_even_nothing_is_refused() -> None:
    meter = Meter(5)
    with pytest.raises(LimitReached, match="its work passed the limit"):
        meter.charge(6)
    with pytest.raises(LimitReached, match="its work passed the limit"):
        meter.charge(0)


def test_a_negative_charge_gives_nothing_back() -> None:
    meter = Meter(5)
    meter.charge(3)
    meter.charge(-2)
    assert meter.work == 3


@pytest.mark.parametrize(("num_chars", "units"), [(0, 1), (63, 1), (64, 2), (127, 2), (640, 11)])
def test_a_text_costs_a_unit_and_another_for_every_64_characters(num_chars: int, units: int) -> None:
    assert cost_of(lambda meter: meter.charge_text(num_chars)) == units


@pytest.mark.parametrize(
    ("value", "units"),
    [
        (3, 1),
        (None, 1),
        ("abc", 1),
        ("x" * 64, 2),
        ("x" * 130, 3),
        ([], 2),
        (["a", "b"], 4),
        (("a", "b"), 4),
        ({"a", "b"}, 4),
        (frozenset(["a"]), 3),
        ({}, 2),
        ({"a": 1}, 4),
        ({"a": "x" * 64}, 5),
        ({"x" * 64: 1}, 5),
        ({"a": 1}.keys(), 3),
        ({"a": 1}.values(), 3),
        ({"a": 1}.items(), 6),
        (range(5), 6),
        ([[1, 2], [3]], 9),
    ],
)
def test_a_value_weighs_what_it_takes_to_read_all_of_it(value: Any, units: int) -> None:
    meter = Meter(PLENTY)
    meter.charge(7)
    assert meter.weigh(value) == units
    assert meter.work == 7 + units


def test_values_are_weighed_together_and_a_shared_one_as_often_as_it_occurs() -> None:
    shared = ["a", "b"]
    assert Meter(PLENTY).weigh(shared, "c") == 5
    assert Meter(PLENTY).weigh([shared, shared]) == 10
    assert Meter(PLENTY).weigh() == 0


@pytest.mark.parametrize("around", [lambda x: [x], lambda x: {"k": x}], ids=["lists", "dicts"])
def test_values_may_be_nested_a_hundred_levels_and_not_more(around: Callable[[Any], Any]) -> None:
    assert Meter(PLENTY).weigh(nested(100, around)) > 200
    with pytest.raises(LimitReached, match="nested deeper than the limit of 100 levels"):
        Meter(PLENTY).weigh(nested(101, around))


def test_weighing_stops_as_soon_as_the_limit_is_passed() -> None:
    doubled = nested(90, lambda x: [x, x])
    with pytest.raises(LimitReached, match="its work passed the limit of 100 units"):
        Meter(100).weigh(doubled)


@pytest.mark.parametrize(
    ("value", "units"),
    [
        ("x" * 64, 2),
        ("", 1),
        ([1, 2, 3], 3),
        ((1, 2), 2),
        ({"a": 1}, 1),
        ({"a": 1}.keys(), 1),
        (5, 0),
        (2.5, 0),
    ],
)
def test_a_value_just_computed_is_charged_by_its_length_and_passed_on(value: Any, units: int) -> None:
    meter = Meter(PLENTY)
    assert meter.passed(value) is value
    assert meter.work == units


def test_an_integer_may_have_1024_bits_and_not_more() -> None:
    assert Meter(PLENTY).passed((1 << 1024) - 1) == (1 << 1024) - 1
    with pytest.raises(LimitReached, match="limit of 1024 bits"):
        Meter(PLENTY).passed(1 << 1024)


def test_items_are_charged_one_by_one_as_they_are_taken() -> None:
    meter = Meter(PLENTY)
    items = meter.each([7, 8], 3)
    assert meter.work == 0
    assert [next(items), meter.work, next(items), meter.work] == [7, 3, 8, 6]


# ----------------------------------------------------------------------------------------- operators


@pytest.mark.parametrize(
    ("operands", "result", "units"),
    [
        ((1, "lt", 2), True, 5),
        ((2, "lt", 2), False, 5),
        ((2, "lteq", 2), True, 5),
        ((2, "gt", 2), False, 5),
        ((2, "gteq", 2), True, 5),
        ((2, "eq", 2), True, 5),
        ((2, "ne", 2), False, 5),
        ((["a", "b"], "eq", ["a", "b"]), True, 8),
        ((1, "lt", 2, "lt", 3), True, 10),
        ((3, "lt", 2, "lt", 5), False, 5),
        ((1, "lt", 3, "lt", 2), False, 10),
        (("a", "in", ["a", "b"]), True, 7),
        (("a", "notin", ["a", "b"]), False, 7),
        ((["a"], "in", [["a"], 1, 2]), True, 4 + 3 + 3 * 3),
        (("a", "in", {"a": 1, "b": 2}), True, 5),
        ((3, "in", range(5)), True, 10),
        (("b", "in", "abc"), True, 4 + 1 + 2 + 1),
        (("b" * 8, "in", "a" * 640), False, 4 + 1 + 12 + 11),
    ],
)
def test_a_comparison_costs_what_the_left_side_weighs_times_the_items_it_is_looked_for_in(
    operands: tuple[Any, ...], result: bool, units: int
) -> None:
    meter = Meter(PLENTY)
    assert compare(meter, *operands) is result
    assert meter.work == units


def test_an_iterator_on_the_right_side_is_charged_by_its_items() -> None:
    meter = Meter(PLENTY)
    assert compare(meter, 2, "in", iter([1, 2, 3])) is True
    assert meter.work == 8


def test_a_comparison_without_a_right_side_is_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        compare(Meter(PLENTY), 1, "lt")


@pytest.mark.parametrize(
    ("value", "bounds", "result", "units"),
    [
        ("abcdef", (1, 5, 2), "bd", 1),
        ("x" * 100, (None, 64, None), "x" * 64, 2),
        ([1, 2, 3], (1, None, None), [2, 3], 2),
    ],
)
def test_a_slice_costs_what_it_copies(
    value: Any, bounds: tuple[Any, Any, Any], result: Any, units: int
) -> None:
    meter = Meter(PLENTY)
    assert take_slice(meter, value, *bounds) == result
    assert meter.work == units


@pytest.mark.parametrize(
    ("symbol", "run", "left", "right", "units"),
    [
        ("+", operator.add, 2, 3, 1),
        ("+", operator.add, "a" * 32, "b" * 32, 3),
        ("*", operator.mul, 2, 3, 1),
        ("*", operator.mul, "a" * 32, 4, 1 + 3 + 3),
        ("*", operator.mul, 4, "a" * 32, 1 + 3 + 3),
        ("*", operator.mul, [1, 2], 3, 1 + 6 + 6),
        ("*", operator.mul, 3, (1, 2), 1 + 6 + 6),
        ("-", lambda left, right: 0, "a" * 640, 100, 1),
        ("*", lambda left, right: 0, "a", "b", 1),
        ("*", lambda left, right: 0, [1], [2], 1),
        ("%", operator.mod, 7, 3, 1),
        ("%", operator.mod, "%d", 5, 1 + 5 + 5 + 1 + 1),
        ("%", operator.mod, "%s%s", ("a", "b"), 1 + 8 + 16 + 1 + 1),
    ],
)
def test_a_binary_operator_costs_what_it_makes(
    symbol: str, run: Callable[[Any, Any], Any], left: Any, right: Any, units: int
) -> None:
    meter = Meter(PLENTY)
    assert run_binary(meter, symbol, run, left, right) == run(left, right)
    assert meter.work == units


@pytest.mark.parametrize(
    ("symbol", "left", "right"),
    [
        ("*", "ab", 64_000),
        ("*", 64_000, "ab"),
        ("*", [1, 2], 500),
        ("%", "%64000d", 1),
        ("**", 2, 1025),
        ("**", 8, 342),
    ],
)
def test_a_result_that_is_too_large_is_refused_before_it_is_computed(
    symbol: str, left: Any, right: Any
) -> None:
    with pytest.raises(LimitReached):
        run_binary(Meter(999), symbol, not_run, left, right)


@pytest.mark.parametrize(("left", "right"), [(8, 341), (2, 1023), (1, 10**9), (0.5, 4000), (4, -600)])
def test_a_power_that_fits_is_computed(left: Any, right: Any) -> None:
    assert run_binary(Meter(999), "**", operator.pow, left, right) == left**right


@pytest.mark.parametrize(
    ("symbol", "run"), [("+", operator.add), ("-", operator.sub), ("//", operator.floordiv)]
)
def test_only_powers_are_refused_for_their_exponent(symbol: str, run: Callable[[Any, Any], Any]) -> None:
    assert run_binary(Meter(999), symbol, run, 2**40, 10**6) == run(2**40, 10**6)


def test_a_power_of_a_fraction_is_left_to_python() -> None:
    assert run_binary(Meter(999), "**", lambda left, right: 0.5, 2, 5000.5) == 0.5
    assert run_binary(Meter(999), "**", lambda left, right: 0.5, 2.5, 5000) == 0.5


@pytest.mark.parametrize("template", ["%*d", "%-*d", "%0*d", "%.*f", "%8.*f"])
def test_a_width_from_the_arguments_of_a_format_is_refused(template: str) -> None:
    with pytest.raises(LimitReached, match="took a width from its arguments"):
        run_binary(Meter(PLENTY), "%", not_run, template, (3, 4))


@pytest.mark.parametrize(
    ("text", "total"), [("", 0), ("%5d", 5), ("%10.3f and %7s", 20), ("9" * 30, 9_999_999_999)]
)
def test_the_numbers_in_a_format_are_summed_up_to_ten_digits_each(text: str, total: int) -> None:
    assert sum_of_numbers(text) == total


# ------------------------------------------------------------------------------------------- methods

AB, BA = "ab" * 320, "ba" * 5  # 640 and 10 characters; the second occurs 63 times in the first


@pytest.mark.parametrize(
    ("method", "args", "units"),
    [
        ("abc".upper, (), 1 + 1),
        (("x" * 64).upper, (), 2 + 2),
        ("abc".startswith, ("a",), 2),
        ("abc".split, (), 2 + 1),
        ("abc".rsplit, (), 2 + 1),
        (AB.count, (BA,), 12 + 13),
        (AB.find, (BA,), 12 + 13),
        (AB.index, (BA,), 12 + 13),
        (AB.partition, (BA,), 12 + 13 + 3),
        (AB.split, (BA,), 12 + 13 + 64),
        (AB.rfind, (BA,), 12 + 101),
        (AB.rindex, (BA,), 12 + 101),
        (AB.rpartition, (BA,), 12 + 101 + 3),
        (AB.rsplit, (BA,), 12 + 101 + 64),
        (("a" * 6400).find, ("b" * 100,), 101 + 2 + 1251),
        (("a" * 6400).find, ("b" * 200,), 101 + 4 + 1251),
        (", ".join, (["a", "b"],), 5 + 2 + 1 + 1),
        ("xxa".lstrip, ("x",), 1 + 2 + 1),
        ("xxa".strip, ("xy",), 1 + 3 + 1),
        (" a ".rstrip, (), 1 + 1 + 1),
        ("aXa".replace, ("X", "--"), 1 + 2 + 1 + 1 + 1),
        (("ab" * 64).replace, ("a", "x" * 64), 2 + 4 + 1 + 65 + 66),
        ([1, 2].index, (2,), 5),
        ([1, 2].count, (2,), 5),
        ((1, 2).index, (2,), 5),
        ([1, 2].copy, (), 2),
        ({"a": 1}.get, ("a", ["default"]), 1),
        ({"a": 1, "b": 2}.keys, (), 2),
    ],
)
def test_a_method_costs_what_it_reads_and_makes(
    method: Callable[..., Any], args: tuple[Any, ...], units: int
) -> None:
    meter = Meter(PLENTY)
    assert list_of(run_method(meter, method, *args)) == list_of(method(*args))
    assert meter.work == units


def list_of(value: Any) -> Any:
    return list(value) if hasattr(value, "__iter__") else value


def test_a_method_sees_the_items_of_an_iterator_and_its_keywords() -> None:
    meter = Meter(PLENTY)
    assert run_method(meter, "-".join, iter(["a", "b"])) == "a-b"
    assert meter.work == 5 + 2 + 1 + 1
    assert run_method(Meter(PLENTY), "a b c".split, maxsplit=1) == ["a", "b c"]


# ------------------------------------------------------------------------------------------- filters


@pytest.mark.parametrize(
    ("name", "value", "args", "kwargs", "result", "units"),
    [
        ("abs", -3, (), {}, 3, 5),
        ("length", [1, 2], (), {}, 2, 5),
        ("default", "x", ("y",), {}, "x", 6 + 1),
        ("upper", "abc", (), {}, "ABC", 5 + 1 + 1),
        ("upper", "a" * 640, (), {}, "A" * 640, 5 + 11 + 11),
        ("int", "12", (), {"default": 3}, 12, 5 + 2),
        ("list", [1, 2, 3], (), {}, [1, 2, 3], 5 + 3 + 3),
        ("reverse", [1, 2], (), {}, [2, 1], 5 + 2 + 2),
        ("reverse", "abc", (), {}, "cba", 5 + 3 + 1),
        ("items", {"a": 1, "b": 2}, (), {}, [("a", 1), ("b", 2)], 5 + 2),
        ("sort", [3, 1, 2], (), {}, [1, 2, 3], 5 + 5 + 16 * 5 + 3),
        (
            "sort", [{"a": {"b": 1}}], (), {"attribute": "a.b"}, [{"a": {"b": 1}}],
            5 + 10 + 16 * 10 + 3 + 1,
        ),
        ("max", [1, 5], (), {}, 5, 5 + 4 + 16 * 4),
        ("unique", [1, 1], (), {}, [1], 5 + 4 + 16 * 4 + 1),
        ("batch", [1, 2, 3], (2,), {}, [[1, 2], [3]], 6 + 1 + 3 * 4 + 2),
        ("batch", [1, 2, 3], (2, 0), {}, [[1, 2], [3, 0]], 7 + 2 + 3 * 4 + 2),
        ("slice", [1, 2, 3], (2,), {}, [[1, 2], [3]], 6 + 8 + 3 * 4 + 2),
        ("center", "ab", (10,), {}, "    ab    ", 6 + 1 + 1 + 1),
        ("center", "ab", (), {}, " " * 39 + "ab" + " " * 39, 5 + 1 + 2 + 2),
        ("format", "%s-%d", ("a", 5), {}, "a-5", 7 + 6 + 6 * 2 + 1 + 1),
        ("format", "%640d", (1,), {}, " " * 639 + "1", 6 + 5 + 5 + 11 + 11),
        ("format", "%(a)s", (), {"a": 1}, "1", 5 + 6 + 6 + 1 + 1),
        ("format", 5, (), {}, "5", 5 + 4 + 1),
        ("indent", "a\nb", (), {}, "a\n    b", 5 + 1 + 3 + 1 + 1),
        ("indent", "\n" * 63, (), {}, "\n" * 63, 5 + 1 + 64 + 5 + 1),
        ("indent", "a\n\nb", (), {}, "a\n\n    b", 5 + 1 + 4 + 1 + 1),
        ("indent", "a\nb", (64,), {}, "a\n" + " " * 64 + "b", 6 + 1 + 3 + 4 + 2),
        ("indent", "a\nb", (">" * 64,), {}, "a\n" + ">" * 64 + "b", 6 + 2 - 1 + 3 + 4 + 2),
        ("join", ["a", "b"], (), {}, "ab", 5 + 5 + 2 + 1 + 1),
        ("join", ["a", "b"], ("-" * 64,), {}, "a" + "-" * 64 + "b", 6 + 6 + 2 + 3 + 2),
        ("join", [{"name": "x"}], (), {"attribute": "name"}, "x", 5 + 7 + 5 + 1 + 1),
        ("replace", "aXa", ("X", "--"), {}, "a--a", 7 + 1 + 2 + 1 + 1 + 1),
        ("round", 2.25, (1,), {}, 2.2, 6),
        ("sum", [1, 2], (), {}, 3, 5 + 5),
        ("sum", [1, 2], (), {"start": 0.5}, 3.5, 5 + 5),
        ("sum", [{"ab": 1}], (), {"attribute": "ab"}, 1, 5 + 7 + 2),
        ("sum", [[1], [2]], (), {"start": []}, [1, 2], 5 + 10 + 2 * 10 + 2),
        ("title", "ab cd", (), {}, "Ab Cd", 5 + 1 + 6 + 1),
        ("tojson", [1, 2], (), {}, "[1, 2]", 5 + 5 + 1 + 1 + 1),
        ("tojson", [1, 2], (), {"indent": 4}, "[\n    1,\n    2\n]", 5 + 5 + 32 + 1 + 1),
        ("tojson", [1, 2], (), {"indent": "    "}, "[\n    1,\n    2\n]", 5 + 5 + 32 + 1 + 1),
        ("tojson", [1], (), {"separators": (";" * 32, ":" * 32)}, "[1]", 5 + 7 + 1 + 8 + 1),
        ("trim", "  a ", (), {}, "a", 5 + 1 + 1 + 1),
        ("trim", "xxa", ("xy",), {}, "a", 6 + 1 + 3 + 1),
        ("map", [{"a": 1}, {"a": 2}], (), {"attribute": "a"}, [1, 2], 5 + 2 * 4 + 2),
        ("map", [{"abcdefgh": 1}], (), {"attribute": "abcdefgh"}, [1], 5 + 6 + 1),
        ("select", [1, 2, 3], ("odd",), {}, [1, 3], 6 + 3 * 4 + 2),
        ("selectattr", [{"abcdefgh": 1}], ("abcdefgh",), {}, [{"abcdefgh": 1}], 6 + 6 + 1),
        ("map", [], (), {"attribute": "a"}, [], 5),
    ],
)  # fmt: skip
def test_a_filter_costs_what_it_reads_and_makes(
    name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, units: int
) -> None:
    meter = Meter(PLENTY)
    assert filtered(meter, name, value, *args, **kwargs) == result
    assert meter.work == units


@pytest.mark.parametrize("name", ["list", "join", "sort"])
def test_a_filter_of_a_whole_list_weighs_the_items_of_an_iterator(name: str) -> None:
    meter, of_list = Meter(PLENTY), Meter(PLENTY)
    assert filtered(meter, name, iter(["a", "b"])) == filtered(of_list, name, ["a", "b"])
    assert meter.work == of_list.work


@pytest.mark.parametrize(
    ("name", "value", "args", "units"),
    [
        ("list", 5, (), 6),
        ("indent", 5, (), 6),
        ("join", 5, (), 7),
        ("sort", 5, (), 5 + 1 + 16),
        ("sum", 5, (), 7),
    ],
)
def test_a_filter_that_fails_has_been_charged(
    name: str, value: Any, args: tuple[Any, ...], units: int
) -> None:
    meter = Meter(PLENTY)
    with pytest.raises(TypeError):
        filtered(meter, name, value, *args)
    assert meter.work == units


def test_a_filter_without_a_value_is_an_error_of_the_template() -> None:
    with pytest.raises(TypeError):
        metered_filters(Meter(PLENTY))["batch"]()


@pytest.mark.parametrize("precision", [33, -33])
def test_round_takes_no_more_than_32_digits(precision: int) -> None:
    with pytest.raises(LimitReached, match="limit of 32 digits"):
        filtered(Meter(PLENTY), "round", 1.5, precision)


@pytest.mark.parametrize(("precision", "result"), [(32, 1.5), (-32, 0.0)])
def test_round_takes_32_digits(precision: int, result: float) -> None:
    assert filtered(Meter(PLENTY), "round", 1.5, precision) == result


def test_a_number_that_is_no_number_weighs_nothing() -> None:
    meter = Meter(PLENTY)
    with pytest.raises(TypeError):
        filtered(meter, "center", "ab", [1, 2])
    assert meter.work == 6 + 1 + 1


def test_a_lazy_filter_is_charged_only_for_the_items_that_are_taken() -> None:
    meter = Meter(PLENTY)
    odd = metered_filters(meter)["batch"]([1, 2, 3, 4], 2)
    assert meter.work == 7
    assert next(odd) == [1, 2]
    assert meter.work == 7 + 3 * 4 + 1


@pytest.mark.parametrize(
    ("value", "options", "text"),
    [
        ({"b": 1, "a": "ä<"}, {}, '{"b": 1, "a": "ä<"}'),
        ({"b": 1, "a": "ä<"}, {"sort_keys": True, "ensure_ascii": True}, '{"a": "\\u00e4<", "b": 1}'),
        ([1, 2], {"separators": (",", ":")}, "[1,2]"),
        ([1], {"indent": 1}, "[\n 1\n]"),
    ],
)
def test_json_keeps_characters_and_order_unless_asked_otherwise(value: Any, options: Any, text: str) -> None:
    assert to_json(value, **options) == text


def test_indent_leaves_the_first_line_as_it_is_unless_asked_otherwise() -> None:
    assert filtered(Meter(PLENTY), "indent", "a\nb") == "a\n    b"
    assert filtered(Meter(PLENTY), "indent", "a\nb", first=True) == "    a\n    b"


def test_a_lazy_filter_of_nothing_is_jinjas() -> None:
    assert filtered(Meter(PLENTY), "map", None, attribute="a") == []


def test_replacing_in_what_is_no_text_weighs_it_as_text() -> None:
    meter = Meter(PLENTY)
    assert filtered(meter, "replace", 121, "1", "x") == "x2x"
    assert meter.work == 7 + 1 + 2 + 1 + 1


# --------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize(
    ("name", "left", "right", "result"),
    [
        ("eq", 1, 1, True),
        ("==", 1, 2, False),
        ("ne", 1, 1, False),
        ("lessthan", 1, 2, True),
        ("<=", 2, 2, True),
        ("greaterthan", 2, 2, False),
        ("ge", 2, 2, True),
    ],
)
def test_a_test_that_compares_costs_what_the_operator_costs(
    name: str, left: Any, right: Any, result: bool
) -> None:
    meter = Meter(PLENTY)
    assert metered_tests(meter)[name](left, right) is result
    assert meter.work == 5


def test_the_test_in_looks_the_left_side_up() -> None:
    meter = Meter(PLENTY)
    assert metered_tests(meter)["in"]("a", ["a", "b"]) is True
    assert meter.work == 7


@pytest.mark.parametrize("name", ["odd", "even", "divisibleby"])
def test_a_test_of_numbers_refuses_a_text(name: str) -> None:
    with pytest.raises(TemplateRuntimeError, match=f"the test '{name}' takes a number"):
        metered_tests(Meter(PLENTY))[name]("%99999d", 2)


@pytest.mark.parametrize(
    ("name", "args", "result"),
    [
        ("odd", (3,), True),
        ("odd", (4,), False),
        ("even", (4,), True),
        ("divisibleby", (9, 3), True),
        ("divisibleby", (9, 2), False),
        ("lower", ("ab",), True),
        ("upper", ("ab",), False),
        ("string", ("ab",), True),
        ("none", (0,), False),
    ],
)
def test_a_test_of_one_value_answers_as_in_jinja(name: str, args: tuple[Any, ...], result: bool) -> None:
    assert metered_tests(Meter(PLENTY))[name](*args) is result


def test_a_test_that_reads_a_whole_text_weighs_it() -> None:
    meter = Meter(PLENTY)
    assert metered_tests(meter)["lower"]("a" * 64) is True
    assert meter.work == 2
