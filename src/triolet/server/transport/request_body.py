"""Bodies of HTTP requests: read piece by piece, within their limits of length, time and memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final

import trio

from triolet.protocol.errors import WireError
from triolet.server.transport.client_stream import InputReservation

BODY_GAP_S: Final = 20.0  # from one piece of a body to the next
BODY_TIMEOUT_S: Final = 120.0  # for all of it: 4 MiB at a third of a megabit a second
PIECE_BYTES: Final = 2**16  # of a body that is read; a longer part of it is a piece as it is

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
"""Returns the next message of an ASGI request."""


class ClientDisconnected(Exception):
    """The client has disconnected: no response can be sent."""


async def read_body(
    receive: Receive,
    headers: Iterable[tuple[bytes, bytes]],
    max_bytes: int,
    reservation: InputReservation,
    *,
    more_bytes: int = 0,
) -> list[bytearray]:
    """Read the body of a request, in pieces: as one it would be moved while it grows, which takes 10 ms for 4 MiB.

    Args:
        receive: of the ASGI request, before its body has been read.
        headers: of the request, their names in small letters.
        max_bytes: length of the longest body.
        reservation: grows with the body.
        more_bytes: length of what a router may have added to it.
    Raises:
        WireError: it is too long, it takes too long to come, or there is no memory for it.
        ClientDisconnected: the client went before its end.
    """
    length = next((value for name, value in headers if name == b"content-length"), b"")
    # Refused before any of it is read.
    if length.isdigit() and (len(length) > 18 or int(length) > max_bytes + more_bytes):
        raise _too_long(max_bytes)
    pieces, num_bytes = [bytearray()], 0
    is_whole = False
    deadline_s = trio.current_time() + BODY_TIMEOUT_S
    while not is_whole:
        with trio.move_on_at(min(deadline_s, trio.current_time() + BODY_GAP_S)) as timeout:
            message = await receive()
        if timeout.cancelled_caught:
            raise WireError(
                f"The body must not stop coming for {BODY_GAP_S:g} s.",
                code="request_timeout",
                status=408,
            )
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        num_new = len(part)
        if len(pieces[-1]) + num_new > PIECE_BYTES:
            pieces.append(bytearray())
        pieces[-1] += part
        num_bytes += num_new
        is_whole = not message.get("more_body", False)
        if num_bytes > max_bytes + more_bytes:
            raise _too_long(max_bytes)
        reservation.grow_to(num_bytes)
    return pieces


def _too_long(max_bytes: int) -> WireError:
    return WireError(f"The body must be at most {max_bytes} bytes.", code="body_too_large", status=413)
