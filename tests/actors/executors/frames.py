"""Frames of RFC 6455, right and wrong ones, written and read by hand."""

from __future__ import annotations

import struct

import attrs

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
MASK = b"\x37\xfa\x21\x3d"


@attrs.frozen
class Frame:
    """One frame; nothing says that it may be sent."""

    opcode: int
    payload: bytes = b""
    fin: bool = True
    rsv: int = 0
    mask: bytes | None = MASK

    def encode(self) -> bytes:
        size = len(self.payload)
        marked = 0x80 if self.mask else 0
        head = bytes([self.fin << 7 | self.rsv << 4 | self.opcode])
        if size < 126:
            head += bytes([marked | size])
        elif size < 2**16:
            head += bytes([marked | 126]) + struct.pack("!H", size)
        else:
            head += bytes([marked | 127]) + struct.pack("!Q", size)
        return head + (self.mask + xor(self.payload, self.mask) if self.mask else self.payload)


def xor(data: bytes, mask: bytes) -> bytes:
    key = mask * (len(data) // 4 + 1)
    number = int.from_bytes(data, "big") ^ int.from_bytes(key[: len(data)], "big")
    return number.to_bytes(len(data), "big")


def close(code: int | None = 1000, reason: bytes = b"") -> Frame:
    return Frame(CLOSE, b"" if code is None else struct.pack("!H", code) + reason)


class FrameReader:
    """Frames of a server, which are not masked, from the bytes as they come."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        self._data += data
        while (size := self._read()) is not None:
            del self._data[:size]

    @property
    def is_between_frames(self) -> bool:
        return not self._data

    def _read(self) -> int | None:
        """Take a frame, if all of it is there; how long it was."""
        data = self._data
        if len(data) < 2 or len(data) < (start := {126: 4, 127: 10}.get(data[1], 2)):
            return None
        assert not data[1] & 0x80, "a server does not mask"
        size = int.from_bytes(data[2:start], "big") if start > 2 else data[1]
        if len(data) < start + size:
            return None
        payload = bytes(data[start : start + size])
        self.frames.append(Frame(data[0] & 15, payload, bool(data[0] & 0x80), data[0] >> 4 & 7, None))
        return start + size
