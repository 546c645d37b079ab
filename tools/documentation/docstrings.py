"""Extension of griffe, the reader of docstrings and signatures: the forms that this project uses.

* The `__init__` of an attrs class stands in no source file: its parameters are the annotated fields.
* A field of a configuration, `option("help text", default=...)`, gets its help text as docstring.
* Sections of a docstring stand together here (`Args:`, `Raises:`, `Source:`); griffe wants a blank line between them.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

DECORATORS = {"attrs.frozen", "attrs.define", "attrs.mutable"}
FIELDS = {"attrs.field", "triolet.config.fields.option"}

_SECTION_AFTER_TEXT = re.compile(r"(?<=[^\n])\n(?=(?:Args|Raises|Returns|Yields|Source|Example):)")


class DocstringForms(griffe.Extension):
    """Complete what griffe has read of a package."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Go through the modules of a package that has been read."""
        _visit(pkg)


def _visit(scope: griffe.Module | griffe.Class) -> None:
    for member in list(scope.members.values()):
        if member.is_alias:
            continue
        if member.docstring:
            member.docstring.value = _SECTION_AFTER_TEXT.sub("\n\n", member.docstring.value)
        if isinstance(member, griffe.Module | griffe.Class):
            _visit(member)
        if isinstance(member, griffe.Class) and (options := _decorator_options(member)) is not None:
            _describe_fields(member)
            if "__init__" not in member.members and options.get("init") != "False":
                _add_init(member)


def _decorator_options(cls: griffe.Class) -> dict[str, str] | None:
    """Return the keywords of the attrs decorator as source text; None where the class has no such decorator."""
    for decorator in cls.decorators:
        value = decorator.value
        called = value.function if isinstance(value, griffe.ExprCall) else value
        if isinstance(called, griffe.Expr) and called.canonical_path in DECORATORS:
            return _keywords(value)
    return None


def _keywords(call: object) -> dict[str, str]:
    if not isinstance(call, griffe.ExprCall):
        return {}
    return {word.name: str(word.value) for word in call.arguments if isinstance(word, griffe.ExprKeyword)}


def _is_field_call(value: object) -> bool:
    return isinstance(value, griffe.ExprCall) and value.function.canonical_path in FIELDS


def _describe_fields(cls: griffe.Class) -> None:
    for field in cls.members.values():
        if not field.is_attribute or field.is_alias or not _is_field_call(field.value) or field.docstring:
            continue
        texts = [word for word in field.value.arguments if not isinstance(word, griffe.ExprKeyword)]
        if texts and (text := _leading_text(str(texts[0]))):
            field.docstring = griffe.Docstring(text, parent=field)


def _leading_text(expression: str) -> str:
    """Return the text that an expression begins with; what is computed behind it only the running program knows."""
    node = ast.parse(expression, mode="eval").body
    while isinstance(node, ast.BinOp):
        node = node.left
    return node.value.rstrip(": ") if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _add_init(cls: griffe.Class) -> None:
    parameters: dict[str, griffe.Parameter] = {}
    try:
        parents = [parent for parent in reversed(cls.mro()) if _decorator_options(parent) is not None]
    except ValueError:  # a base class outside of the package
        parents = []
    for owner in [*parents, cls]:
        is_keyword_only = (_decorator_options(owner) or {}).get("kw_only") == "True"
        parameters |= {parameter.name: parameter for parameter in _parameters(owner, is_keyword_only)}
    init = griffe.Function(
        "__init__",
        lineno=cls.lineno,
        endlineno=cls.lineno,
        parameters=griffe.Parameters(
            griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword),
            *sorted(parameters.values(), key=lambda it: it.kind is griffe.ParameterKind.keyword_only),
        ),
        returns="None",
    )
    cls.set_member("__init__", init)


def _parameters(cls: griffe.Class, is_keyword_only: bool) -> list[griffe.Parameter]:
    return [
        _parameter(field, is_keyword_only)
        for field in cls.members.values()
        if isinstance(field, griffe.Attribute)
        and field.annotation is not None
        and "property" not in field.labels
        and "instance-attribute" in field.labels  # ClassVar is not
        and _field_options(field).get("init") != "False"
    ]


def _field_options(field: griffe.Attribute) -> dict[str, str]:
    return _keywords(field.value) if _is_field_call(field.value) else {}


def _parameter(field: griffe.Attribute, is_keyword_only: bool) -> griffe.Parameter:
    options = _field_options(field)
    default: Any = options.get("default") if _is_field_call(field.value) else field.value
    if "factory" in options:
        default = f"{options['factory']}()"
    keyword_only = is_keyword_only or options.get("kw_only") == "True"
    kind = griffe.ParameterKind.keyword_only if keyword_only else griffe.ParameterKind.positional_or_keyword
    return griffe.Parameter(
        field.name.lstrip("_"),
        annotation=field.annotation,
        kind=kind,
        default=default,
        docstring=field.docstring,
    )
