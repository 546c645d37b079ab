"""Limits on what clients send, as the configuration of a server or a router gives them."""

from __future__ import annotations

from triolet.config.server import GatewayConfig
from triolet.protocol.json.parsing import JsonLimits
from triolet.server.transport.client_stream import InputBudget
from triolet.server.transport.websocket import SocketLimits


def json_limits(config: GatewayConfig) -> JsonLimits:
    """Return the limits on the shape of bodies and messages."""
    return JsonLimits(
        max_values=config.max_json_values,
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
