"""Arguments and results of calls into workers as bytes: plain values and tensors, and never code.

A value is None, a bool, an int of 64 bits, a float, a text, bytes, or a list, a tuple or a mapping of values. Tensors
are the callers' business: they are turned into bytes of a format that cannot name code, and marked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack

from triolet.ipc.messages import PACKED_BYTES

_TENSOR, _TUPLE = 1, 2


def pack_value(value: object, encode: Callable[[object], bytes | None]) -> bytes:
    """Return the bytes of a value.

    Args:
        encode: returns the bytes of a tensor, and None for anything else.
    Raises:
        TypeError: a part of it is none of the types above.
        ValueError: it is nested too deeply, or a text cannot be encoded.
        OverflowError: an int has more than 64 bits.
    """

    def special(part: object) -> msgpack.ExtType:
        if type(part) is tuple:
            return msgpack.ExtType(_TUPLE, _pack(list(part), special))
        if (data := encode(part)) is not None:
            return msgpack.ExtType(_TENSOR, data)
        raise TypeError(f"a {type(part).__name__} is no plain value or tensor")

    try:
        return _pack(value, special)
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None


def _pack(value: object, special: Callable[[Any], msgpack.ExtType]) -> bytes:
    data: bytes = msgpack.packb(
        value, default=special, strict_types=True, unicode_errors="surrogatepass", buf_size=PACKED_BYTES
    )
    return data


def unpack_value(data: bytes, decode: Callable[[bytes], Any]) -> Any:
    """Return the value of bytes that `pack_value` made.

    Args:
        decode: returns the tensor of bytes that `encode` made.
    Raises:
        ValueError: they are no value.
    """

    def special(code: int, part: bytes) -> Any:
        if code == _TUPLE:
            return tuple(_unpack(part, special))
        if code == _TENSOR:
            return decode(part)
        raise ValueError(f"a value has no part of type {code}")

    return _unpack(data, special)


def _unpack(data: bytes, special: Callable[[int, bytes], Any]) -> Any:
    return msgpack.unpackb(data, ext_hook=special, strict_map_key=False, unicode_errors="surrogatepass")
