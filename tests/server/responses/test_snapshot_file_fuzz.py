"""A snapshot file that was changed between two servers: it is set aside as a whole, or its responses go on."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio
from trio.testing import MockClock

from tests.actors.harness import STEP_S, assert_all_blocks_back
from tests.damage import change_tree, other_bytes
from tests.scale import num_cases
from tests.server.responses.test_service import LONG
from tests.server.responses.test_snapshot_file import GRACE_S, begin, end, server
from tests.server.responses.websocket_client import connected

NUM_AT_ONCE = 20


async def whole_file(file: Path) -> bytes:
    """Return what a server writes that ends amid a response, and after another one."""
    path = trio.Path(file)
    async with server(file) as gateway:
        async with connected(gateway) as client:
            await begin(client, 1, max_output_tokens=3, metadata={"a": "b"})
            await client.until_ended()
        async with connected(gateway) as client:
            await begin(client, stop=["zz"])
            await end(gateway, file)
    data: bytes = await path.read_bytes()
    await path.unlink()
    return data


def in_text(value: Any) -> Any:
    """Values of which JSON has no form, in one that it has."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, dict):
        return {str(key): in_text(one) for key, one in value.items()}
    return [in_text(one) for one in value] if isinstance(value, list) else value


def mutated(whole: bytes, rng: random.Random) -> bytes:
    """Return a file with other bytes, with fewer or more lines, or with other values in a line or in its request."""
    kind = rng.random()
    if kind < 0.2:
        return other_bytes(whole, rng)
    lines = whole.split(b"\n")[:-1]
    number = rng.randrange(len(lines))
    if kind < 0.3:
        lines[number : number + 1] = rng.choice(
            ([], [lines[number]] * 2, [lines[number][: rng.randrange(80)]])
        )
        return b"\n".join(lines) + b"\n" * rng.randrange(2)
    line = json.loads(lines[number])
    if line.get("engine") and rng.random() < 0.6:
        request = msgpack.unpackb(base64.b64decode(line["engine"]))
        change_tree(request, rng)
        packed = msgpack.packb(request, unicode_errors="surrogatepass")
        line["engine"] = base64.b64encode(packed).decode()
    else:
        change_tree(line, rng)
    lines[number] = json.dumps(in_text(line)).encode()
    return b"\n".join(lines) + b"\n"


async def outcome(file: Path, data: bytes) -> str:
    path, refused = trio.Path(file), trio.Path(f"{file}.refused")
    await path.write_bytes(data)
    async with server(file) as gateway:
        was_refused = await refused.exists()
        await trio.sleep(2 * LONG * STEP_S)
        for resumable in tuple(gateway.resumable._responses.values()):
            async with connected(gateway) as client:
                await client.send({"type": "response.resume", "response_id": resumable.answer.response_id})
                await client.until_ended()
        await trio.sleep(2 * GRACE_S)
        assert gateway.engine.statistics().num_restarts == 0
        assert_all_blocks_back(gateway.engine)
    await refused.unlink(missing_ok=True)
    assert not await path.exists()
    return "refused" if was_refused else "restored"


@pytest.mark.parametrize(
    "start",
    [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(NUM_AT_ONCE, num_cases(1000), NUM_AT_ONCE))],
)
async def test_a_changed_file_is_set_aside_or_its_responses_go_on(
    start: int, tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = tmp_path / "kept"
    whole = await whole_file(path)
    assert await outcome(path, whole) == "restored"
    seeds = range(start, start + NUM_AT_ONCE)
    outcomes = [await outcome(path, mutated(whole, random.Random(seed))) for seed in seeds]
    assert "refused" in outcomes  # and a file that was not changed is restored, see above
