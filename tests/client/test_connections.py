"""Connections of the client: what the system is asked to do with them, and what they share."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import trio

from triolet.client.address import ServerAddress
from triolet.client.http import connect


async def test_a_connection_with_a_vanished_other_end_is_found_within_a_minute() -> None:
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        port = listener.socket.getsockname()[1]
        stream = await connect(ServerAddress.of(f"127.0.0.1:{port}"))
        assert isinstance(stream, trio.SocketStream)
        async with stream:
            assert stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            if hasattr(socket, "TCP_KEEPIDLE"):
                idle_s, interval_s, num_probes = (
                    stream.socket.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                )
                assert 10 <= idle_s <= idle_s + interval_s * num_probes <= 60


def test_connections_with_tls_share_the_certificates_of_the_system(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, other = ServerAddress.of("https://a"), ServerAddress.of("https://b")
    assert one.tls() is other.tls() is not None
    assert ServerAddress.of("http://a").tls() is None
    before = one.tls()
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "chosen.pem"))
    assert one.tls() is not before
