"""What comes from a client: a body within its limits, and the news that the client has gone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio
from starlette.requests import Request
from starlette.types import Receive

from triolet.protocol.errors import WireError
from triolet.protocol.json import parse_object

MAX_BODY_BYTES = 64 * 2**20
LONG_BODY_BYTES = 2**16  # takes a millisecond to parse: the other clients do not wait for longer ones
BODY_PATIENCE_S = 20.0  # from one piece of a body to the next
BODY_TIMEOUT_S = 600.0  # for all of it: 64 MiB at a megabit a second

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client has gone; nobody is there to be told."""


async def read_json(request: Request, structure: Callable[[dict[str, Any]], T]) -> T:
    """The body, which is one JSON object, structured.

    Args:
        request: its body is still to come.
        structure: makes of the object what is wanted; of a long one in another thread.
    Raises:
        WireError: it is no such thing, it is too long, or it takes too long to come.
        Gone: the client went before its end.
    """
    body = await _read(request)
    if len(body) < LONG_BODY_BYTES:
        return structure(parse_object(body))
    return await trio.to_thread.run_sync(lambda: structure(parse_object(body)))


async def _read(request: Request) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > MAX_BODY_BYTES):
        raise _too_long()
    body = bytearray()
    is_whole = False
    deadline_s = trio.current_time() + BODY_TIMEOUT_S
    while not is_whole:
        with trio.move_on_at(min(deadline_s, trio.current_time() + BODY_PATIENCE_S)) as patience:
            message = await request.receive()
        if patience.cancelled_caught:
            raise WireError(
                f"The body must not stop coming for {BODY_PATIENCE_S:g} s.",
                code="request_timeout",
                status=408,
            )
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        body += message.get("body", b"")
        is_whole = not message.get("more_body", False)
        if len(body) > MAX_BODY_BYTES:
            raise _too_long()
    return bytes(body)


def _too_long() -> WireError:
    return WireError(f"The body must be at most {MAX_BODY_BYTES} bytes.", code="body_too_large", status=413)


async def cancel_on_disconnect(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """Do something for a client, and stop at once when the client goes: leaving `work` is the abort.

    Args:
        receive: of the ASGI request, whose body has been read.
        work: what is cancelled.
    Raises:
        Gone: the client went.
    """
    done: list[T] = []
    failed: list[Exception] = []
    is_gone = False

    async def listen() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        try:
            done.append(await work())
        except Exception as error:  # raised again below, without the nursery's group around it
            failed.append(error)
        nursery.cancel_scope.cancel()
    if done:
        return done[0]
    if failed:
        raise failed[0]
    assert is_gone
    raise ClientDisconnected
