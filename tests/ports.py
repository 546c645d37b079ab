"""Ports of this machine for programs that have to be told theirs."""

from __future__ import annotations

import random
import socket

# Below those that Linux and macOS give to whatever asks for any port: another test may get such a one at any moment.
PORTS = range(20_000, 32_000)


def free_port() -> int:
    """Return a port of 127.0.0.1 at which nothing listens."""
    draw = random.SystemRandom()  # runs side by side draw different ones
    while True:
        port = draw.choice(PORTS)
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
