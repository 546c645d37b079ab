"""What becomes of a connection whose request was answered, streamed or not."""

from __future__ import annotations

import json
from types import FrameType
from typing import Any

import pytest
import trio

from tests.actors.harness import STEP_S, assert_all_blocks_back
from tests.garbage import garbage_of, kinds_of
from tests.server.routes.harness import HELLO, serving
from tests.server.routes.memory import connected
from triolet.server.transport.hypercorn_adapter import KEEP_ALIVE_S

PATHS = ("/v1/chat/completions", "/v1/responses")


def request_of(path: str, stream: bool, connection: str) -> bytes:
    wish = {**HELLO, "input": "HELLO", "stream": stream}
    wish |= {"max_output_tokens": 3} if path == "/v1/responses" else {"max_tokens": 3}
    body = json.dumps(wish).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: {connection}\r\nContent-Length: {len(body)}"
    )
    return head.encode() + b"\r\n\r\n" + body


async def rest_of(client: Any) -> bytes:
    received = b""
    while data := await client.receive_some():
        received += data
    return received


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
async def test_it_is_closed_where_the_client_asked_for_that(
    path: str, stream: bool, autojump_clock: trio.testing.MockClock
) -> None:
    async with serving() as scene, connected(scene) as client:
        began_s = trio.current_time()
        await client.send_all(request_of(path, stream, "close"))
        answer = await rest_of(client)
        assert answer.startswith(b"HTTP/1.1 200")
        assert trio.current_time() - began_s < 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
async def test_it_is_kept_for_a_while_and_not_for_ever(
    path: str, stream: bool, autojump_clock: trio.testing.MockClock
) -> None:
    async with serving() as scene, connected(scene) as client:
        for _ in range(3):
            await client.send_all(request_of(path, stream, "keep-alive"))
        await trio.sleep(30 * STEP_S)
        began_s = trio.current_time()
        answers = await rest_of(client)
        assert answers.count(b"HTTP/1.1 200") == 3
        assert KEEP_ALIVE_S - 2 < trio.current_time() - began_s < KEEP_ALIVE_S + 2
        assert_all_blocks_back(scene.engine)


REFUSED = b'{"model":1,"messages":[{"role":2}],"tools":[{}]}'


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"no HTTP\r\n\r\n",
        b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
        % (len(REFUSED), REFUSED),
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 1\r\n\r\n{",
    ],
)
async def test_a_request_that_is_refused_leaves_nothing_for_the_garbage_collector(
    request_bytes: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    async def ask() -> None:
        async with connected(scene) as client:
            await client.send_all(request_bytes)
            assert (await rest_of(client)).startswith(b"HTTP/1.1 4")

    async with serving() as scene:
        assert [one for one in await garbage_of(ask) if type(one) is FrameType] == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("is_left", [True, False])
async def test_a_request_leaves_nothing_for_the_garbage_collector_also_if_its_client_leaves(
    path: str, stream: bool, is_left: bool, autojump_clock: trio.testing.MockClock
) -> None:
    async def ask() -> None:
        async with connected(scene) as client:
            await client.send_all(request_of(path, stream, "close"))
            if is_left:
                await trio.testing.wait_all_tasks_blocked()
                assert scene.engine.statistics().num_requests_live == 1
                await client.aclose()
            else:
                assert (await rest_of(client)).startswith(b"HTTP/1.1 200")
            await trio.sleep(10)
            assert scene.engine.statistics().num_requests_live == 0

    async with serving() as scene:
        garbage = await garbage_of(ask)
    # The streams of the test are Trio's, and in a cycle of their own.
    kinds = ("builtins.frame", "builtins.traceback", "triolet", "starlette", "hypercorn")
    assert kinds_of(garbage, *kinds) == set()
