"""Values as lists, and lists as values again: exact types, exact lengths, and nothing coerced.

A value is the list of its fields in order, without their names: the rows of a step are most of what is sent, and names
would be most of their bytes and time. The layout, a checksum over names, types and order, is what both ends agree on
instead. What a class demands of its fields it demands here, too.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final, get_args, get_origin, get_type_hints

import attrs
import cattrs.preconf.msgpack
from cattrs.fns import identity

from triolet.ipc.failures import Argument

Structure = Callable[[Any, Any], Any]

_PLAIN: Final = (int, str, bool, bytes)
_PLAIN_OR_NONE: Final = tuple(kind | None for kind in _PLAIN)
CONVERTER: Final = cattrs.preconf.msgpack.make_converter(detailed_validation=False)

# ------------------------------------------------------------------------------ exact types, no coercion


def _exactly(kind: type) -> Structure:
    def structure(value: Any, _: Any) -> Any:
        if type(value) is not kind:
            raise TypeError(f"must be {kind.__name__}, got {type(value).__name__}")
        return value

    return structure


def _number(value: Any, _: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"must be a number, got {type(value).__name__}")
    return float(value)


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError(f"must be a list, got {type(value).__name__}")
    return value


def _is_collection(kind: Any) -> bool:
    return get_origin(kind) in (tuple, frozenset)


def _collection(kind: Any) -> Structure:
    """Return the hook that structures `tuple[X, ...]` or `frozenset[X]`."""
    make, item = get_origin(kind), get_args(kind)[0]
    if item in (int, str):  # token ids: tens of thousands of them, checked in one go

        def structure_plain(value: Any, _: Any) -> Any:
            if not set(map(type, _list(value))) <= {item}:
                raise TypeError(f"must hold nothing but {item.__name__}")
            return make(value)

        return structure_plain
    structure_item = CONVERTER.get_structure_hook(item)

    def structure(value: Any, _: Any) -> Any:
        return make([structure_item(one, item) for one in _list(value)])

    return structure


def _is_mapping(kind: Any) -> bool:
    return get_origin(kind) is Mapping


def _mapping(kind: Any) -> Structure:
    key, item = get_args(kind)
    structure_key, structure_item = map(CONVERTER.get_structure_hook, (key, item))

    def structure(value: Any, _: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            raise TypeError(f"must be a mapping, got {type(value).__name__}")
        return {structure_key(name, key): structure_item(one, item) for name, one in value.items()}

    return structure


def _argument(value: Any, _: Any) -> Argument:
    if value is None or type(value) in (str, int, float, bool):
        return value  # type: ignore[no-any-return]
    return CONVERTER.structure(value, tuple[str, ...])


def _unstructure_collection(kind: Any) -> Callable[[Any], Any]:
    hook = CONVERTER.get_unstructure_hook(get_args(kind)[0])
    if hook is not identity:
        return lambda value: [hook(one) for one in value]
    return identity if get_origin(kind) is tuple else tuple


# ------------------------------------------------------------------------ a value is the list of its fields


def _fields(kind: type) -> dict[str, Any]:
    """Return the types by field name, resolved without changing the class."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in attrs.fields(kind)}


def _structure_fields(kind: Any) -> Structure:
    """Return the hook that makes an instance of a class from the list of its fields."""
    fields = _fields(kind)
    # Plain fields are checked together, by their types, which is fast; the others are converted one by one.
    plain = [index for index, type_ in enumerate(fields.values()) if type_ in _PLAIN]
    plain_types = [type_ for type_ in fields.values() if type_ in _PLAIN]
    others = [
        (index, CONVERTER.get_structure_hook(type_), type_)
        for index, type_ in enumerate(fields.values())
        if type_ not in _PLAIN
    ]
    names = tuple(fields) if any(field.kw_only for field in attrs.fields(kind)) else None

    def structure(value: Any, _: Any) -> Any:
        if len(_list(value)) != len(fields):
            raise ValueError(f"{kind.__name__} must have {len(fields)} fields, got {len(value)}")
        if [type(value[index]) for index in plain] != plain_types:
            raise TypeError(f"{kind.__name__} must have fields of types {fields}")
        for index, hook, type_ in others:
            value[index] = hook(value[index], type_)
        return kind(*value) if names is None else kind(**dict(zip(names, value, strict=True)))

    return structure


def _unstructure_fields(kind: Any) -> Callable[[Any], Any]:
    types = _fields(kind)
    hooks = tuple(map(CONVERTER.get_unstructure_hook, types.values()))
    if len(types) < 2:  # attrgetter gives no tuple for one name
        return lambda value: [hook(getattr(value, name)) for hook, name in zip(hooks, types, strict=True)]
    values = attrgetter(*types)
    if all(hook is identity for hook in hooks):
        return values
    return lambda value: [hook(one) for hook, one in zip(hooks, values(value), strict=True)]


for _kind in _PLAIN:
    CONVERTER.register_structure_hook(_kind, _exactly(_kind))
CONVERTER.register_structure_hook(float, _number)
CONVERTER.register_structure_hook_factory(_is_collection, _collection)
CONVERTER.register_unstructure_hook_factory(_is_collection, _unstructure_collection)
CONVERTER.register_structure_hook_factory(_is_mapping, _mapping)
CONVERTER.register_unstructure_hook_func(lambda kind: kind in _PLAIN_OR_NONE, identity)
CONVERTER.register_structure_hook_func(lambda kind: kind == Argument, _argument)
CONVERTER.register_unstructure_hook_func(lambda kind: kind == Argument, lambda value: value)
CONVERTER.register_structure_hook_factory(attrs.has, _structure_fields)
CONVERTER.register_unstructure_hook_factory(attrs.has, _unstructure_fields)


def layout_of(kinds: tuple[type, ...]) -> int:
    """Return a checksum over all fields of all classes that can be part of a message."""
    seen: dict[type, None] = {}

    def walk(kind: Any) -> None:
        for part in get_args(kind):
            walk(part)
        if isinstance(kind, type) and attrs.has(kind) and kind not in seen:
            seen[kind] = None
            for type_ in _fields(kind).values():
                walk(type_)

    for kind in kinds:
        walk(kind)
    return zlib.crc32("\n".join(f"{kind.__name__} {_fields(kind)}" for kind in seen).encode())
