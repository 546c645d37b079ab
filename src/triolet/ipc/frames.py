"""Frames: a stream of bytes cut into messages, or refused at its first wrong byte.

    magic 4 bytes | layout 4 bytes | length 4 bytes | payload, `length` bytes

All numbers are big-endian. The magic is checked byte by byte as it comes, so that rubbish is found out before a whole
header of it has arrived; the length is checked before anything is kept, so that what is buffered stays below the limit
and one read. The layout stands for the version: it is a checksum over the fields of all messages, so that an engine
never talks to a process that was started from another version of the code.
"""

from __future__ import annotations

import struct

from triolet.errors import FrameError, shown

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
