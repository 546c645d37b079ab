from __future__ import annotations

from typing import Any

import pytest

from triolet.server.transport.client_stream import InputBudget
from triolet.server.transport.request_body import PIECE_BYTES, read_body


@pytest.mark.parametrize("size", [1, 1000, PIECE_BYTES, PIECE_BYTES + 1])
async def test_a_long_body_is_kept_in_pieces_and_none_is_moved_as_it_grows(size: int) -> None:
    whole = bytes(range(256)) * (PIECE_BYTES // 64)
    parts = [whole[start : start + size] for start in range(0, len(whole), size)]
    coming = iter(parts)

    async def receive() -> dict[str, Any]:
        part = next(coming, None)
        return {"type": "http.request", "body": part or b"", "more_body": part is not None}

    reservation = InputBudget(max_bytes=2**20, max_bytes_per_client=2**20).reservation("a")
    pieces = await read_body(receive, [], 2**20, reservation)
    assert b"".join(pieces) == whole
    assert max(map(len, pieces)) <= max(PIECE_BYTES, size)
    assert len(pieces) <= 2 * len(whole) // PIECE_BYTES + 1, "short parts share a piece"
