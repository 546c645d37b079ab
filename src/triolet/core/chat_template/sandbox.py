"""Sandbox for Jinja programs that are not trusted: a template can reach nothing outside its data, and it terminates.

Theory of operation. Jinja's sandbox keeps a template from changing the objects that it sees. Two things are added.

*Reach*: attributes are allowed by type and name (`_ATTRIBUTES`) instead of being forbidden by name. Templates see plain
data and a few of Jinja's objects, so the list is short; the known escapes begin with an attribute that is not in it.

*Termination*: every rendering has a `Meter`. The template is instrumented once, when it is compiled: every body that
can run more than once (of a loop or a macro) begins with a charge for the number of its nodes, and operators that Jinja
would compile to plain Python become calls of `operations`. So constant-time operations are paid for by the body around
them, and all others are charged by the size of their operands.

The compiled code is bound to a new environment for each rendering, and so to a meter of its own: renderings share no
state and may run in several threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import BuiltinMethodType
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateRuntimeError, TemplateSyntaxError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Joiner, Namespace, pass_context
from jinja2.visitor import NodeTransformer

from triolet.core.chat_template import operations
from triolet.core.chat_template.operations import CHARS_PER_UNIT, LimitReached, Meter

# Names of filters that no template can spell, so that it can neither replace them nor be in their way.
CHARGE, WEIGH, COMPARE, SLICE = "charge!", "weigh!", "compare!", "slice!"


class Instrument(NodeTransformer):
    """Node transformer that inserts charges into bodies that can run more than once, and replaces some operators by
    calls.
    """

    def __init__(self) -> None:
        self._num_nodes = 0

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Visit a node; count it, and count long texts by their length."""
        text = getattr(node, "data", getattr(node, "value", None))  # of TemplateData, of Const
        self._num_nodes += 1 + (len(text) // CHARS_PER_UNIT if isinstance(text, str) else 0)
        return super().visit(node, *args, **kwargs)

    def _visit_body(self, node: Any) -> Any:
        before = self._num_nodes
        self.generic_visit(node)
        charge = _call(CHARGE, nodes.Const(self._num_nodes - before), lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(charge, lineno=node.lineno))
        if (
            isinstance(node, nodes.For) and node.test is not None
        ):  # runs for the items that it leaves out, too
            node.test = nodes.And(charge, node.test, lineno=node.lineno)
        return node

    visit_For = visit_Macro = visit_CallBlock = _visit_body  # noqa: N815 - Jinja's names

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        """Replace the comparison by a call of `compare`, which charges for what it reads."""
        self.generic_visit(node)
        operands = [part for operand in node.ops for part in (nodes.Const(operand.op), operand.expr)]
        return _call(COMPARE, node.expr, *operands, lineno=node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """Weigh every part of a concatenation."""
        self.generic_visit(node)
        node.nodes = [_call(WEIGH, part, lineno=node.lineno) for part in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        """Replace a slice by a call of `take_slice`; a single item is constant work."""
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = [bound or nodes.Const(None) for bound in (node.arg.start, node.arg.stop, node.arg.step)]
        return _call(SLICE, node.node, *bounds, lineno=node.lineno)

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        """Weigh a computed key: hashing reads all of it."""
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _call(WEIGH, node.key, lineno=node.lineno)
        return node

    def _refuse(self, node: nodes.Node) -> nodes.Node:
        raise TemplateSyntaxError(
            "a chat template can neither use other templates nor be used by them", node.lineno
        )

    visit_Extends = visit_Include = visit_Import = visit_FromImport = visit_Block = _refuse  # noqa: N815


def _call(name: str, value: nodes.Expr, *args: nodes.Expr, lineno: int) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None, lineno=lineno)


MAX_RANGE = 100_000
"""Longest `range`, as in Jinja's own sandbox."""

CALL_UNITS = 10
"""Base cost of a call, in units."""

MAX_CALL_DEPTH = 64
"""Deepest recursion of macros; each level takes about 8 of Python's 1000."""

_ATTRIBUTES: tuple[tuple[type, frozenset[str]], ...] = (
    (
        str,  # `format` is handled by itself
        frozenset(
            "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric "
            "isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex "
            "rpartition rsplit rstrip split splitlines startswith strip swapcase title upper".split()
        ),
    ),
    (dict, frozenset(["copy", "get", "items", "keys", "values"])),
    (list, frozenset(["copy", "count", "index"])),
    (tuple, frozenset(["count", "index", "grouper", "list"])),  # `groupby` gives named pairs
    (
        LoopContext,
        frozenset(
            "changed cycle depth depth0 first index index0 last length nextitem previtem revindex revindex0".split()
        ),
    ),
    (Macro, frozenset(["arguments", "caller", "catch_kwargs", "catch_varargs", "name"])),
    (Cycler, frozenset(["current", "next", "reset"])),
)


class Refusal(TemplateError):
    """Error: the template called `raise_exception`; the message is the template's."""


class _Undefined(Undefined):
    """Jinja's undefined value, with a message that never holds the text of an object."""

    __slots__ = ()

    @property
    def _undefined_message(self) -> str:
        if self._undefined_hint or isinstance(self._undefined_name, str):
            return str(super()._undefined_message)
        return "a value is undefined"


class _Namespace(Namespace):
    """Jinja's namespace without underscored names and without a text (it may contain itself)."""

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError("a namespace takes no names that begin with an underscore")


class _Generation(Extension):
    """Extension for `{% generation %}`, which marks the model's text for training; only its content is rendered."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class _Formatter(SandboxedFormatter):
    """`str.format`, charged to the meter."""

    def __init__(self, environment: Sandbox) -> None:
        super().__init__(environment)
        self._meter = environment.meter

    def format_field(self, value: Any, format_spec: str) -> str:
        self._meter.weigh(value)
        self._meter.charge_text(operations.sum_of_numbers(format_spec))
        return str(self._meter.passed(super().format_field(value, format_spec)))

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._meter.weigh(value)
        return super().convert_field(value, conversion)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja environment of one rendering, or of one compilation.

    Args:
        strftime_now: formats the present time, if templates may ask for it.
    """

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self, meter: Meter, strftime_now: Callable[[str], str] | None = None) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, _Generation],
            undefined=_Undefined,
            optimized=False,  # constants would be computed while compiling
            cache_size=0,
        )
        self.meter = meter
        self.finalize = self._written
        self._depth = 0
        self.filters = operations.metered_filters(meter)
        self.filters[CHARGE] = self._charged
        self.filters[WEIGH] = self._weighed
        self.filters[COMPARE] = functools.partial(operations.compare, meter)
        self.filters[SLICE] = functools.partial(operations.take_slice, meter)
        self.tests = operations.metered_tests(meter)
        self.globals = {
            "cycler": Cycler,
            "dict": self._dict,
            "joiner": Joiner,
            "namespace": self._namespace,
            "raise_exception": _raise_exception,
            "range": self._range,
        }
        if strftime_now is not None:
            self.globals["strftime_now"] = strftime_now

    def close(self) -> None:
        """Drop what refers to the environment: only a full garbage collection would find its 400 objects."""
        for name in ("filters", "tests", "globals", "finalize", "extensions"):
            vars(self).pop(name, None)

    # ------------------------------------------------------------------------ hooks of Jinja

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return True if a template may read this attribute."""
        if isinstance(obj, Namespace):  # its attributes are the names that it was given
            return not attr.startswith("_")
        return any(attr in names for kind, names in _ATTRIBUTES if isinstance(obj, kind))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a safe and charged form of `str.format`; None for anything else."""
        if (
            not isinstance(value, BuiltinMethodType)
            or value.__name__ != "format"
            or type(value.__self__) is not str
        ):
            return None
        template: str = value.__self__

        def safe_format(*args: Any, **kwargs: Any) -> str:
            self.meter.charge(len(template))  # Python's formatter goes piece by piece, however short
            return _Formatter(self).vformat(template, args, kwargs)

        return safe_format

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Refuse at once; Jinja would fail only when the value is used, and write nothing for it."""
        raise SecurityError(f"the attribute {attribute!r} of {type(obj).__name__!r} is out of reach")

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Evaluate `obj[argument]`; a tuple is charged, since hashing reads all of it."""
        if isinstance(argument, tuple):
            self.meter.weigh(argument)
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, a method, or one of the functions of this class."""
        self.meter.charge(CALL_UNITS + len(args) + len(kwargs))
        if self._depth >= MAX_CALL_DEPTH:
            raise LimitReached(f"its calls were nested deeper than the limit of {MAX_CALL_DEPTH}")
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, LoopContext):
            self.meter.weigh(args)  # `loop.changed` compares them
        if isinstance(owner, str | list | dict | tuple):
            obj = functools.partial(operations.run_method, self.meter, obj)
        self._depth += 1
        try:
            return context.call(obj, *args, **kwargs)
        finally:
            self._depth -= 1

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Evaluate a binary operator."""
        return operations.run_binary(self.meter, operator, self.binop_table[operator], left, right)

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a filter by a name that the template computed, as `map` does."""
        return super().call_filter(_checked_name(name), *args, **kwargs)

    def call_test(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a test by a name that the template computed, as `select` does."""
        return super().call_test(_checked_name(name), *args, **kwargs)

    # -------------------------------------------------------------------------- functions of templates

    @pass_context  # so that constants are not written while compiling
    def _written(self, context: Context, value: Any) -> Any:
        return self._weighed(value)

    def _weighed(self, value: Any) -> Any:
        """Charge for a value that is about to become text; refuse functions and iterators, whose text is an address."""
        if isinstance(value, Iterator) or (callable(value) and not isinstance(value, Undefined)):
            raise TemplateRuntimeError(f"a value of type {type(value).__name__} has no text")
        self.meter.weigh(value)
        return value

    def _charged(self, units: int) -> bool:
        self.meter.charge(units)
        return True

    def _dict(self, /, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
        self.meter.weigh(*args)
        return dict(*args, **kwargs)

    def _namespace(self, /, *args: Any, **kwargs: Any) -> Namespace:
        names = self._dict(*args, **kwargs)
        for name in names:
            _check_name(name)
        return _Namespace(names)

    def _range(self, *args: int) -> range:
        result = range(*args)
        if len(result) > MAX_RANGE:
            raise LimitReached(f"a range passed the limit of {MAX_RANGE} items")
        self.meter.charge(len(result))
        return result


def _raise_exception(message: Any) -> None:
    raise Refusal(message if isinstance(message, str) else "no reason given")


def _checked_name(name: Any) -> str:
    if not isinstance(name, str):
        raise TemplateRuntimeError("the name of a filter or test must be a string")
    return name
