"""Memory budget for bodies and messages that are being received and parsed, per client and in all.

Without it, many connections with one long body each take memory that no limit of a single body bounds. The first
16 KiB of every body are free, so that a client with short requests is never refused because of others.
"""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Final, Self

import attrs

from triolet.protocol.errors import WireError

FREE_BYTES: Final = 2**14


@attrs.define(eq=False)
class InputBudget:
    """Budget shared by all connections of a server.

    Args:
        max_bytes: of all clients together.
        max_bytes_per_client: of one API key, or, without keys, of one address.
    """

    max_bytes: int
    max_bytes_per_client: int
    num_bytes: int = attrs.field(default=0, init=False)
    _by_client: Counter[str] = attrs.field(factory=Counter, init=False)

    def reservation(self, client: str) -> InputReservation:
        """Return an empty reservation; leaving its scope gives everything back."""
        return InputReservation(self, client)

    def add(self, client: str, num_bytes: int) -> None:
        """Take `num_bytes` from the budget.

        Raises:
            WireError: 429 over the client's share, 503 over the whole.
        """
        if self._by_client[client] + num_bytes > self.max_bytes_per_client:
            raise WireError(
                f"The long requests of one client must have at most {self.max_bytes_per_client} bytes together.",
                code="rate_limit_exceeded",
                status=429,
                type="rate_limit_error",
                retry_after_s=1.0,
            )
        if self.num_bytes + num_bytes > self.max_bytes:
            raise WireError(
                "The server is reading as many long requests as it can.",
                code="service_unavailable",
                status=503,
                type="server_error",
                retry_after_s=1.0,
            )
        self.num_bytes += num_bytes
        self._by_client[client] += num_bytes

    def remove(self, client: str, num_bytes: int) -> None:
        """Give `num_bytes` back."""
        self.num_bytes -= num_bytes
        self._by_client[client] -= num_bytes
        if not self._by_client[client]:
            del self._by_client[client]


@attrs.define(eq=False)
class InputReservation:
    """Bytes of one body or message, taken from an `InputBudget`."""

    _budget: InputBudget
    _client: str
    _num_taken: int = attrs.field(default=0, init=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def grow_to(self, num_bytes: int) -> None:
        """Reserve the memory of a body that has this length so far.

        Raises:
            WireError: the budget is used up.
        """
        wanted = max(num_bytes - FREE_BYTES, 0)
        if wanted > self._num_taken:
            self._budget.add(self._client, wanted - self._num_taken)
            self._num_taken = wanted

    def clear(self) -> None:
        """Give everything back."""
        if self._num_taken:
            self._budget.remove(self._client, self._num_taken)
            self._num_taken = 0
