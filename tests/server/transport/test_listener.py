"""One port: HTTP, handed-over upgrades, limits, TLS, and the way down; over real sockets of this machine."""

from __future__ import annotations

import errno
import gc
import re
import ssl
import subprocess
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.trio.tcp_server import TCPServer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from trio.testing import MockClock, open_stream_to_socket_listener, wait_all_tasks_blocked

from triolet.config.server import GatewayConfig
from triolet.errors import ConfigError
from triolet.observability.prometheus import GatewayMetrics
from triolet.server.transport.client_stream import ClientStream
from triolet.server.transport.client_turns import ClientTurns
from triolet.server.transport.listener import ACCEPTED_AT_ONCE, Listener, bind, waiting_connections

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
UPGRADE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, Upgrade\r\n"
    b"Upgrade: WebSocket\r\nX-A: 1\r\n\r\n"
)


class Server:
    """A listener whose app and WebSocket say what they see."""

    def __init__(self, front: Listener, port: int, cancelled: list[str], metrics: GatewayMetrics) -> None:
        self.front, self.port, self.cancelled, self.metrics = front, port, cancelled, metrics

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    async def ask(self, request: bytes) -> bytes:
        """Everything that is answered until the server closes."""
        stream = await self.connect()
        async with stream:
            await stream.send_all(request)
            return await rest_of(stream)


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for a count of the server's, also where Trio's clock stands still."""
    while not condition():
        await trio.to_thread.run_sync(time.sleep, 0.001)


async def rest_of(stream: trio.abc.ReceiveStream) -> bytes:
    with trio.fail_after(60):
        answer = b""
        while data := await stream.receive_some():
            answer += data
        return answer


async def pass_time(clock: MockClock, until: Callable[[], bool]) -> None:
    """Let time pass, second by second, until something is so: a limit, and the moment that a client has to read."""
    while not until():
        clock.jump(1.0)
        await trio.to_thread.run_sync(time.sleep, 0.001)


async def stand_idle(server: Server, clock: MockClock, limit_s: float) -> None:
    """Open the only connection, on which nothing is sent, and wait until the server has closed it at its limit."""
    await eventually(lambda: not server.front.num_connections)
    async with await server.connect() as stream:
        await eventually(lambda: server.front.num_connections == 1)
        await wait_all_tasks_blocked()
        clock.jump(limit_s)
        assert await rest_of(stream) == b""


async def read(stream: trio.abc.ReceiveStream, end: bytes) -> bytes:
    with trio.fail_after(60):
        answer = b""
        while not answer.endswith(end):
            data = await stream.receive_some()
            assert data, answer
            answer += data
        return answer


class Flood(Response):
    """An answer that never ends."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * 2**20, "more_body": True})


class CutOff(Response):
    """An answer that is cancelled when nothing of it has been sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with trio.CancelScope() as cut:
            cut.cancel()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x", "more_body": True})


def an_app(cancelled: list[str]) -> Starlette:
    async def hello(request: Request) -> Response:
        return PlainTextResponse("hello")

    async def seen(request: Request) -> Response:
        return PlainTextResponse(f"{request.headers['host']} {request.url.path}?{request.url.query}")

    async def length(request: Request) -> Response:
        return PlainTextResponse(f"{len(await request.body())} bytes")

    async def wait(request: Request) -> Response:
        try:
            await trio.sleep(60)
        except trio.Cancelled:
            cancelled.append(request.url.path)
            raise
        return PlainTextResponse("late")

    async def flood(request: Request) -> Response:
        return Flood()

    async def fail(request: Request) -> Response:
        raise RuntimeError("secret")

    async def cut_off(request: Request) -> Response:
        return CutOff()

    return Starlette(
        routes=[
            Route("/", hello),
            Route("/seen", seen),
            Route("/length", length, methods=["POST"]),
            Route("/wait", wait),
            Route("/flood", flood),
            Route("/fail", fail),
            Route("/cut-off", cut_off),
            Route("/v1/responses", hello),
        ]
    )


@asynccontextmanager
async def listening(**fields: Any) -> AsyncGenerator[Server]:
    cancelled: list[str] = []
    config = GatewayConfig.create(GatewayConfig(port=0), **fields)

    async def websocket(stream: ClientStream) -> None:
        async with stream:
            data = await stream.receive_some()
            if b"fail" in data:
                raise RuntimeError("a bug")
            await stream.send_all(b"WS " + data)

    metrics = GatewayMetrics()
    front = Listener(config, an_app(cancelled), websocket, metrics)
    async with trio.open_nursery() as nursery:
        url = await nursery.start(front.run)
        yield Server(front, int(url.rpartition(":")[2]), cancelled, metrics)
        nursery.cancel_scope.cancel()


async def test_one_connection_answers_several_requests_and_may_become_a_websocket() -> None:
    async with listening() as server:
        stream = await server.connect()
        async with stream:
            for _ in range(2):
                await stream.send_all(GET)
                assert (await read(stream, b"hello")).startswith(b"HTTP/1.1 200")
            await stream.send_all(UPGRADE + b"and more")
            assert await rest_of(stream) == b"WS " + UPGRADE + b"and more"


async def test_an_upgrade_may_wait_behind_a_request_and_come_in_pieces() -> None:
    async with listening() as server:
        stream = await server.connect()
        async with stream:
            await stream.send_all(GET + UPGRADE[:40])
            await read(stream, b"hello")
            await trio.sleep(0.05)
            await stream.send_all(UPGRADE[40:])
            assert await rest_of(stream) == b"WS " + UPGRADE


@pytest.mark.parametrize(
    "request_head",
    [
        UPGRADE.replace(b"/v1/responses", b"/"),
        UPGRADE.replace(b"WebSocket", b"h2c"),
        UPGRADE.replace(b"Upgrade: ", b"X: "),
        UPGRADE.replace(b"keep-alive, Upgrade", b"keep-alive"),
    ],
)
async def test_other_upgrades_are_answered_as_if_they_were_not_asked_for(request_head: bytes) -> None:
    async with listening() as server:
        stream = await server.connect()
        async with stream:
            await stream.send_all(request_head)
            assert (await read(stream, b"hello")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("behind", [b"", GET, GET[:10]])
async def test_a_client_that_goes_cancels_its_request_whatever_it_has_sent_behind_it(behind: bytes) -> None:
    async with listening() as server:
        stream = await server.connect()
        await stream.send_all(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n" + behind)
        await trio.sleep(0.1)
        assert not server.cancelled
        await stream.aclose()
        await eventually(lambda: bool(server.cancelled) and not server.front.num_connections)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 40_000, b"431"),
        (b"x" * 40_000, b"431"),
        (b"\x16\x03\x01\x02\x00garbage\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"400"),
        (b"POST /length HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"POST /length HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", b"400"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"505"),
        (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", b"414"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 40_000 + b"\r\n\r\n", b"431"),
        (b"GET http://a@b/ HTTP/1.1\r\nHost: a\r\n\r\n", b"400"),
        (b"GET http:///x HTTP/1.1\r\nHost: a\r\n\r\n", b"400"),
    ],
)
async def test_what_is_no_http_is_answered_and_closed(sent: bytes, status: bytes) -> None:
    async with listening() as server:
        answer = await server.ask(sent)
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert b'"error":{' in answer
        assert server.front.num_connections <= 1


async def test_a_request_with_two_lengths_is_refused_and_nothing_behind_it_is_read() -> None:
    smuggled = b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n"
    async with listening() as server:
        for lengths in (
            b"Content-Length: 5\r\nTransfer-Encoding: chunked",
            b"transfer-encoding: chunked\r\ncontent-length: 5",
        ):
            head = b"POST /length HTTP/1.1\r\nHost: a\r\n" + lengths + b"\r\n\r\n"
            answer = await server.ask(head + b"0\r\n\r\n" + smuggled)
            assert answer.startswith(b"HTTP/1.1 400")
            assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("authority", [b"http://b:80", b"HTTP://b:80", b"https://b:80"])
async def test_an_absolute_target_is_its_path_and_its_host_replaces_the_header(authority: bytes) -> None:
    async with listening() as server:
        for target, answer in ((b"/seen?x=1", b"b:80 /seen?x=1"), (b"", b"hello"), (b"?x=/y", b"hello")):
            stream = await server.connect()
            async with stream:
                await stream.send_all(b"GET " + authority + target + b" HTTP/1.1\r\nHost: a\r\n\r\n")
                assert (await read(stream, answer)).startswith(b"HTTP/1.1 200")
        answered = await server.ask(UPGRADE.replace(b"/v1", authority + b"/v1"))
        assert answered.startswith(b"WS GET /v1/responses HTTP/1.1") and b"Host: b:80" in answered


@pytest.mark.parametrize("piece", [1_000, 32_768, 40_000, 200_000])
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", b"414"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", b"431"),
    ],
)
async def test_a_head_that_is_too_long_gets_one_answer_however_it_is_cut_up(
    sent: bytes, status: bytes, piece: int
) -> None:
    async with listening() as server, await server.connect() as stream:
        with suppress(trio.BrokenResourceError):  # answered and closed before the rest was sent
            for start in range(0, len(sent), piece):
                await stream.send_all(sent[start : start + piece])
                await wait_all_tasks_blocked(0.001)
        assert (await read(stream, b"}}")).startswith(b"HTTP/1.1 " + status)


async def test_a_head_must_come_in_time_however_slowly_it_drips() -> None:
    async with listening(handshake_timeout=0.5) as server:
        stream = await server.connect()
        began = trio.current_time()
        async with stream, trio.open_nursery() as nursery:

            async def drip() -> None:
                for byte in GET * 100:
                    try:
                        await stream.send_all(bytes([byte]))
                    except trio.BrokenResourceError:
                        return
                    await trio.sleep(0.1)

            nursery.start_soon(drip)
            assert await rest_of(stream) == b""
            nursery.cancel_scope.cancel()
        assert trio.current_time() - began > 0.4


async def test_an_answer_arrives_although_the_body_was_not_read() -> None:
    async with listening() as server:
        request = b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 10000000\r\n\r\n" + b"x" * 3_000_000
        answer = await server.ask(request)
        assert answer.endswith(b"hello")


async def test_a_large_body_goes_through() -> None:
    async with listening() as server:
        size = 5_000_000
        head = (
            b"POST /length HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % size
        )
        stream = await server.connect()
        async with stream:
            await stream.send_all(head)
            assert b"100" in await read(stream, b"\r\n\r\n")
            await stream.send_all(b"x" * size)
            assert b"5000000 bytes" in await read(stream, b"bytes")


async def test_a_client_that_asks_whether_to_send_its_body_is_told_so_only_by_an_app_that_wants_it() -> None:
    ask = b"POST /%s HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"
    async with listening() as server:
        async with await server.connect() as stream:
            await stream.send_all(ask % b"no-such-route")
            assert (await rest_of(stream)).startswith(b"HTTP/1.1 404")
        async with await server.connect() as stream:
            for _ in range(2):
                await stream.send_all(ask % b"length")
                assert (await read(stream, b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
                await stream.send_all(b"abc")
                assert b"3 bytes" in await read(stream, b"bytes")
        async with await server.connect() as stream:  # one that does not wait
            await stream.send_all(ask % b"length" + b"abc")
            assert b"3 bytes" in await read(stream, b"bytes")


async def test_requests_may_be_sent_before_the_answers_to_those_before_them() -> None:
    async with listening() as server, await server.connect() as stream:
        chunked = b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"
        posts = [
            b"POST /length HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc",
            b"POST /length HTTP/1.1\r\nHost: a\r\n" + chunked,
        ]
        await stream.send_all(b"".join([*posts, GET]))
        answers = await read(stream, b"hello")
        assert answers.index(b"3 bytes") < answers.index(b"7 bytes") < answers.index(b"hello")


async def test_an_old_client_is_answered_and_the_connection_closed() -> None:
    async with listening() as server:
        answer = await server.ask(b"GET / HTTP/1.0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b"hello")


async def test_an_answer_that_is_cancelled_as_it_begins_ends_its_connection_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with listening() as server:
        assert await server.ask(GET.replace(b"/ ", b"/cut-off ", 1)) == b""
        assert (await server.ask(GET.replace(b"1.1", b"1.0"))).endswith(b"hello")
    assert not caplog.records


async def test_connections_that_wait_are_all_taken_at_once() -> None:
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener, AsyncExitStack() as clients:
        for _ in range(ACCEPTED_AT_ONCE + 3):
            await clients.enter_async_context(await open_stream_to_socket_listener(listener))
        taken = []
        for count in (ACCEPTED_AT_ONCE, 3, 0):
            streams = list(waiting_connections(listener.socket))
            assert len(streams) == count
            taken += streams
        for stream in taken:
            await trio.aclose_forcefully(stream)


class StuckTurns:
    """Turns of which one client gets none."""

    def __init__(self, turns: ClientTurns, stuck: str) -> None:
        self._turns, self._stuck = turns, stuck

    async def take(self, client: str) -> None:
        if client == self._stuck:
            await trio.sleep_forever()
        await self._turns.take(client)


async def test_connections_that_have_had_no_turn_share_one_task_delay_no_other_client_and_end_with_the_listener(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_connections = 2 * ACCEPTED_AT_ONCE
    async with listening() as server, AsyncExitStack() as clients:
        monkeypatch.setattr(server.front, "_turns", StuckTurns(server.front._turns, "127.0.0.2"))
        await wait_all_tasks_blocked()
        before = trio.lowlevel.current_statistics().tasks_living
        waiting = [
            await clients.enter_async_context(
                await trio.open_tcp_stream("127.0.0.1", server.port, local_address="127.0.0.2")
            )
            for _ in range(num_connections)
        ]
        await eventually(lambda: server.front.num_connections == num_connections)
        await wait_all_tasks_blocked()
        assert trio.lowlevel.current_statistics().tasks_living == before + 1
        assert (await server.ask(GET.replace(b"1.1", b"1.0"))).endswith(b"hello")
        await server.front.stop(trio.current_time())
        for stream in waiting:
            assert await rest_of(stream) == b""
        assert server.front.num_connections == 0


async def test_a_silent_connection_has_few_objects_for_the_garbage_collector_to_visit() -> None:
    num_connections, most = 20, 70  # 38, and 124 with all of hypercorn's
    async with listening() as server, AsyncExitStack() as clients:
        await server.ask(GET.replace(b"1.1", b"1.0"))  # the first one makes what all share
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(num_connections):
            await clients.enter_async_context(await server.connect())
        await eventually(lambda: server.front.num_connections == num_connections)
        await wait_all_tasks_blocked()
        gc.collect()
        assert (len(gc.get_objects()) - before) / num_connections < most


@pytest.mark.parametrize("request_bytes", [GET.replace(b"1.1", b"1.0"), GET + GET.replace(b"1.1", b"1.0")])
async def test_an_ended_connection_is_freed_without_the_garbage_collector(request_bytes: bytes) -> None:
    def connections() -> list[object]:
        return [one for one in gc.get_objects() if isinstance(one, TCPServer | H11Protocol | HTTPStream)]

    async with listening() as server:
        gc.collect()
        gc.disable()
        try:
            await server.ask(request_bytes)
            await eventually(lambda: server.front.num_connections == 0)
            await wait_all_tasks_blocked()
            assert connections() == []
        finally:
            gc.enable()


class Steps(trio.abc.Instrument):
    """Number of task steps of a server, and of passes of the loop that had one."""

    def __init__(self) -> None:
        self.num = self.num_passes = 0
        self._is_new = True

    def after_io_wait(self, timeout: float) -> None:
        self._is_new = True

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task.name.startswith(("triolet.", "hypercorn.")) and not task.name.endswith("ClientTurns.run"):
            self.num += 1
            self.num_passes += self._is_new
            self._is_new = False


async def test_a_short_request_takes_few_steps_and_passes_of_the_event_loop() -> None:
    # In each pass all other connections may have their steps.
    steps, most, most_passes = Steps(), 20, 9  # 5 passes, if it has come when it is accepted
    async with listening() as server:
        trio.lowlevel.add_instrument(steps)
        try:
            assert (await server.ask(GET.replace(b"1.1", b"1.0"))).endswith(b"hello")
        finally:
            trio.lowlevel.remove_instrument(steps)
    assert 0 < steps.num <= most
    assert 0 < steps.num_passes <= most_passes


async def test_what_goes_wrong_in_a_connection_stays_there(caplog: pytest.LogCaptureFixture) -> None:
    async with listening() as server:
        assert await server.ask(UPGRADE + b"fail") == b""
        answer = await server.ask(b"GET /fail HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 500")
        assert b"secret" not in answer
        assert (await server.ask(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))).endswith(
            b"hello"
        )
    assert "a connection failed" in caplog.text


async def test_a_connection_waits_until_there_is_a_descriptor_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept, num_failed = trio.SocketListener.accept, 0

    async def short(self: trio.SocketListener) -> trio.SocketStream:
        nonlocal num_failed
        if num_failed < 3:
            num_failed += 1
            await trio.lowlevel.checkpoint()
            raise OSError(errno.EMFILE, "Too many open files")
        return await accept(self)

    monkeypatch.setattr(trio.SocketListener, "accept", short)
    async with listening() as server:
        assert (await server.ask(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))).endswith(
            b"hello"
        )
    assert num_failed == 3
    assert "EMFILE" in caplog.text


async def test_connections_beyond_the_limit_are_turned_away_with_a_word() -> None:
    async with listening(max_connections=5, max_connections_per_address=2) as server:
        async with await server.connect() as one, await server.connect() as two:
            for stream in (one, two):
                await stream.send_all(GET)
                await read(stream, b"hello")
            answer = await server.ask(GET)
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"too_many_connections" in answer
            assert b"retry-after: 1" in answer
        await eventually(lambda: not server.front.num_connections)
        assert (await server.ask(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))).endswith(
            b"hello"
        )


async def test_a_client_that_does_not_read_is_given_up_after_the_write_timeout(mock_clock: MockClock) -> None:
    async with listening(write_timeout=8.0) as server, await server.connect() as stream:
        await stream.send_all(b"GET /flood HTTP/1.1\r\nHost: a\r\n\r\n")
        await eventually(lambda: server.front.num_connections == 1)
        await wait_all_tasks_blocked(0.1)
        mock_clock.jump(7.0)
        await wait_all_tasks_blocked(0.1)
        assert server.front.num_connections == 1
        await pass_time(mock_clock, until=lambda: not server.front.num_connections)


async def test_the_end_waits_for_no_client_that_does_not_read(mock_clock: MockClock) -> None:
    async with listening(write_timeout=60.0) as server:
        stalled, idle, busy = [await server.connect() for _ in range(3)]
        await stalled.send_all(b"GET /flood HTTP/1.1\r\nHost: a\r\n\r\n")
        await idle.send_all(GET)
        await read(idle, b"hello")
        await busy.send_all(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n")
        await wait_all_tasks_blocked(0.1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.front.stop, trio.current_time() + 0.5)
            # The clock stands still: it is not the deadline that ends the connection of the idle one.
            assert await rest_of(idle) == b""
            mock_clock.jump(0.4)
            await wait_all_tasks_blocked(0.1)
            assert server.cancelled == []
            mock_clock.jump(0.1)
        await eventually(lambda: server.cancelled == ["/wait"])
        with pytest.raises(OSError, match=r".+"):
            await server.connect()
        for stream in (stalled, idle, busy):
            await trio.aclose_forcefully(stream)


async def test_a_listener_that_drains_takes_new_connections_for_one_request_until_it_is_stopped() -> None:
    async with listening() as server:
        idle, busy = await server.connect(), await server.connect()
        await idle.send_all(GET)
        await read(idle, b"hello")
        await busy.send_all(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n")
        await eventually(lambda: server.front.num_connections == 2)
        await wait_all_tasks_blocked(0.05)
        await server.front.drain()
        assert await rest_of(idle) == b""
        for _ in range(2):
            assert (await server.ask(GET)).endswith(b"hello")  # and is closed
        assert await server.ask(UPGRADE) == b"WS " + UPGRADE
        late = await server.connect()  # sends nothing: the end does not wait for it
        await busy.aclose()
        with trio.fail_after(60):
            await server.front.stop(trio.current_time() + 600)
        assert await rest_of(late) == b""
        with pytest.raises(OSError, match=r".+"):
            await server.connect()
        await late.aclose()
        await idle.aclose()


async def test_a_connection_that_is_opened_in_a_drain_and_stands_idle_is_closed(
    mock_clock: MockClock,
) -> None:
    async with listening(handshake_timeout=2.0) as server:
        await server.front.drain()
        await stand_idle(server, mock_clock, 2.0)


def samples(metrics: GatewayMetrics, name: str) -> dict[str, float]:
    """The values of a metric that are not 0, by labels."""
    found = re.findall(rf"^triolet:{name}(?:{{(.*)}})? (\S+)$", metrics.render().decode(), re.MULTILINE)
    return {labels: float(value) for labels, value in found if float(value)}


async def test_every_end_of_an_http_connection_is_counted_by_its_reason(mock_clock: MockClock) -> None:
    name = "http_connection_closes_total"
    async with listening(write_timeout=2.0, handshake_timeout=3.0) as server:
        stream = await server.connect()
        await stream.send_all(GET)
        await read(stream, b"hello")
        assert samples(server.metrics, "open_http_connections") == {"": 1}
        await stream.aclose()
        await eventually(lambda: samples(server.metrics, name) == {'reason="client"': 1})

        await server.ask(GET.replace(b"Host: a", b"Host: a\r\nConnection: close"))
        await server.ask(b"no http\r\n\r\n")
        await eventually(lambda: samples(server.metrics, name).get('reason="server"') == 2)
        assert samples(server.metrics, "http_responses_total") == {'route="unmatched",status="400"': 1}

        await stand_idle(server, mock_clock, 3.0)
        await eventually(lambda: samples(server.metrics, name).get('reason="idle"') == 1)

        async with await server.connect() as stream:
            await stream.send_all(GET.replace(b"/", b"/flood", 1))
            await eventually(lambda: server.front.num_connections == 1)
            await wait_all_tasks_blocked(0.1)
            name_of_end = 'reason="write_timeout"'
            await pass_time(mock_clock, until=lambda: samples(server.metrics, name).get(name_of_end) == 1)

        await server.ask(UPGRADE)
        await eventually(lambda: samples(server.metrics, name).get('reason="upgrade"') == 1)

        async with await server.connect() as stream:
            await stream.send_all(GET)
            await read(stream, b"hello")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.front.stop, trio.current_time() + 10)
                assert await rest_of(stream) == b""
                await stream.aclose()
        # The counts of the others have not changed: each connection has one end.
        assert samples(server.metrics, name) == {
            'reason="client"': 1,
            'reason="server"': 2,
            'reason="idle"': 1,
            'reason="write_timeout"': 1,
            'reason="upgrade"': 1,
            'reason="shutdown"': 1,
        }
        assert samples(server.metrics, "open_http_connections") == {}


async def test_a_connection_beyond_the_limit_is_counted_as_a_refusal() -> None:
    async with listening(max_connections=1) as server, await server.connect() as stream:
        await stream.send_all(GET)
        await read(stream, b"hello")
        await server.ask(GET)
        assert samples(server.metrics, "gateway_rejections_total") == {'reason="too_many_connections"': 1}
        assert samples(server.metrics, "http_responses_total") == {'route="unmatched",status="503"': 1}


@pytest.mark.slow
async def test_a_thousand_connections_in_rounds_leave_nothing_behind() -> None:
    async with listening() as server:
        tasks_before = trio.lowlevel.current_statistics().tasks_living

        async def come_and_go(number: int) -> None:
            stream = await server.connect()
            if number % 3:
                await stream.send_all(GET if number % 2 else GET[:20])
            await trio.aclose_forcefully(stream)

        for _ in range(10):
            async with trio.open_nursery() as nursery:
                for number in range(100):
                    nursery.start_soon(come_and_go, number)
        await eventually(lambda: trio.lowlevel.current_statistics().tasks_living <= tasks_before)
        assert not server.front.num_connections


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, chain = folder / "key.pem", folder / "chain.pem"
    try:
        subprocess.run(
            [
                *("openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost".split()),
                *("-addext subjectAltName=DNS:localhost -keyout".split()),
                *(str(key), "-out", str(chain)),
            ],
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        pytest.skip("there is no openssl to make a certificate with")
    return chain, key


async def test_with_a_certificate_both_languages_are_spoken_over_tls(
    certificate: tuple[Path, Path], mock_clock: MockClock
) -> None:
    chain, key = certificate
    trusting = ssl.create_default_context(cafile=str(chain))
    async with listening(certfile=str(chain), keyfile=str(key), handshake_timeout=2.0) as server:
        stream = trio.SSLStream(await server.connect(), trusting, server_hostname="localhost")
        await stream.send_all(GET)
        assert (await read(stream, b"hello")).startswith(b"HTTP/1.1 200")
        await stream.send_all(UPGRADE)
        assert (await read(stream, UPGRADE)).startswith(b"WS ")
        await trio.aclose_forcefully(stream)
        async with await server.connect() as plain:
            await plain.send_all(GET)
            assert b"200" not in await rest_of(plain)
        await stand_idle(server, mock_clock, 2.0)


@pytest.mark.parametrize(
    "fields",
    [{"host": "203.0.113.1"}, {"port": 70_000}, {"certfile": "nowhere.pem"}],
)
async def test_what_can_not_be_listened_on_is_a_mistake_of_the_configuration(fields: dict[str, Any]) -> None:
    with pytest.RaisesGroup(ConfigError, flatten_subgroups=True, allow_unwrapped=True):
        async with listening(**fields):
            raise AssertionError("it listens")


async def test_a_port_that_is_taken_is_named() -> None:
    async with listening() as server:
        with pytest.RaisesGroup(
            pytest.RaisesExc(ConfigError, match="port must be free"),
            flatten_subgroups=True,
            allow_unwrapped=True,
        ):
            async with listening(port=server.port):
                raise AssertionError("it listens")


async def test_a_unix_socket_is_served_in_place_of_a_port_and_one_that_was_left_behind_is_replaced(
    tmp_path: Path,
) -> None:
    path = tmp_path / "socket"
    config = GatewayConfig(uds=str(path))

    async def websocket(stream: ClientStream) -> None:
        await stream.aclose()

    for _ in range(2):
        front = Listener(config, an_app([]), websocket)
        async with trio.open_nursery() as nursery:
            assert await nursery.start(front.run) == f"unix:{path}"
            async with await trio.open_unix_socket(path) as stream:
                await stream.send_all(GET)
                assert (await read(stream, b"hello")).startswith(b"HTTP/1.1 200")
            with pytest.raises(ConfigError, match="uds must be free"):
                await bind(config)
            nursery.cancel_scope.cancel()
        assert path.is_socket()


def test_a_unix_socket_and_a_port_are_not_given_together() -> None:
    for fields in ({"port": 9000}, {"host": "0.0.0.0"}):
        with pytest.raises(ConfigError, match=r"^uds must be given without host and port"):
            GatewayConfig.create(uds="socket", **fields)
