"""Limits on what clients send, as the configuration of a server or a router gives them.

A router adds fields to what it passes on: a seed, and the ids that an engine knows a response by. It says so in a
header, for which an engine allows a little more than to a client, so that both take the same requests under the same
limits. A client that sends the header gains nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from triolet.config.server import GatewayConfig
from triolet.protocol.json.parsing import JsonLimits
from triolet.server.transport.client_stream import InputBudget
from triolet.server.transport.websocket import SocketLimits

ROUTED_HEADER: Final = "x-triolet-routed"
# A seed of 62 bits and the id of a response, each with its name; an id may have 128 characters.
ROUTED_BYTES: Final = 256
ROUTED_VALUES: Final = 2 * 2  # their names count, too


def is_routed(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return True for the headers, in small letters, of a request that a router passes on."""
    return any(name == ROUTED_HEADER.encode() for name, _ in headers)


def json_limits(config: GatewayConfig, *, routed: bool = False) -> JsonLimits:
    """Return the limits on the shape of bodies and messages.

    Args:
        config: of the server or router.
        routed: True for those that a router passes on.
    """
    return JsonLimits(
        max_values=config.max_json_values + ROUTED_VALUES * routed,
        max_members=config.max_json_members,
        max_depth=config.max_json_depth,
    )


def input_budget(config: GatewayConfig) -> InputBudget:
    """Return the budget for bodies and messages that are being read."""
    return InputBudget(config.max_input_bytes, config.max_input_bytes_per_client)


def socket_limits(config: GatewayConfig) -> SocketLimits:
    """Return the limits on the frames of one WebSocket."""
    return SocketLimits(
        max_message_bytes=config.max_message_bytes,
        max_message_fragments=config.max_message_fragments,
        max_frames_per_second=config.max_frames_per_second,
        max_pings_per_second=config.max_pings_per_second,
        close_timeout=config.close_timeout,
    )
