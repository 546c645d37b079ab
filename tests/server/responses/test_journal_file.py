"""Two servers, one after the other, of which the first ends without notice."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from tests.actors.harness import assert_all_blocks_back
from tests.server.responses.test_service import LONG, chatting_engine, expected_text
from tests.server.responses.test_snapshot_file import GRACE_S, begin, read_on
from tests.server.responses.websocket_client import connected, text_of
from triolet.config.server import GatewayConfig
from triolet.errors import ConfigError
from triolet.server.responses import journal_file
from triolet.server.responses.journal import MAGIC, replay
from triolet.server.responses.journal_file import ResponseJournal
from triolet.server.responses.service import ResponsesService, open_gateway


async def inline(write: Callable[[], None]) -> None:
    """Write in the loop: virtual time would pass while a thread writes."""
    await trio.lowlevel.checkpoint()
    write()


@asynccontextmanager
async def killed_server(
    path: Path, **fields: Any
) -> AsyncGenerator[tuple[ResponsesService, ResponseJournal]]:
    """Serve with a journal; at the end nothing more is written, as after a kill."""
    config = GatewayConfig(journal=str(path), resume_grace=GRACE_S, **fields)
    async with chatting_engine() as engine, open_gateway(engine, config) as gateway:
        journal = ResponseJournal(path, gateway, inline)
        journal.restore()
        gateway.resumable.journal = journal
        async with trio.open_nursery() as nursery:
            nursery.start_soon(journal.run)
            yield gateway, journal
            nursery.cancel_scope.cancel()
        os.close(journal._file)


@pytest.mark.parametrize("min_bytes", [0, journal_file.MIN_COMPACTED_BYTES])
async def test_a_response_goes_on_after_two_kills_with_the_same_numbers_and_text(
    min_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setattr(journal_file, "MIN_COMPACTED_BYTES", min_bytes)
    path = tmp_path / "journal"
    async with killed_server(path) as (gateway, _), connected(gateway) as client:
        response_id = await begin(client)
        events = client.events
        assert path.stat().st_mode & 0o777 == 0o600
    async with killed_server(path) as (gateway, _), connected(gateway) as client:
        place = {"response_id": response_id, "starting_after": events[-1]["sequence_number"]}
        await client.send({"type": "response.resume", **place})
        while len(client.events) < 5:
            await client.next_events()
        events = [*events, *client.events]
    async with killed_server(path) as (gateway, _):
        events += await read_on(gateway, response_id, events[-1]["sequence_number"])
        assert_all_blocks_back(gateway.engine)
        await trio.sleep(GRACE_S + 1)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert text_of(events) == expected_text("Hi", 6, LONG)
    assert replay(path.read_bytes()).responses == {}


async def test_a_client_that_knows_more_than_the_journal_is_refused(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    path = tmp_path / "journal"
    async with killed_server(path) as (gateway, _), connected(gateway) as client:
        response_id = await begin(client)
        last = client.events[-1]["sequence_number"]
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])  # as after a power failure
    async with killed_server(path) as (gateway, _):
        [told] = await read_on(gateway, response_id, last)
        assert (told["type"], told["error"]["code"]) == ("error", "response_not_found")


async def test_a_full_disk_ends_the_journal_and_no_response(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with killed_server(tmp_path / "journal") as (gateway, journal), connected(gateway) as client:
        await begin(client)
        before = list(client.events)

        def full(*arguments: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        with caplog.at_level(logging.WARNING):
            events = before + await client.until_ended()
        monkeypatch.undo()
        assert text_of(events) == expected_text("Hi", 6, LONG)
        assert [record.levelname for record in caplog.records] == ["WARNING"] and journal.num_errors == 1


@pytest.mark.parametrize("data", [b"something else", MAGIC + b"\0" * 40])
async def test_a_file_that_cannot_be_restored_is_renamed(
    data: bytes, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    path = tmp_path / "journal"
    path.write_bytes(data)
    async with killed_server(path):
        assert path.read_bytes() == MAGIC
    assert (tmp_path / "journal.refused").read_bytes() == data


async def test_two_servers_cannot_have_one_journal(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with killed_server(tmp_path / "journal") as (gateway, _):
        with pytest.raises(ConfigError, match="that no other server uses"):
            ResponseJournal(tmp_path / "journal", gateway).restore()
