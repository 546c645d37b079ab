"""Address of a port that this program listens at, or connects to, in one text."""

from __future__ import annotations

import attrs


@attrs.frozen
class Address:
    """Host and port, as HOST:PORT or [HOST]:PORT."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return the address that a text names.

        Raises:
            ValueError: it names none.
        """
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ValueError(text)
        host.encode("idna")  # a UnicodeError, which is a ValueError, of what can be no host's name
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_address(text: str) -> bool:
    """Return True if a text names an address."""
    try:
        Address.parse(text)
    except ValueError:
        return False
    return True
