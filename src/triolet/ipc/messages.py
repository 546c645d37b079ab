"""Messages between the engine and the runner's process: values of the core.

    engine --> process   EngineConfig   load this model         process --> engine   LoadProgress   on the way
                                                                                     ModelInfo      loaded
                         StepPlan       compute this step, or run                    StepResult     computed
                         Halt           end the run                                  Failure        it raised
                         PrepareAdapter read this adapter, meanwhile
                         CallWorker     call this method                             CallAnswer     it has ended
                         ImportModules  import what a load needs                     LoadProgress   on the way
                         Ping           say that you are there                       Pong           between two plans

A run is answered with a `StepResult` for each step, and a `Halt` with nothing: one that comes too late is about a run
that is over. A `PrepareAdapter` is answered with nothing either, and ends a run as a `Halt` does.

On the way a message is [name of its class, fields], as msgpack, in a frame.
"""

from __future__ import annotations

import struct
import types
import zlib
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar, cast, get_args, get_origin, get_type_hints

import attrs
import cattrs.preconf.msgpack
import msgpack
from cattrs.fns import identity

from triolet.config.engine import EngineConfig
from triolet.core.load_progress import LoadProgress
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import StepPlan, StepResult
from triolet.errors import FrameError, shown
from triolet.ipc.failures import Argument, Failure

# Values become lists, and lists values again: exact types, exact lengths, and nothing coerced. A value is the
# list of its fields in order, without their names: the rows of a step are most of what is sent, and names
# would be most of their bytes and time. The layout, a checksum over names, types and order, is what both ends
# agree on instead. What a class demands of its fields it demands here, too. A value of one of several classes
# is [tag, fields]: the tag is the index of its class in the union, which the layout covers as well.
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
    others = [(index, hook) for index, hook in enumerate(hooks) if hook is not identity]
    if not others:
        return values

    def unstructure(value: Any) -> list[Any]:
        fields = list(values(value))
        for index, hook in others:
            fields[index] = hook(fields[index])
        return fields

    return unstructure


# ------------------------------------------------------------------ a value of one of several classes


def _is_variants(kind: Any) -> bool:
    return isinstance(kind, types.UnionType) and all(map(attrs.has, get_args(kind)))


def _structure_variants(kind: Any) -> Structure:
    """Return the hook that makes an instance of one class of a union from its tag and the list of its fields."""
    variants = [(CONVERTER.get_structure_hook(variant), variant) for variant in get_args(kind)]

    def structure(value: Any, _: Any) -> Any:
        tag, fields = _list(value)
        if type(tag) is not int or not 0 <= tag < len(variants):
            raise ValueError(f"a tag must be a whole number from 0 to {len(variants) - 1}; got {shown(tag)}")
        hook, variant = variants[tag]
        return hook(fields, variant)

    return structure


def _unstructure_variants(kind: Any) -> Callable[[Any], Any]:
    variants = {
        variant: (tag, CONVERTER.get_unstructure_hook(variant)) for tag, variant in enumerate(get_args(kind))
    }

    def unstructure(value: Any) -> tuple[int, Any]:
        tag, hook = variants[type(value)]
        return tag, hook(value)

    return unstructure


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
CONVERTER.register_structure_hook_factory(_is_variants, _structure_variants)
CONVERTER.register_unstructure_hook_factory(_is_variants, _unstructure_variants)


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


# A stream of bytes is cut into messages, or refused at its first wrong byte.
#
#     magic 4 bytes | layout 4 bytes | length 4 bytes | payload, `length` bytes
#
# All numbers are big-endian. The magic is checked byte by byte as it comes, so that rubbish is found out
# before a whole header of it has arrived; the length is checked before anything is kept, so that what is
# buffered stays below the limit and one read. The layout stands for the version: it is a checksum over the
# fields of all messages, so that an engine never talks to a process that was started from another version of
# the code.
MAGIC = b"tri\x01"  # the last byte counts the versions of this header
_HEADER = struct.Struct(">4sII")
HEADER_BYTES = _HEADER.size


def pack_frame(payload: bytes, *, layout: int, max_bytes: int) -> bytes:
    """Return a payload with its frame header.

    Args:
        layout: checksum over the fields of all messages.
        max_bytes: the longest payload that the other end takes.
    Raises:
        FrameError: the payload is longer.
    """
    _check_length(len(payload), max_bytes)
    return _HEADER.pack(MAGIC, layout, len(payload)) + payload


class FrameReader:
    """Incremental parser of frames: bytes in, payloads out.

    Args:
        layout: checksum that every frame must carry.
        max_bytes: the longest payload taken.
    """

    def __init__(self, *, layout: int, max_bytes: int) -> None:
        self._layout, self._max_bytes = layout, max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Add received bytes; call `next_payload` until it returns None before adding more."""
        self._buffer += data

    @property
    def num_missing(self) -> int:
        """Number of bytes that the frame that has begun still lacks; 0 if none has, or its length is not known yet."""
        if len(self._buffer) < HEADER_BYTES:
            return 0
        _, _, length = _HEADER.unpack_from(self._buffer)
        return max(HEADER_BYTES + min(int(length), self._max_bytes) - len(self._buffer), 0)

    def next_payload(self) -> bytes | None:
        """Return the next whole payload; None until it has arrived.

        Raises:
            FrameError: the bytes are no frame, one of another layout, or too long a one.
        """
        buffer = self._buffer
        if not buffer.startswith(MAGIC[: len(buffer)]):
            raise FrameError(f"a frame must begin with {MAGIC!r}; got {shown(bytes(buffer[:16]))}")
        if len(buffer) < HEADER_BYTES:
            return None
        _, layout, length = _HEADER.unpack_from(buffer)
        if layout != self._layout:
            raise FrameError(
                f"both ends must run the same version of triolet; "
                f"got messages of layout {layout:08x}, not {self._layout:08x}"
            )
        _check_length(length, self._max_bytes)
        if len(buffer) < HEADER_BYTES + length:
            return None
        payload = bytes(memoryview(buffer)[HEADER_BYTES : HEADER_BYTES + length])
        del buffer[: HEADER_BYTES + length]
        return payload

    def close(self) -> None:
        """Check at the end of the stream that no frame was cut off.

        Raises:
            FrameError: the last frame is not whole.
        """
        if self._buffer:
            raise FrameError(f"the bytes must end with a whole frame; got {len(self._buffer)} bytes of one")


def _check_length(length: int, max_bytes: int) -> None:
    if length > max_bytes:
        raise FrameError(f"a frame must have at most {max_bytes} bytes; got {length}")


MAX_PROBLEM_CHARS = 300  # of what a wrong message is refused for
# Size of the packer's buffer, which grows as it must. Its default, 256 KB, is mapped anew for each message, and where
# memory is short that fails for steps of a few hundred bytes.
PACKED_BYTES = 2048

M = TypeVar("M")


@attrs.frozen
class Halt:
    """Request to end the current run after the step that is being computed."""


@attrs.frozen
class PrepareAdapter:
    """Request to read a LoRA adapter in a thread, before a step needs it."""

    path: str
    digest: str
    is_pinned: bool


@attrs.frozen
class CallWorker:
    """Request to call a method of the worker, or a function with its model, between two plans."""

    target: str  # name of the method, or module:function
    is_on_model: bool
    arguments: bytes  # positional and keyword arguments; see `ipc.values`
    invalidates: bool


@attrs.frozen
class CallAnswer:
    """Answer to a `CallWorker`, also if it raised: the worker goes on."""

    value: bytes  # see `ipc.values`
    failure: Failure | None = None


@attrs.frozen
class ImportModules:
    """Request to import the modules that every load needs; it has no answer of its own."""


@attrs.frozen
class Ping:
    """Request to answer with a `Pong`; never sent while a plan is computed."""


@attrs.frozen
class Pong:
    """Answer to a `Ping`."""


@attrs.frozen
class ProcessEnded:
    """End of a worker's process, told by the agent that has started it; the last message of a connection."""

    returncode: int  # as in `Popen.returncode`


Request = EngineConfig | StepPlan | Halt | PrepareAdapter | CallWorker | ImportModules | Ping
Reply = LoadProgress | ModelInfo | StepResult | CallAnswer | Failure | Pong | ProcessEnded


@attrs.frozen(eq=False)
class Way(Generic[M]):
    """One direction of a connection: its messages and their size limits."""

    kinds: tuple[type, ...]  # their classes
    max_bytes: int
    max_items: int  # of a list in one
    layout: int  # checksum over the fields of all messages, both ways

    def pack(self, message: M) -> bytes:
        """Return the frame of a message.

        Raises:
            FrameError: it is too long.
        """
        body = [type(message).__name__, CONVERTER.unstructure(message)]
        # A request id may be any text, also one that is not well-formed Unicode.
        payload = msgpack.packb(body, unicode_errors="surrogatepass", buf_size=PACKED_BYTES)
        return pack_frame(payload, layout=self.layout, max_bytes=self.max_bytes)

    def reader(self) -> FrameReader:
        """Return a reader of the frames of this direction."""
        return FrameReader(layout=self.layout, max_bytes=self.max_bytes)

    def unpack(self, payload: bytes) -> M:
        """Return the message of a frame.

        Raises:
            FrameError: it is no message of this direction.
        """
        try:
            name, fields = self._values(payload)
            kind = {kind.__name__: kind for kind in self.kinds}[name]
            return cast(M, CONVERTER.structure(fields, kind))
        except Exception as error:  # any check may raise anything on a wrong value
            names = ", ".join(kind.__name__ for kind in self.kinds)
            problem = f"{type(error).__name__}: {str(error)[:MAX_PROBLEM_CHARS]}"
            raise FrameError(
                f"a message must be one of {names}; got {len(payload)} bytes: {problem}"
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
        """Iterate over the messages that have arrived whole."""
        while (payload := reader.next_payload()) is not None:
            yield self.unpack(payload)


_REQUESTS: Final = (EngineConfig, StepPlan, Halt, PrepareAdapter, CallWorker, ImportModules, Ping)
_REPLIES: Final = (LoadProgress, ModelInfo, StepResult, CallAnswer, Failure, Pong, ProcessEnded)
LAYOUT: Final = layout_of((*_REQUESTS, *_REPLIES))

# A plan may start a hundred requests with a million prompt tokens each, if all but one of each are in the prefix cache.
# An answer is short, unless a hundred requests want the log-probabilities of a whole vocabulary.
REQUESTS: Final = Way[Request](_REQUESTS, max_bytes=2**29, max_items=2**24, layout=LAYOUT)
REPLIES: Final = Way[Reply](_REPLIES, max_bytes=2**29, max_items=2**20, layout=LAYOUT)
