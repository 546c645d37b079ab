"""A frame comes out as it went in, however the bytes are cut; anything else is refused at its first wrong byte."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.errors import FrameError
from triolet.ipc.messages import HEADER_BYTES, MAGIC, FrameReader, pack_frame

LAYOUT = 0xC0FFEE
MAX_BYTES = 1000


def pack(payload: bytes) -> bytes:
    return pack_frame(payload, layout=LAYOUT, max_bytes=MAX_BYTES)


def read(pieces: Iterable[bytes]) -> list[bytes]:
    """The payloads of what comes in these pieces, to the end."""
    reader = FrameReader(layout=LAYOUT, max_bytes=MAX_BYTES)
    payloads = []
    for piece in pieces:
        reader.feed(piece)
        while (payload := reader.next_payload()) is not None:
            payloads.append(payload)
    reader.close()
    return payloads


def header(*, magic: bytes = MAGIC, layout: int = LAYOUT, length: int = 0) -> bytes:
    return struct.pack(">4sII", magic, layout, length)


@given(st.lists(st.binary(max_size=50), max_size=5), st.data())
def test_frames_come_out_in_order_however_they_are_cut(payloads: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(pack, payloads))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    edges = [0, *cuts, len(stream)]
    assert read(stream[i:j] for i, j in pairwise(edges)) == payloads


@pytest.mark.parametrize("length", [0, 1, 300, MAX_BYTES])
def test_a_frame_cut_short_at_any_byte_is_no_frame(length: int) -> None:
    frame = pack(b"x" * length)
    assert read([frame]) == [b"x" * length]
    for end in range(1, len(frame)):
        with pytest.raises(FrameError, match=f"got {end} bytes of one"):
            read([frame[:end]])


def test_the_end_may_come_between_frames_only() -> None:
    assert read([]) == []
    with pytest.raises(FrameError, match="must end with a whole frame; got 1 bytes of one"):
        read([pack(b"a") + b"t"])


@pytest.mark.parametrize("position", range(len(MAGIC)))
def test_rubbish_is_found_out_at_its_first_byte(position: int) -> None:
    reader = FrameReader(layout=LAYOUT, max_bytes=MAX_BYTES)
    reader.feed(MAGIC[:position])
    assert reader.next_payload() is None
    reader.feed(b"?")
    with pytest.raises(FrameError, match=r"a frame must begin with b'tri\\x01'; got b'"):
        reader.next_payload()


def test_another_version_is_refused_before_its_payload() -> None:
    with pytest.raises(
        FrameError, match="same version of triolet; got messages of layout 00000001, not 00c0ffee"
    ):
        read([header(layout=1, length=5)])


@pytest.mark.parametrize("length", [MAX_BYTES + 1, 2**31, 2**32 - 1])
def test_a_frame_that_would_be_too_long_is_refused_before_any_of_it_is_kept(length: int) -> None:
    with pytest.raises(FrameError, match=f"must have at most {MAX_BYTES} bytes; got {length}"):
        read([header(length=length)])


def test_a_frame_that_would_be_too_long_is_not_even_packed() -> None:
    with pytest.raises(FrameError, match="must have at most 1000 bytes; got 1001"):
        pack(bytes(MAX_BYTES + 1))


@given(st.binary(max_size=64) | st.binary(max_size=40).map(lambda tail: header(length=len(tail)) + tail))
def test_any_bytes_are_frames_or_an_error(data: bytes) -> None:
    try:
        payloads = read([data])
    except FrameError:
        return
    assert b"".join(map(pack, payloads)) == data


def test_what_is_kept_is_bounded_by_the_limit_and_one_read() -> None:
    piece = pack(b"x" * 500) * 40
    reader = FrameReader(layout=LAYOUT, max_bytes=MAX_BYTES)
    tracemalloc.start()
    for _ in range(200):
        reader.feed(piece)
        while reader.next_payload() is not None:
            pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * (len(piece) + MAX_BYTES + HEADER_BYTES)
