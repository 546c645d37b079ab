"""Address of a server: one URL, from which those of its HTTP routes and of its WebSocket follow."""

from __future__ import annotations

import os
import ssl
import time
from functools import lru_cache
from typing import Final, Self
from urllib.parse import SplitResult, urlsplit

import attrs

from triolet.errors import TrioletError

SECURE: Final = {"ws": False, "http": False, "wss": True, "https": True}
DEFAULT_PORTS: Final = {False: 80, True: 443}
# To read the system's certificates takes an event loop some 20 ms.
TLS_KEPT_S: Final = 300.0


class ServerError(TrioletError):
    """Server that cannot be used: it cannot be reached, or refuses this client."""


@attrs.frozen(kw_only=True)
class ServerAddress:
    """Host, port and base path of a server's API."""

    host: str
    port: int
    base_path: str  # before the name of a route, such as /v1
    secure: bool  # True for TLS
    api_key: str | None = attrs.field(default=None, repr=False)

    @classmethod
    def of(cls, url: str, api_key: str | None = None) -> Self:
        """Return the address that a URL means; `ws` and `http`, `wss` and `https` mean the same.

        Args:
            url: with or without its base path, which is /v1 by default; `HOST:PORT` alone is plain HTTP.
            api_key: sent with every request; None for none.
        Raises:
            ValueError: no such URL.
        """
        parts = urlsplit(url if "://" in url else f"http://{url}")
        rule = "a URL such as ws://127.0.0.1:8000"
        if parts.scheme not in SECURE or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(rule)
        try:
            port = parts.port
        except ValueError:  # above 65535, or no number
            raise ValueError(rule) from None
        if "://" not in url and port is None:  # a word, and as likely a forgotten option or a model
            raise ValueError(rule)
        secure = SECURE[parts.scheme]
        return cls(
            host=parts.hostname,
            port=port or DEFAULT_PORTS[secure],
            base_path=_base_path(parts),
            secure=secure,
            api_key=api_key,
        )

    @property
    def authority(self) -> str:
        """Host and port as a URL has them, the port only where it is not the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.secure] else f"{host}:{self.port}"

    @property
    def websocket_url(self) -> str:
        """URL of the Responses protocol."""
        return f"{'wss' if self.secure else 'ws'}://{self.authority}{self.base_path}/responses"

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of every request."""
        return [(b"Authorization", b"Bearer " + self.api_key.encode())] if self.api_key else []

    def tls(self) -> ssl.SSLContext | None:
        """Return the settings of TLS; None for a plain connection."""
        if not self.secure:
            return None
        variables = [os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR")]
        return _trusting(int(time.monotonic() / TLS_KEPT_S), *variables)

    def __str__(self) -> str:
        return f"{'https' if self.secure else 'http'}://{self.authority}{self.base_path}"


@lru_cache(maxsize=1)
def _trusting(period: int, *variables: str | None) -> ssl.SSLContext:
    """Return settings of TLS with the certificates that the system trusts.

    Args:
        period: number of the present `TLS_KEPT_S`.
        variables: those of the environment that say where the certificates are.
    """
    return ssl.create_default_context()


def _base_path(parts: SplitResult) -> str:
    return parts.path.rstrip("/").removesuffix("/responses") or "/v1"
