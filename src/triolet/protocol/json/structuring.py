"""Convert JSON data to attrs classes: exact types, no coercion, and errors that name the field by its path.

`null` gives a field its default, if it has one. Keys that a class does not have are ignored, since every client sends
some of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args, get_origin

import attrs
import cattrs
from cattrs.errors import BaseValidationError, ClassValidationError
from cattrs.gen import make_dict_structure_fn

from triolet.core.json_text import giving_way
from triolet.protocol.errors import WireError, missing, wrong

T = TypeVar("T")
Hook = Callable[[Any, Any], Any]

CONVERTER = cattrs.Converter(detailed_validation=True)


class Wrong(ValueError):
    """A value breaks a rule; `structure` adds the path of the value.

    Args:
        rule: end of the sentence "<path> must be ...".
        code: of the error, for programs.
        at: path of the field inside the value that is structured.
    """

    def __init__(self, rule: str, got: object, code: str = "invalid_value", at: str = "") -> None:
        super().__init__(rule)
        self.rule, self.got, self.code, self.at = rule, got, code, at


class _At(ValueError):
    """Error in one entry of a list."""

    def __init__(self, step: str, inner: Exception) -> None:
        super().__init__(step)
        self.step, self.inner = step, inner


def structure(payload: Mapping[str, Any], kind: type[T]) -> T:
    """Convert plain data to an object of class `kind`.

    Raises:
        WireError: names the first wrong field, the rule and the value.
    """
    try:
        return CONVERTER.structure(payload, kind)
    except (ValueError, BaseValidationError) as error:
        raise _answered(error, "") from None


def prepare_to_structure(*kinds: type) -> None:
    """Generate the code that structures objects of these classes, which the first one of each would wait for."""
    for kind in kinds:
        CONVERTER.get_structure_hook(kind)


def structure_field(name: str, value: object, kind: Any) -> Any:
    """Convert the value of one field to type `kind`.

    Raises:
        WireError: names the field, the rule and the value.
    """
    try:
        return CONVERTER.structure(value, kind)
    except (ValueError, BaseValidationError) as error:
        raise _answered(error, name) from None


def _answered(error: BaseException, path: str) -> WireError:
    """Return the error for the client, and take the original apart."""
    found = _first(error, path)
    _drop_tracebacks(error)
    return found


def _drop_tracebacks(error: BaseException) -> None:
    # Their frames hold the list of the errors: a circle that only a full garbage collection would find.
    error.__traceback__ = None
    inner = (error.inner,) if isinstance(error, _At) else getattr(error, "exceptions", ())
    for one in inner:
        _drop_tracebacks(one)


def _first(error: BaseException, path: str) -> WireError:
    """Return the first error of a group of validation errors, with its path."""
    if isinstance(error, _At):
        return _first(error.inner, path + error.step)
    if isinstance(error, ClassValidationError):
        noted, bare = error.group_exceptions()
        if noted:
            inner, note = noted[0]
            return _first(inner, f"{path}.{note.name}".removeprefix("."))
        return _first(bare[0], path)
    if isinstance(error, WireError):
        return error
    if isinstance(error, Wrong):
        path = ".".join(filter(None, (path, error.at)))
        return wrong(path or "the request", error.rule, error.got, code=error.code)
    if isinstance(error, KeyError):
        return missing(path)
    return WireError(f"{path or 'the request'} is not valid", param=path or None)


def _exactly(kind: type, rule: str) -> Hook:
    def hook(value: Any, _: Any) -> Any:
        if type(value) is not kind:
            raise Wrong(rule, value)
        return value

    return hook


def _number(value: Any, _: Any) -> float:
    if type(value) not in (int, float):
        raise Wrong("a number", value)
    if isinstance(value, float) and not math.isfinite(value):
        raise Wrong("a finite number", value)
    return value  # type: ignore[no-any-return]  # not converted: the message about its range shows what was sent


def _tuple(kind: Any) -> Hook:
    item_kind = get_args(kind)[0]
    structure_item = CONVERTER.get_structure_hook(item_kind)

    def hook(value: Any, _: Any) -> Any:
        if type(value) is not list:
            raise Wrong("a list", value)
        items = []
        for index, item in enumerate(giving_way(value)):
            try:
                items.append(structure_item(item, item_kind))
            except (ValueError, BaseValidationError) as error:
                raise _At(f"[{index}]", error) from None
        return tuple(items)

    return hook


def _mapping(value: Any, kind: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise Wrong("an object", value)
    item = (*get_args(kind), Any, Any)[1]
    if item is str:
        for text in value.values():
            if type(text) is not str:
                raise Wrong("an object of strings", text)
    return value


def _object(kind: Any) -> Hook:
    structure_fields = make_dict_structure_fn(kind, CONVERTER, _cattrs_detailed_validation=True)
    optional = {field.name for field in attrs.fields(kind) if field.default is not attrs.NOTHING}

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, dict):
            raise Wrong("an object", value)
        return structure_fields(
            {name: item for name, item in value.items() if item is not None or name not in optional}, kind
        )

    return hook


def _is_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple


def _is_mapping(kind: Any) -> bool:
    return kind is Mapping or get_origin(kind) is Mapping


CONVERTER.register_structure_hook(int, _exactly(int, "a whole number"))
CONVERTER.register_structure_hook(str, _exactly(str, "a string"))
CONVERTER.register_structure_hook(bool, _exactly(bool, "true or false"))
CONVERTER.register_structure_hook(float, _number)
CONVERTER.register_structure_hook_factory(_is_tuple, _tuple)
CONVERTER.register_structure_hook_func(_is_mapping, _mapping)
CONVERTER.register_structure_hook_factory(attrs.has, _object)
