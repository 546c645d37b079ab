"""Filters, tests and operators of chat templates, each charged to the meter before it runs."""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

from jinja2.exceptions import TemplateRuntimeError
from jinja2.filters import FILTERS
from jinja2.tests import TESTS

from triolet.core import json_text
from triolet.core.json_text import between_windows

# Meter: the work budget of one rendering, counted without a clock, so that the same template always costs the
# same. One unit is a fraction of a microsecond: a step of a loop, a call, an item looked at, or
# `CHARS_PER_UNIT` characters. An operation whose cost depends on its operands is charged *before* it runs, so
# the same number bounds memory, too.
CHARS_PER_UNIT = 64
"""Characters that are copied, compared or searched in about the time of one unit."""

UNITS_BETWEEN_PAUSES = 256
"""Work after which a thread that renders gives way to the event loop, some tens of microseconds."""

MAX_INT_BITS = 1024
"""Longest integer that may be computed; longer ones multiply slowly, and no prompt holds one."""

MAX_NESTING = 100
"""Deepest nesting of values that are compared or turned into text."""

_EMPTY: dict[str, object] = {}
_VIEWS = (type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items()))
_COLLECTIONS = (list, tuple, set, frozenset, *_VIEWS)


class LimitReached(Exception):
    """Error: a template exceeded one of its limits; the message says which."""


class Meter:
    """Counter of the work of one rendering.

    Args:
        max_work: units it may cost.
    """

    def __init__(self, max_work: int) -> None:
        self._max_work = max_work
        self._work = 0
        self._give_way, self._next_pause = between_windows.get(), UNITS_BETWEEN_PAUSES

    @property
    def work(self) -> int:
        """Units charged so far."""
        return self._work

    def charge(self, units: int) -> None:
        """Add `units` of work; a negative number counts as 0.

        Raises:
            LimitReached: that was too much, and everything after it is.
        """
        self._work += max(0, units)
        if self._work > self._max_work:
            raise LimitReached(f"its work passed the limit of {self._max_work} units")
        if self._work >= self._next_pause:
            self._next_pause = self._work + UNITS_BETWEEN_PAUSES
            self._give_way()

    def charge_text(self, num_chars: int) -> None:
        """Charge for making or reading a text of this length."""
        self.charge(1 + num_chars // CHARS_PER_UNIT)

    def weigh(self, *values: object) -> int:
        """Charge for reading values completely, every item of every list as often as it occurs.

        Returns:
            The units charged.
        """
        # The weight is what it costs to compare values or to turn them into text. A value that holds another many
        # times, on many levels, may be small in memory and endless as text.
        before = self._work
        waiting: list[tuple[Iterable[Any], int]] = [(values, 0)]
        while waiting:
            items, nesting = waiting.pop()
            if nesting > MAX_NESTING:
                raise LimitReached(f"its values were nested deeper than the limit of {MAX_NESTING} levels")
            units = 0
            for item in items:
                units += 1
                if isinstance(item, str):
                    units += len(item) // CHARS_PER_UNIT
                elif isinstance(item, dict):
                    units += 1
                    waiting += [(item.keys(), nesting + 1), (item.values(), nesting + 1)]
                elif isinstance(item, _COLLECTIONS):
                    units += 1
                    waiting.append((item, nesting + 1))
                elif isinstance(item, range):
                    units += len(item)
                if units >= UNITS_BETWEEN_PAUSES:
                    self.charge(units)
                    units = 0
            self.charge(units)
        return self._work - before

    def check_bits(self, num_bits: int) -> None:
        """Refuse integers that are too long to compute with."""
        if num_bits > MAX_INT_BITS:
            raise LimitReached(f"an integer passed the limit of {MAX_INT_BITS} bits")

    def passed(self, value: Any) -> Any:
        """Charge for a value just computed, and return it."""
        if isinstance(value, str):
            self.charge_text(len(value))
        elif isinstance(value, (*_COLLECTIONS, dict)):
            self.charge(len(value))
        elif isinstance(value, int):
            self.check_bits(value.bit_length())
        return value

    def each(self, items: Iterable[Any], units: int) -> Iterator[Any]:
        """Yield the items one by one, charging `units` for each."""
        for item in items:
            self.charge(units)
            yield item


Operation = Callable[..., Any]
Guard = Callable[..., object]

_FILTERS: Mapping[str, Any] = FILTERS
_TESTS: Mapping[str, Any] = TESTS

OPERATION_UNITS = 4
"""Base cost of a filter or a comparison, in units."""

MAX_PRECISION = 32
"""Most digits that `round` may be asked for: it computes ten to that power."""

_COMPARISONS_PER_ITEM = 16
"""Comparisons per item of a sort: the logarithm of more items than a work budget allows."""


# -------------------------------------------------------------------------------------- operators


_COMPARISONS: dict[str, Operation] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda item, items: item in items,
    "notin": lambda item, items: item not in items,
}


def compare(meter: Meter, left: Any, *operations: Any) -> Any:
    """Evaluate `left < right`, or a chain of comparisons: `operations` are names and right sides in turn."""
    result: Any = True
    for name, right in zip(operations[::2], operations[1::2], strict=True):
        if isinstance(right, Iterator):
            right = list(right)
        _guard_comparison(meter, name, left, right)
        result = _COMPARISONS[name](left, right)
        if not result:
            break
        left = right
    return result


def take_slice(meter: Meter, value: Any, start: Any, stop: Any, step: Any) -> Any:
    """Evaluate `value[start:stop:step]`."""
    return meter.passed(value[start:stop:step])


def run_binary(meter: Meter, symbol: str, run: Operation, left: Any, right: Any) -> Any:
    """Evaluate a binary operator such as `left * right`."""
    meter.charge(1)
    if symbol == "*":
        _guard_repetition(meter, left, right)
        _guard_repetition(meter, right, left)
    elif symbol == "**" and isinstance(left, int) and isinstance(right, int):
        meter.check_bits((left.bit_length() - 1) * right)
    elif symbol == "%" and isinstance(left, str):
        _guard_format(meter, left, right)
    return meter.passed(run(left, right))


def run_method(meter: Meter, method: Operation, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a text, a list or a dict."""
    owner, name = getattr(method, "__self__", None), method.__name__
    args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
    if isinstance(owner, str):
        guard: Guard = _METHOD_GUARDS.get(name, _guard_weight)
        guard(meter, owner, *args, **kwargs)
    elif name in ("index", "count"):
        meter.weigh(owner, *args)
    else:
        meter.weigh(*args[:1])  # a key, if anything
    return meter.passed(method(*args, **kwargs))


# Most operations cost as much as their operands weigh. Operations that can make much out of little (a long text from a
# number, or a text per character) have a guard: a function with the same arguments that computes the size of
# the result from them.
def _guard_comparison(meter: Meter, name: str, left: Any, right: Any) -> None:
    """Charge for a comparison: two values as far as the lighter one goes, or an item with every item of a list."""
    meter.charge(OPERATION_UNITS)
    weight = meter.weigh(left)
    if name not in ("in", "notin"):
        return
    if isinstance(right, str):
        _guard_search(meter, right, left)
    elif isinstance(right, Sized) and not isinstance(right, dict):
        meter.charge(weight * len(right))


def _guard_repetition(meter: Meter, items: Any, times: Any) -> None:
    if isinstance(times, int) and isinstance(items, str):
        meter.charge_text(len(items) * times)
    elif isinstance(times, int) and isinstance(items, list | tuple):
        meter.charge(len(items) * times)


# ---------------------------------------------------------------------------------- guards of filters


def _guard_weight(meter: Meter, *args: Any, **kwargs: Any) -> int:
    """Charge for an operation that reads its arguments and makes nothing much longer."""
    return meter.weigh(*args, *kwargs.values())


def _guard_length(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> None:
    """Charge for an operation that copies a list but not its items."""
    meter.charge(len(value) if isinstance(value, Sized) else 1)


def _guard_sorting(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> None:
    """Charge for comparing many items, perhaps by an attribute whose dotted name is looked up for each."""
    weight = _guard_weight(meter, value, *args, **kwargs)
    meter.charge(_COMPARISONS_PER_ITEM * weight)
    meter.charge(len(value) * _length_of_names(args, kwargs) if isinstance(value, Sized) else 0)


def _guard_batch(meter: Meter, value: Any, linecount: Any, fill_with: Any = None) -> None:
    meter.charge(_as_number(linecount) if fill_with is not None else 1)


def _guard_center(meter: Meter, value: Any, width: Any = 80) -> None:
    meter.weigh(value)
    meter.charge_text(_as_number(width))


def _guard_format(meter: Meter, template: Any, *args: Any, **kwargs: Any) -> None:
    """Charge for `%`, which may write an argument as often as it occurs, and pad it to any width in the template."""
    weight = meter.weigh(args, kwargs)
    if isinstance(template, str):
        meter.charge(weight * template.count("%"))
        meter.charge_text(len(template) + sum_of_numbers(template))
        if re.search(r"%[-#0 +\d.]*\*", template):
            raise LimitReached("its '%' format took a width from its arguments")


def _guard_indent(meter: Meter, s: Any, width: Any = 4, first: Any = False, blank: Any = False) -> None:
    meter.weigh(s)
    if isinstance(s, str):
        num_lines = len(s.splitlines()) + 1
        meter.charge(num_lines)
        meter.charge_text(num_lines * _size_of(width))


def _guard_join(meter: Meter, value: Any, d: Any = "", attribute: Any = None) -> None:
    meter.weigh(value, d)
    if isinstance(value, Sized):
        meter.charge(len(value) * (1 + _length_of_names([attribute], {})))
        meter.charge_text(len(value) * _size_of(d))


def _guard_search(meter: Meter, s: Any, part: Any = None, *args: Any, **kwargs: Any) -> None:
    """Charge for a search from the start: linear for long parts, perhaps quadratic for short ones."""
    meter.weigh(s, part)
    if isinstance(s, str) and isinstance(part, str):
        meter.charge_text(len(s) * min(len(part), 100) // 8)


def _guard_search_from_the_end(meter: Meter, s: Any, part: Any = None, *args: Any, **kwargs: Any) -> None:
    """Charge for a search from the end, which may compare the whole part at every place."""
    meter.weigh(s, part)
    if isinstance(s, str) and isinstance(part, str):
        meter.charge_text(len(s) * len(part))


def _guard_replace(meter: Meter, s: Any, old: Any, new: Any, count: Any = None) -> None:
    meter.weigh(new)
    _guard_search(meter, s, old)
    meter.charge_text(str(s).count(str(old)) * len(str(new)))


def _guard_round(meter: Meter, value: Any, precision: Any = 0, method: Any = "common") -> None:
    if abs(_as_number(precision)) > MAX_PRECISION:
        raise LimitReached(f"it asked for a precision beyond the limit of {MAX_PRECISION} digits")


def _guard_slice(meter: Meter, value: Any, slices: Any, fill_with: Any = None) -> None:
    meter.charge(OPERATION_UNITS * _as_number(slices))


def _guard_sum(meter: Meter, iterable: Any, attribute: Any = None, start: Any = 0) -> None:
    weight = meter.weigh(iterable, start)
    if isinstance(iterable, Sized):
        meter.charge(len(iterable) * _length_of_names([attribute], {}))
        if not isinstance(start, int | float):  # lists, each copied for each
            meter.charge(len(iterable) * weight)


def _guard_title(meter: Meter, s: Any) -> None:
    """Charge for Jinja's title filter, which goes word by word."""
    meter.charge(meter.weigh(s) + _size_of(s))


def _guard_tojson(
    meter: Meter,
    x: Any,
    ensure_ascii: Any = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: Any = False,
) -> None:
    """Charge for JSON text: every item may stand on a line of its own, indented by its nesting."""
    weight = meter.weigh(x, separators)
    meter.charge_text(weight * MAX_NESTING * _size_of(indent))
    meter.charge_text(weight * sum(map(_size_of, separators or ())))


def _guard_trim(meter: Meter, value: Any, chars: Any = None) -> None:
    """Charge for trimming: each character at the ends is looked up in `chars`."""
    meter.charge(meter.weigh(value) * (1 + _size_of(chars)))


def sum_of_numbers(text: str) -> int:
    """Sum up the decimal numbers in a format: an upper bound of its widths and precisions together."""
    return sum(int(digits[:10]) for digits in re.findall(r"\d+", text))


def _as_number(value: Any) -> int:
    """Return the number, or 0 for a value that the guarded operation will refuse."""
    return value if isinstance(value, int) else 0


def _size_of(value: Any) -> int:
    """Return the length of a text, or of as many spaces as a number says."""
    return len(value) if isinstance(value, str) else _as_number(value)


def _length_of_names(args: Any, kwargs: Any) -> int:
    return sum(len(arg) for arg in (*args, *kwargs.values()) if isinstance(arg, str))


_METHOD_GUARDS: dict[str, Guard] = {
    **dict.fromkeys(["count", "find", "index", "partition", "split"], _guard_search),
    **dict.fromkeys(["rfind", "rindex", "rpartition", "rsplit"], _guard_search_from_the_end),
    "join": lambda meter, separator, items: _guard_join(meter, items, separator),
    "lstrip": _guard_trim,
    "replace": _guard_replace,
    "rstrip": _guard_trim,
    "strip": _guard_trim,
}

# Jinja's filters that chat templates do not need are left out: those for HTML (`forceescape`, `striptags`,
# `urlencode`, `urlize`, `xmlattr`), `random`, and `attr`, `filesizeformat`, `pprint`, `wordcount`,
# `wordwrap`.
_FILTER_GUARDS: dict[str, Guard | None] = {
    # These look at no more than a few items, or take them one by one (see `_LAZY_FILTERS`).
    **dict.fromkeys(["abs", "count", "d", "default", "first", "items", "last", "length"]),
    **dict.fromkeys(["map", "reject", "rejectattr", "select", "selectattr"]),
    **dict.fromkeys(["capitalize", "e", "escape", "float", "int", "lower", "safe"], _guard_weight),
    **dict.fromkeys(["string", "truncate", "upper"], _guard_weight),
    **dict.fromkeys(["list", "reverse"], _guard_length),
    **dict.fromkeys(["dictsort", "groupby", "max", "min", "sort", "unique"], _guard_sorting),
    "batch": _guard_batch,
    "center": _guard_center,
    "format": _guard_format,
    "indent": _guard_indent,
    "join": _guard_join,
    "replace": _guard_replace,
    "round": _guard_round,
    "slice": _guard_slice,
    "sum": _guard_sum,
    "title": _guard_title,
    "tojson": _guard_tojson,
    "trim": _guard_trim,
}

_LAZY_FILTERS = frozenset(["batch", "map", "reject", "rejectattr", "select", "selectattr", "slice"])


# ----------------------------------------------------------------------------------- filters and tests


def to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode JSON as chat templates expect it: characters as they are, nothing escaped for HTML."""
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return json_text.encode(encoder, x)


def metered_filters(meter: Meter) -> dict[str, Any]:
    """Return the filters by name."""
    return {name: _metered_filter(meter, name, guard) for name, guard in _FILTER_GUARDS.items()}


def _metered_filter(meter: Meter, name: str, guard: Guard | None) -> Operation:
    run = to_json if name == "tojson" else _FILTERS[name]
    passed = getattr(run, "jinja_pass_arg", None)  # Jinja hands some filters its context first
    num_hidden = int(passed is not None)

    def metered(*args: Any, **kwargs: Any) -> Any:
        hidden, shown = args[:num_hidden], args[num_hidden:]
        meter.charge(OPERATION_UNITS + len(shown))
        if name in _LAZY_FILTERS and shown and shown[0]:
            units = OPERATION_UNITS + _length_of_names(shown[1:], kwargs) // 4
            shown = (meter.each(shown[0], units), *shown[1:])
        elif guard is not None:
            shown = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in shown)
        if guard is not None:
            guard(meter, *shown, **kwargs)
        result = run(*hidden, *shown, **kwargs)
        return meter.each(result, 1) if isinstance(result, Iterator) else meter.passed(result)

    if passed is not None:  # `functools.wraps` copies more, and takes a third of a short rendering
        vars(metered)["jinja_pass_arg"] = passed
    return metered


_COMPARING_TESTS = {
    "eq": ("eq", "equalto", "=="),
    "ne": ("ne", "!="),
    "lt": ("lt", "lessthan", "<"),
    "lteq": ("le", "<="),
    "gt": ("gt", "greaterthan", ">"),
    "gteq": ("ge", ">="),
    "in": ("in",),
}
_NUMBER_TESTS = ("odd", "even", "divisibleby")
_WEIGHED_TESTS = ("lower", "upper")
_CONSTANT_TESTS = (
    *("boolean", "callable", "defined", "escaped", "false", "float", "integer", "iterable", "mapping"),
    *("none", "number", "sameas", "sequence", "string", "true", "undefined"),
)


def metered_tests(meter: Meter) -> dict[str, Any]:
    """Return the tests by name."""
    return {
        **{
            name: functools.partial(_compared, meter, operation)
            for operation, names in _COMPARING_TESTS.items()
            for name in names
        },
        **{name: functools.partial(_tested_number, name) for name in _NUMBER_TESTS},
        **{name: functools.partial(_tested_weight, meter, name) for name in _WEIGHED_TESTS},
        **{name: _TESTS[name] for name in _CONSTANT_TESTS},
    }


def _compared(meter: Meter, name: str, left: Any, right: Any) -> Any:
    return compare(meter, left, name, right)


def _tested_number(name: str, value: Any, *args: Any) -> bool:
    if isinstance(value, str):  # `%` would format it
        raise TemplateRuntimeError(f"the test {name!r} takes a number")
    return bool(_TESTS[name](value, *args))


def _tested_weight(meter: Meter, name: str, value: Any) -> bool:
    meter.weigh(value)
    return bool(_TESTS[name](value))
