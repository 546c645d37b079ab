"""The cases of Autobahn|Testsuite's fuzzing client, sections 1 to 7, 9 and 10, against an echo of the gateway's socket.

Each case is what the client sends, cut into pieces as it is sent, and what must come back: messages, pongs, and the
close code. The numbers are Autobahn's.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import attrs
import pytest
import trio
import trio.testing
from trio_websocket import ConnectionClosed
from wsproto.frame_protocol import FrameProtocol

from tests.actors.executors.frames import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    Frame,
    FrameReader,
    close,
)
from triolet.server.transport.client_stream import InputBudget
from triolet.server.transport.websocket import ServerSocket, SocketLimits

LIMITS = SocketLimits(
    max_message_bytes=16 * 2**20,
    max_message_fragments=2**17,
    max_frames_per_second=2**20,
    max_pings_per_second=100,
    close_timeout=2.0,
)
HEAD = (
    b"GET /v1/responses HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
CLEAN = 1000


@attrs.frozen
class Case:
    """A case.

    Args:
        number: Autobahn's.
        send: frames; a goodbye is added where the connection is to stay clean.
        back: messages and pongs that must come back.
        code: of the close that must come back; None for one without a code.
        piece_bytes: as long as the pieces are that the bytes are sent in.
    """

    number: str
    send: list[Frame]
    back: list[Frame]
    code: int | None = CLEAN
    piece_bytes: int | None = None


async def exchange(
    pieces: list[bytes],
    limits: SocketLimits = LIMITS,
    *,
    goodbye_after: int | None = None,
    pause_s: float = 0.0,
    budget: InputBudget | None = None,
) -> list[Frame]:
    """Shake hands with an echo, send everything, and read to the end.

    Args:
        pieces: what is sent.
        limits: of the socket.
        goodbye_after: so many frames a goodbye is sent; None for never.
        pause_s: between the pieces.
        budget: of the server.
    Returns:
        The frames that came.
    """
    ours, theirs = trio.testing.memory_stream_pair()
    reader = FrameReader()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_echo, theirs, limits, budget)
        await ours.send_all(HEAD)
        data = b""
        while b"\r\n\r\n" not in data:
            data += await ours.receive_some()
        assert data.startswith(b"HTTP/1.1 101")
        lock = trio.Lock()
        nursery.start_soon(_send, lock, ours, pieces, pause_s)
        data = data.partition(b"\r\n\r\n")[2]
        while True:
            reader.feed(data)
            if goodbye_after is not None and len(reader.frames) >= goodbye_after:
                goodbye_after = None
                nursery.start_soon(_send, lock, ours, [close().encode()], 0)
            if not (data := bytes(await ours.receive_some(2**20))):
                break
        assert reader.is_between_frames
        await trio.aclose_forcefully(ours)
    return reader.frames


async def _echo(stream: trio.abc.Stream, limits: SocketLimits, budget: InputBudget | None = None) -> None:
    async with trio.open_nursery() as nursery:
        socket = ServerSocket(stream, limits)
        if budget is not None:
            socket.use_budget(budget, "client")
        handshake = await socket.handshake()
        assert handshake is not None
        await handshake.accept()
        nursery.start_soon(socket.run)
        try:
            while True:
                message = await socket.get_message()
                socket.message_taken()
                if isinstance(message, str):
                    await socket.send_texts([message])
                else:
                    await socket.send_message(message)
        except ConnectionClosed:
            await socket.ended.wait()


async def _send(lock: trio.Lock, stream: trio.abc.SendStream, pieces: list[bytes], pause_s: float) -> None:
    try:
        async with lock:  # the goodbye comes last
            for piece in pieces:
                await stream.send_all(piece)
                await trio.sleep(pause_s)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass  # the server has had enough


def cut(data: bytes, piece_bytes: int | None) -> list[bytes]:
    step = piece_bytes or max(len(data), 1)
    return [data[start : start + step] for start in range(0, len(data), step)]


def echoed(frame: Frame) -> Frame:
    return attrs.evolve(frame, fin=True, mask=None)


def text(payload: str | bytes, *, fin: bool = True, rsv: int = 0) -> Frame:
    return Frame(TEXT, payload.encode() if isinstance(payload, str) else payload, fin, rsv)


def back(*payloads: str | bytes) -> list[Frame]:
    return [echoed(text(payload)) for payload in payloads]


def pong(payload: bytes = b"") -> Frame:
    return Frame(PONG, payload, mask=None)


# ---------------------------------------------------------------------------- sections 1 to 5: framing


def framing() -> Iterator[Case]:
    for section, opcode in ((1, TEXT), (2, BINARY)):
        for place, size in enumerate((0, 125, 126, 127, 128, 65535, 65536, 65536), start=1):
            frame = Frame(opcode, b"*" * size)
            yield Case(
                f"1.{section}.{place}", [frame], [echoed(frame)], piece_bytes=997 if place == 8 else None
            )
    for place, payload in enumerate(
        (b"", b"Hello, world!", b"\x00\xff\xfe\xfd\xfc\xfb\x00\xff", b"\xfe" * 125), 1
    ):
        yield Case(f"2.{place}", [Frame(PING, payload)], [pong(payload)])
    yield Case("2.5", [Frame(PING, b"\xfe" * 126)], [], 1002)
    yield Case("2.6", [Frame(PING, b"\xfe" * 125)], [pong(b"\xfe" * 125)], piece_bytes=1)
    yield Case("2.7", [Frame(PONG)], [])
    yield Case("2.8", [Frame(PONG, b"unsolicited")], [])
    yield Case("2.9", [Frame(PONG, b"unsolicited"), Frame(PING, b"ping")], [pong(b"ping")])
    pings = [Frame(PING, b"payload-%d" % number) for number in range(10)]
    for number, piece_bytes in (("2.10", None), ("2.11", 1)):
        yield Case(number, pings, [pong(ping.payload) for ping in pings], piece_bytes=piece_bytes)
    hello = text("Hello, world!")
    yield Case("3.1", [text("Hello", rsv=1)], [], 1002)
    for number, rsv, piece_bytes in (("3.2", 2, None), ("3.3", 3, None), ("3.4", 4, 1)):
        bad = [hello, text("Hello", rsv=rsv), Frame(PING)]
        yield Case(number, bad, back(hello.payload), 1002, piece_bytes)
    yield Case("3.5", [Frame(BINARY, b"\x00\xff", rsv=5)], [], 1002)
    yield Case("3.6", [Frame(PING, b"Hello", rsv=6)], [], 1002)
    yield Case("3.7", [attrs.evolve(close(), rsv=7)], [], 1002)
    for section, opcodes in ((1, range(3, 8)), (2, range(11, 16))):
        for place, opcode in enumerate(opcodes, start=1):
            before = [hello] if place > 2 else []
            odd = Frame(opcode, b"" if place % 2 else b"reserved opcode payload")
            yield Case(
                f"4.{section}.{place}",
                [*before, odd, Frame(PING)],
                back(hello.payload) if before else [],
                1002,
                1 if place == 5 else None,
            )
    yield from fragments()


def fragments() -> Iterator[Case]:
    first, last = text("fragment1", fin=False), Frame(CONTINUATION, b"fragment2")
    whole = back("fragment1fragment2")
    ping, answered = Frame(PING, b"ping payload"), pong(b"ping payload")
    stray, stray_open = Frame(CONTINUATION, b"stray"), Frame(CONTINUATION, b"stray", fin=False)
    after = text("Hello, world!")
    yield Case("5.1", [Frame(PING, b"fragment1", fin=False), last], [], 1002)
    yield Case("5.2", [Frame(PONG, b"fragment1", fin=False), last], [], 1002)
    for number, piece_bytes in (("5.3", None), ("5.4", 20), ("5.5", 1)):
        yield Case(number, [first, last], whole, piece_bytes=piece_bytes)
    for number, piece_bytes in (("5.6", None), ("5.7", 20), ("5.8", 1)):
        yield Case(number, [first, ping, last], [answered, *whole], piece_bytes=piece_bytes)
    for section, continuation in ((9, stray), (12, stray_open)):
        for place, piece_bytes in enumerate((None, 20, 1)):
            yield Case(f"5.{section + place}", [continuation, after], [], 1002, piece_bytes)
    yield Case("5.15", [first, last, stray_open, after], whole, 1002)
    repeated = [stray_open, text("x", fin=False), Frame(CONTINUATION, b"y")]
    yield Case("5.16", repeated * 2, [], 1002)
    yield Case("5.17", [stray, *repeated[1:]], [], 1002)
    yield Case("5.18", [first, text("fragment2")], [], 1002)
    parts = [Frame(CONTINUATION, b"fragment%d" % number, fin=number == 5) for number in range(2, 6)]
    five = [first, parts[0], ping, *parts[1:3], ping, parts[3]]
    said = back("".join(f"fragment{number}" for number in range(1, 6)))
    for number, piece_bytes in (("5.19", None), ("5.20", 1)):
        yield Case(number, five, [answered, answered, *said], piece_bytes=piece_bytes)


# ------------------------------------------------------------------------------ section 6: Unicode text

GREEK = "Hello-µ@ßöäüàá-UTF-8!!"
VALID = {
    "6.5.1": "\ue000",
    "6.6.2": "\u03ba",
    "6.6.5": "\u03ba\u1f79",
    "6.6.7": "\u03ba\u1f79\u03c3",
    "6.6.9": "\u03ba\u1f79\u03c3\u03bc",
    "6.6.11": "\u03ba\u1f79\u03c3\u03bc\u03b5",
    "6.7.1": "\x00",
    "6.7.2": "\x80",
    "6.7.3": "\u0800",
    "6.7.4": "\U00010000",
    "6.9.1": "\x7f",
    "6.9.2": "\u07ff",
    "6.9.3": "\uffff",
    "6.9.4": "\U0010ffff",
    "6.11.1": "\ud7ff",
    "6.11.2": "\ue000",
    "6.11.3": "\ufffd",
    "6.11.4": "\U0010ffff",
    "6.22.1": "\ufffe",
    "6.22.2": "\uffff",
    "6.22.20": "\U0001fffe",
    "6.22.33": "\U0010fffe",
    "6.22.34": "\U0010ffff",
    "6.23.1": "\ufff9",
    "6.23.7": "\uffff",
}
KAPPA = "\u03ba\u1f79\u03c3\u03bc\u03b5".encode()
INVALID = {
    "6.3.1": KAPPA + b"\xed\xa0\x80edited",
    "6.6.1": b"\xce",
    "6.6.3": b"\xce\xba\xe1",
    "6.6.4": b"\xce\xba\xe1\xbd",
    "6.6.6": b"\xce\xba\xe1\xbd\xb9\xcf",
    "6.6.8": b"\xce\xba\xe1\xbd\xb9\xcf\x83\xce",
    "6.6.10": b"\xce\xba\xe1\xbd\xb9\xcf\x83\xce\xbc\xce",
    "6.8.1": b"\xf8\x88\x80\x80\x80",
    "6.8.2": b"\xfc\x84\x80\x80\x80\x80",
    "6.10.1": b"\xf7\xbf\xbf\xbf",
    "6.10.2": b"\xfb\xbf\xbf\xbf\xbf",
    "6.10.3": b"\xfd\xbf\xbf\xbf\xbf\xbf",
    "6.11.5": b"\xf4\x90\x80\x80",
    "6.12.1": b"\x80",
    "6.12.2": b"\xbf",
    "6.12.3": b"\x80\xbf",
    "6.12.7": b"\x80\xbf\x80\xbf\x80\xbf",
    "6.12.8": bytes(range(0x80, 0xC0)),
    "6.13.1": b" ".join(bytes([byte]) for byte in range(0xC0, 0xE0)),
    "6.13.2": b" ".join(bytes([byte]) for byte in range(0xE0, 0xF0)),
    "6.13.3": b" ".join(bytes([byte]) for byte in range(0xF0, 0xF8)),
    "6.13.4": b" ".join(bytes([byte]) for byte in range(0xF8, 0xFC)),
    "6.13.5": b"\xfc \xfd",
    "6.14.1": b"\xc0",
    "6.14.2": b"\xe0\x80",
    "6.14.3": b"\xf0\x80\x80",
    "6.14.6": b"\xdf",
    "6.14.7": b"\xef\xbf",
    "6.14.8": b"\xf7\xbf\xbf",
    "6.15.1": b"\xc0\xe0\x80\xf0\x80\x80\xf8\x80\x80\x80\xfc\x80\x80\x80\x80\xdf\xef\xbf\xf7\xbf\xbf",
    "6.16.1": b"\xfe",
    "6.16.2": b"\xff",
    "6.16.3": b"\xfe\xfe\xff\xff",
    "6.17.1": b"\xc0\xaf",
    "6.17.2": b"\xe0\x80\xaf",
    "6.17.3": b"\xf0\x80\x80\xaf",
    "6.17.4": b"\xf8\x80\x80\x80\xaf",
    "6.17.5": b"\xfc\x80\x80\x80\x80\xaf",
    "6.18.1": b"\xc1\xbf",
    "6.18.2": b"\xe0\x9f\xbf",
    "6.18.3": b"\xf0\x8f\xbf\xbf",
    "6.18.4": b"\xf8\x87\xbf\xbf\xbf",
    "6.18.5": b"\xfc\x83\xbf\xbf\xbf\xbf",
    "6.19.1": b"\xc0\x80",
    "6.19.2": b"\xe0\x80\x80",
    "6.19.3": b"\xf0\x80\x80\x80",
    "6.19.4": b"\xf8\x80\x80\x80\x80",
    "6.19.5": b"\xfc\x80\x80\x80\x80\x80",
    **{
        f"6.20.{place}": unit.to_bytes(3, "big")
        for place, unit in enumerate((0xEDA080, 0xEDADBF, 0xEDAE80, 0xEDAFBF, 0xEDB080, 0xEDBE80, 0xEDBFBF), 1)
    },
    **{
        f"6.21.{place}": bytes.fromhex(pair)
        for place, pair in enumerate(
            ("eda080edb080", "eda080edbfbf", "edadbfedb080", "edadbfedbfbf",
             "edae80edb080", "edae80edbfbf", "edafbfedb080", "edafbfedbfbf"), 1)
    },
}  # fmt: skip


def unicode() -> Iterator[Case]:
    empty, open_empty = text(""), text("", fin=False)
    end, go_on = Frame(CONTINUATION), Frame(CONTINUATION, fin=False)
    yield Case("6.1.1", [empty], back(""))
    yield Case("6.1.2", [open_empty, go_on, end], back(""))
    yield Case("6.1.3", [open_empty, Frame(CONTINUATION, b"middle", fin=False), end], back("middle"))
    data = GREEK.encode()
    yield Case("6.2.1", [text(data)], back(data))
    yield Case("6.2.2", [text(data[:12], fin=False), Frame(CONTINUATION, data[12:])], back(data))
    yield Case("6.2.3", [*in_octets(data)], back(data))
    yield Case("6.2.4", [*in_octets(KAPPA)], back(KAPPA))
    for number, valid in VALID.items():
        yield Case(number, [text(valid)], back(valid))
    for number, invalid in INVALID.items():
        yield Case(number, [text(invalid)], [], 1007)
    bad = INVALID["6.3.1"]
    yield Case("6.3.2", [*in_octets(bad)], [], 1007)
    start, rest = text(KAPPA + b"\xf4\x90", fin=False), Frame(CONTINUATION, b"\x80\x80edited", fin=False)
    for number, sent in (("6.4.1", [start, rest, end]), ("6.4.2", [start])):
        yield Case(number, sent, [], 1007)
    for number, size in (
        ("6.4.3", len(KAPPA) + 8),
        ("6.4.4", len(KAPPA) + 9),
    ):  # within a frame, too: fail fast
        frame = text(KAPPA + b"\xf4\x90\x80\x80edited").encode()
        yield Case(number, [_Raw(TEXT, frame[:size])], [], 1007)


@attrs.frozen
class _Raw(Frame):
    """Bytes that are no whole frame."""

    def encode(self) -> bytes:
        return self.payload


def in_octets(data: bytes) -> Iterator[Frame]:
    yield text(data[:1], fin=False)
    for place in range(1, len(data) - 1):
        yield Frame(CONTINUATION, data[place : place + 1], fin=False)
    yield Frame(CONTINUATION, data[-1:])


# ---------------------------------------------------------------------- section 7: the closing handshake


def closing() -> Iterator[Case]:
    hello = text("Hello World!")
    yield Case("7.1.1", [hello, close()], back("Hello World!"))
    yield Case("7.1.2", [close(), close()], [])
    yield Case("7.1.3", [close(), Frame(PING)], [])
    yield Case("7.1.4", [close(), hello], [])
    yield Case("7.1.5", [text("fragment1", fin=False), close(), Frame(CONTINUATION, b"fragment2")], [])
    large = text(b"BAsd7&jh23" * 26 * 1024)
    yield Case("7.1.6", [large, hello, close(), Frame(PING)], [*back(large.payload), *back("Hello World!")])
    yield Case("7.3.1", [close(None)], [], None)
    yield Case("7.3.2", [Frame(CLOSE, b"a")], [], 1002)
    yield Case("7.3.3", [close(1000)], [])
    yield Case("7.3.4", [close(1000, b"Hello World!")], [])
    yield Case("7.3.5", [close(1000, b"*" * 123)], [])
    yield Case("7.3.6", [close(1000, b"*" * 124)], [], 1002)
    yield Case("7.5.1", [close(1000, INVALID["6.3.1"])], [], 1007)
    good = (1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 3000, 3999, 4000, 4999)
    for place, code in enumerate(good, start=1):
        yield Case(f"7.7.{place}", [close(code)], [], code)
    bad = (0, 999, 1004, 1005, 1006, 1016, 1100, 2000, 2999)
    for place, code in enumerate(bad, start=1):
        yield Case(f"7.9.{place}", [close(code)], [], 1002)
    for place, code in enumerate((5000, 65535), start=1):
        yield Case(f"7.13.{place}", [close(code)], [], 1002)


CASES = [*framing(), *unicode(), *closing()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.number)
async def test_a_case_of_autobahn_passes(case: Case, autojump_clock: trio.testing.MockClock) -> None:
    await check(case)


async def check(case: Case) -> None:
    """Order between messages and pongs is free; within each it is not."""
    says_goodbye = any(frame.opcode == CLOSE for frame in case.send)
    sent = b"".join(frame.encode() for frame in case.send)
    goodbye_after = None if says_goodbye or case.code != CLEAN else len(case.back)
    with trio.fail_after(60):
        *answers, last = await exchange(cut(sent, case.piece_bytes), goodbye_after=goodbye_after)
    for is_pong in (False, True):
        expected = [frame for frame in case.back if (frame.opcode == PONG) == is_pong]
        came = [frame for frame in answers if (frame.opcode == PONG) == is_pong]
        # A client that says goodbye, or something wrong, right behind a message need not get the answer to it; Autobahn
        # calls that NON-STRICT.
        assert came == (expected if goodbye_after is not None else expected[: len(came)])
    assert last.opcode == CLOSE
    assert (int.from_bytes(last.payload[:2], "big") if last.payload else None) == case.code
    last.payload[2:].decode()


def test_there_is_a_case_for_each_of_the_sections() -> None:
    numbers = [case.number for case in CASES]
    assert len(set(numbers)) == len(numbers) > 190
    assert {number.partition(".")[0] for number in numbers} == set("1234567")


# --------------------------------------------------------------------------- sections 9 and 10: size

KIB, MIB = 2**10, 2**20


def limits() -> Iterator[Case]:
    for section, opcode in ((1, TEXT), (2, BINARY)):
        for place, size in enumerate((64 * KIB, 256 * KIB, MIB, 4 * MIB, 8 * MIB, 16 * MIB), start=1):
            frame = Frame(opcode, b"*" * size)
            yield Case(f"9.{section}.{place}", [frame], [echoed(frame)])
    for section, opcode in ((3, TEXT), (4, BINARY)):
        for place in range(9):
            whole = Frame(opcode, b"*" * 4 * MIB)
            yield Case(f"9.{section}.{place + 1}", [*cut_up(whole, 64 * 4**place)], [echoed(whole)])
    for section, opcode in ((5, TEXT), (6, BINARY)):
        for place in range(6):
            whole = Frame(opcode, b"*" * MIB)
            yield Case(f"9.{section}.{place + 1}", [whole], [echoed(whole)], piece_bytes=64 * 2**place)
    for section, opcode in ((7, TEXT), (8, BINARY)):
        for place, size in enumerate((0, 16, 64, 256, 1024, 4096), start=1):
            frame = Frame(opcode, b"*" * size)
            yield Case(f"9.{section}.{place}", [frame] * 1000, [echoed(frame)] * 1000)
    frame = text(b"*" * 65536)
    yield Case("10.1.1", [*cut_up(frame, 1300)], [echoed(frame)])


def cut_up(whole: Frame, size: int) -> Iterator[Frame]:
    """A message in fragments."""
    payloads = cut(whole.payload, size)
    for place, payload in enumerate(payloads):
        opcode = CONTINUATION if place else whole.opcode
        yield Frame(opcode, payload, fin=place == len(payloads) - 1)


BIG = list(limits())
QUICK = ("9.1.1", "9.2.1", "9.7.1", "9.7.4", "9.8.2", "10.1.1")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.number, marks=[] if case.number in QUICK else [pytest.mark.slow])
        for case in BIG
    ],
)
async def test_a_large_case_of_autobahn_passes(case: Case) -> None:
    await check(case)


# ------------------------------------------------------------------------------- what Autobahn lacks


def code_of(frames: list[Frame]) -> int:
    assert frames[-1].opcode == CLOSE
    return int.from_bytes(frames[-1].payload[:2], "big")


async def test_a_message_that_is_too_long_is_told_so(autojump_clock: trio.testing.MockClock) -> None:
    limits = attrs.evolve(LIMITS, max_message_bytes=1000)
    for payload in (b"*" * 1001, "é".encode() * 501):
        assert code_of(await exchange([text(payload).encode()], limits)) == 1009
    frames = await exchange([text("é" * 500).encode()], limits, goodbye_after=1)
    assert frames[0] == echoed(text("é" * 500))


async def test_empty_fragments_without_end_are_told_so(autojump_clock: trio.testing.MockClock) -> None:
    limits = attrs.evolve(LIMITS, max_message_fragments=100)
    frame = Frame(CONTINUATION, fin=False).encode()
    assert code_of(await exchange([text("", fin=False).encode(), frame * 100], limits)) == 1008


async def test_more_frames_in_a_second_than_allowed_end_the_connection(
    autojump_clock: trio.testing.MockClock,
) -> None:
    limits = attrs.evolve(LIMITS, max_frames_per_second=50)
    frames = await exchange([text("x").encode() * 51], limits)
    assert len(frames) <= 51 and code_of(frames) == 1008
    frames = await exchange([text("x").encode() * 25] * 8, limits, pause_s=0.6, goodbye_after=200)
    assert len(frames) == 201


async def test_pongs_that_no_ping_asked_for_are_limited(autojump_clock: trio.testing.MockClock) -> None:
    assert code_of(await exchange([Frame(PONG, b"x").encode() * 20_000])) == 1008


async def test_the_reader_lets_other_tasks_run_while_it_works_on_many_frames() -> None:
    num_turns = 0

    async def count() -> None:
        nonlocal num_turns
        while True:
            await trio.lowlevel.checkpoint()
            num_turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        piece = text("", fin=False).encode() + Frame(CONTINUATION, fin=False).encode() * 20_000
        await exchange([piece + Frame(CONTINUATION).encode()], goodbye_after=1)
        nursery.cancel_scope.cancel()
    assert num_turns > 20  # one receive of 64 KiB holds 10,000 of the frames


async def test_a_message_in_parts_of_one_character_is_joined_as_it_comes(
    autojump_clock: trio.testing.MockClock,
) -> None:
    whole = "ä中x" * 300
    frame = text(whole).encode()
    pieces = [frame[place : place + 1] for place in range(len(frame))]
    assert (await exchange(pieces, goodbye_after=1))[0] == echoed(text(whole))


async def test_a_message_over_the_budget_of_the_server_ends_its_connection_alone(
    autojump_clock: trio.testing.MockClock,
) -> None:
    budget = InputBudget(max_bytes=2**20, max_bytes_per_client=100_000)
    half = text("x" * 60_000, fin=False).encode()
    assert code_of(await exchange([half, Frame(CONTINUATION, b"x" * 60_000).encode()], budget=budget)) == 1013
    frames = await exchange([text("x" * 60_000).encode()] * 5, budget=budget, goodbye_after=5)
    assert len(frames) == 6 and budget.num_bytes == 0


async def test_a_flood_of_pings_is_told_so(autojump_clock: trio.testing.MockClock) -> None:
    frames = await exchange([Frame(PING, b"x").encode() * 20_000])
    assert len(frames) == LIMITS.max_pings_per_second + 1 and code_of(frames) == 1008


async def test_pings_at_a_decent_rate_are_answered_for_ever(autojump_clock: trio.testing.MockClock) -> None:
    pings = [Frame(PING, b"x").encode()] * 500
    assert len(await exchange(pings, pause_s=0.02, goodbye_after=500)) == 501


async def test_a_frame_without_a_mask_is_told_so(autojump_clock: trio.testing.MockClock) -> None:
    assert code_of(await exchange([Frame(TEXT, b"Hello", mask=None).encode()])) == 1002


@pytest.mark.parametrize(
    "head", [b"\x81\xff" + b"\xff" * 8, b"\x81\xfe\x00\x05", b"\x81\xff" + bytes(7) + b"\x05"]
)
async def test_a_length_that_is_wrong_is_told_so(head: bytes, autojump_clock: trio.testing.MockClock) -> None:
    assert code_of(await exchange([head + b"mask" + b"x" * 5])) == 1002


async def test_what_follows_the_handshake_at_once_is_heard(autojump_clock: trio.testing.MockClock) -> None:
    """No client should speak before it was let in; one that does must not hang."""
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_echo, theirs, LIMITS)
        await ours.send_all(HEAD + text("Hello").encode() + close().encode())
        data = b""
        while more := await ours.receive_some():
            data += more
    assert data.partition(b"\r\n\r\n")[2].endswith(attrs.evolve(close(), mask=None).encode())


@pytest.mark.parametrize("sent", [[text("x" * 1000), close()], [text(b"\xff" * 1000)], []])
async def test_an_ended_connection_is_freed_without_the_garbage_collector(
    sent: list[Frame], autojump_clock: trio.testing.MockClock
) -> None:
    def connections() -> list[object]:
        return [one for one in gc.get_objects() if isinstance(one, ServerSocket | FrameProtocol)]

    ours, theirs = trio.testing.memory_stream_pair()
    gc.collect()
    gc.disable()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_echo, theirs, LIMITS)
            await ours.send_all(HEAD + b"".join(frame.encode() for frame in sent))
            await trio.testing.wait_all_tasks_blocked()
            await ours.aclose()
        assert connections() == []
    finally:
        gc.enable()
