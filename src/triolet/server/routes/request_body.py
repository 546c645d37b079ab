"""Read request bodies as what they must be, and cancel work when the client disconnects."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import trio
from starlette.requests import Request
from starlette.types import Receive

from triolet.core.json_text import release
from triolet.core.recovery.supervision import typed_shortages
from triolet.errors import ResourceShortage
from triolet.observability.loop_monitor import run_in_thread
from triolet.protocol.json.parsing import parse_object, structured_object
from triolet.server.routes.app_context import client_of, context_of
from triolet.server.transport.input_limits import ROUTED_BYTES, is_routed, json_limits
from triolet.server.transport.parse_thread import LONG_INPUT_BYTES, parse_in_thread
from triolet.server.transport.request_body import ClientDisconnected, read_body

T = TypeVar("T")


async def read_json(request: Request, structure: Callable[[dict[str, Any]], T]) -> T:
    """Read a body that is one JSON object, and structure it.

    Args:
        request: its body is still to come.
        structure: makes of the object what is wanted; of a long one in another thread.
    Raises:
        WireError: it is no such thing, it is too long, or it takes too long to come.
        ClientDisconnected: the client went before its end.
    """
    state = request.scope["state"]
    if (payload := state.pop("payload", None)) is not None:
        # With several models it was read to find the model.
        if state["body_bytes"] < LONG_INPUT_BYTES:
            return structure(payload)
        owned, kept = [payload], state.setdefault("kept", [])
        del payload
        return await parse_in_thread(lambda: structured_object(owned, structure, kept), client_of(request))
    context = context_of(request)
    routed = is_routed(request.headers.raw)
    limits = json_limits(context.config, routed=routed)
    with context.input_budget.reservation(client_of(request)) as reservation:
        body = await read_body(
            request.receive,
            request.headers.raw,
            context.config.max_body_bytes,
            reservation,
            more_bytes=ROUTED_BYTES * routed,
        )
        state["body_bytes"] = sum(map(len, body))
        # A thread costs more than parsing a short body.
        if state["body_bytes"] < LONG_INPUT_BYTES:
            return structure(parse_object(body, limits))
        kept = state.setdefault("kept", [])
        return await parse_in_thread(
            lambda: structured_object([parse_object(body, limits)], structure, kept), client_of(request)
        )


async def free_kept(state: dict[str, Any]) -> None:
    """Free what a long request was made of, in a thread, once it is over: the event loop would stop meanwhile.

    Args:
        state: of the request's scope.
    """
    if kept := state.pop("kept", None):
        with trio.CancelScope(shield=True), suppress(ResourceShortage), typed_shortages("freeing a request"):
            await run_in_thread(partial(release, kept))


async def cancel_on_disconnect(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """Run `work`, and cancel it at once when the client disconnects: leaving it aborts the request.

    Args:
        receive: of the ASGI request, after its body has been read.
        work: what is cancelled.
    Raises:
        ClientDisconnected: the client went.
    """
    done: list[T] = []
    failed: list[Exception] = []
    is_disconnected = False

    async def listen() -> None:
        nonlocal is_disconnected
        # The body was read already, so nothing else comes that matters.
        while (await receive())["type"] != "http.disconnect":
            pass
        is_disconnected = True
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
    assert is_disconnected
    raise ClientDisconnected
