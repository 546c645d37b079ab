"""The messages: the core's own values, and nothing else.

    engine --> process   EngineConfig   load this model         process --> engine   LoadProgress   on the way
                                                                                     ModelInfo      loaded
                         StepPlan       compute this step                            StepResult     computed
                                                                                     Failure        it raised

A message is [index of its class, fields]; a value is the list of its fields in order, without their names: the rows of
a step are most of what is sent, and names would be most of their bytes and time. What is structured is checked: exact
types, exact lengths, and then whatever the class itself demands. Nothing is coerced, and nothing names code.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar, cast, get_args, get_origin, get_type_hints

import attrs
import cattrs.preconf.msgpack
import msgpack
from cattrs.fns import identity

from triolet.config import EngineConfig
from triolet.core.model_info import ModelInfo
from triolet.core.plan import StepPlan, StepResult
from triolet.core.progress import LoadProgress
from triolet.errors import FrameError
from triolet.ipc.failures import Argument, Failure
from triolet.ipc.frames import FrameReader, pack_frame

M = TypeVar("M")
Structure = Callable[[Any, Any], Any]

Request = EngineConfig | StepPlan
Reply = LoadProgress | ModelInfo | StepResult | Failure

_CONVERTER = cattrs.preconf.msgpack.make_converter(detailed_validation=False)

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


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("must be a natural number")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError(f"must be a list, got {type(value).__name__}")
    return value


def _is_collection(kind: Any) -> bool:
    return get_origin(kind) in (tuple, frozenset)


def _collection(kind: Any) -> Structure:
    """`tuple[X, ...]` or `frozenset[X]`."""
    make, item = get_origin(kind), get_args(kind)[0]
    if item in (int, str):  # token ids: tens of thousands of them, checked in one go

        def structure_plain(value: Any, _: Any) -> Any:
            if not set(map(type, _list(value))) <= {item}:
                raise TypeError(f"must hold nothing but {item.__name__}")
            return make(value)

        return structure_plain
    structure_item = _CONVERTER.get_structure_hook(item)

    def structure(value: Any, _: Any) -> Any:
        return make([structure_item(one, item) for one in _list(value)])

    return structure


def _is_mapping(kind: Any) -> bool:
    return get_origin(kind) is Mapping


def _mapping(kind: Any) -> Structure:
    key, item = get_args(kind)
    structure_key, structure_item = map(_CONVERTER.get_structure_hook, (key, item))

    def structure(value: Any, _: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            raise TypeError(f"must be a mapping, got {type(value).__name__}")
        return {structure_key(name, key): structure_item(one, item) for name, one in value.items()}

    return structure


def _argument(value: Any, _: Any) -> Argument:
    if value is None or type(value) in (str, int, float, bool):
        return value  # type: ignore[no-any-return]
    return _CONVERTER.structure(value, tuple[str, ...])


# ------------------------------------------------------------------------ a value is the list of its fields


def _fields(kind: type) -> dict[str, Any]:
    """Types by field name, resolved without touching the class."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in attrs.fields(kind)}


def _structure_fields(kind: Any) -> Structure:
    types = tuple(_fields(kind).values())
    hooks = tuple(map(_CONVERTER.get_structure_hook, types))
    names = tuple(_fields(kind)) if any(field.kw_only for field in attrs.fields(kind)) else None

    def structure(value: Any, _: Any) -> Any:
        if len(_list(value)) != len(hooks):
            raise ValueError(f"{kind.__name__} must have {len(hooks)} fields, got {len(value)}")
        fields = [hook(one, type_) for hook, one, type_ in zip(hooks, value, types, strict=True)]
        return kind(*fields) if names is None else kind(**dict(zip(names, fields, strict=True)))

    return structure


def _unstructure_fields(kind: Any) -> Callable[[Any], Any]:
    types = _fields(kind)
    hooks = tuple(map(_CONVERTER.get_unstructure_hook, types.values()))
    values = attrgetter(*types)  # gives a tuple: whatever is sent has two fields or more
    if all(hook is identity for hook in hooks):
        return values
    return lambda value: [hook(one) for hook, one in zip(hooks, values(value), strict=True)]


for _kind in (int, str, bool):
    _CONVERTER.register_structure_hook(_kind, _exactly(_kind))
_CONVERTER.register_structure_hook(float, _number)
_CONVERTER.register_structure_hook_factory(_is_collection, _collection)
_CONVERTER.register_structure_hook_factory(_is_mapping, _mapping)
_CONVERTER.register_structure_hook_func(lambda kind: kind == Argument, _argument)
_CONVERTER.register_unstructure_hook_func(lambda kind: kind == Argument, lambda value: value)
_CONVERTER.register_structure_hook_factory(attrs.has, _structure_fields)
_CONVERTER.register_unstructure_hook_factory(attrs.has, _unstructure_fields)

# -------------------------------------------------------------------------------------------- the two ways


def _layout(kinds: tuple[type, ...]) -> int:
    """A checksum over all fields of all classes that can be part of a message."""
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


@attrs.frozen(eq=False)
class Way(Generic[M]):
    """One direction: which messages go it, and how much of them.

    Args:
        kinds: their classes.
        max_bytes: of a message.
        max_items: of a list in one.
    """

    kinds: tuple[type, ...]
    max_bytes: int
    max_items: int

    def pack(self, message: M) -> bytes:
        """The frame of a message.

        Raises:
            FrameError: it is too long.
        """
        body = [self.kinds.index(type(message)), _CONVERTER.unstructure(message)]
        # A request id may be any text, also one that is not well-formed Unicode.
        payload = msgpack.packb(body, unicode_errors="surrogatepass")
        return pack_frame(payload, layout=LAYOUT, max_bytes=self.max_bytes)

    def reader(self) -> FrameReader:
        """A reader of this way's frames."""
        return FrameReader(layout=LAYOUT, max_bytes=self.max_bytes)

    def unpack(self, payload: bytes) -> M:
        """The message of a frame.

        Raises:
            FrameError: it is none of this way's.
        """
        try:
            index, fields = _list(self._values(payload))
            kind = self.kinds[_natural(index)]
            return cast(M, _CONVERTER.structure(fields, kind))
        except Exception as error:  # whatever a wrong value did to whichever check
            names = ", ".join(kind.__name__ for kind in self.kinds)
            raise FrameError(
                f"a message must be one of {names}; got {len(payload)} bytes: {error!r}"
            ) from error

    def _values(self, payload: bytes) -> Any:
        return msgpack.unpackb(
            payload,
            strict_map_key=False,  # token ids are keys, too
            unicode_errors="surrogatepass",
            max_array_len=self.max_items,
            max_map_len=self.max_items,
        )

    def messages(self, reader: FrameReader) -> Iterator[M]:
        """All messages that a reader has whole."""
        while (payload := reader.next_payload()) is not None:
            yield self.unpack(payload)


_REQUESTS: Final = (EngineConfig, StepPlan)
_REPLIES: Final = (LoadProgress, ModelInfo, StepResult, Failure)
LAYOUT: Final = _layout((*_REQUESTS, *_REPLIES))

# A plan may start a hundred requests with a million prompt tokens each, if all but one of each are in the prefix cache.
# An answer is short, and the process that it comes from may have lost its mind.
REQUESTS: Final = Way[Request](_REQUESTS, max_bytes=2**29, max_items=2**24)
REPLIES: Final = Way[Reply](_REPLIES, max_bytes=2**24, max_items=2**16)
