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

from tests.actors.executors.harness import open_files
from tests.actors.harness import assert_all_blocks_back
from tests.protocol.make import create
from tests.protocol.talk import endings
from tests.server.responses.test_service import LONG, chatting_engine, expected_text
from tests.server.responses.test_snapshot_file import GRACE_S, begin, read_on
from tests.server.responses.websocket_client import connected, text_of
from triolet.config.server import GatewayConfig
from triolet.core.request.params import SamplingParams
from triolet.errors import ConfigError
from triolet.ipc.snapshot import SavedAnswer, SavedRequest, Snapshot
from triolet.protocol.responses.snapshot import SavedResponse
from triolet.server.responses import journal_file
from triolet.server.responses.journal import MAGIC, begin_record, replay
from triolet.server.responses.journal_file import ResponseJournal, open_journal
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
        journal.release()


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


@pytest.mark.parametrize("way", ["response.cancel", "response.steer"])
async def test_a_response_that_its_reader_has_ended_is_not_continued_by_the_next_server(
    way: str, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    path = tmp_path / "journal"
    async with killed_server(path) as (gateway, journal), connected(gateway) as client:
        response_id = await begin(client)
        place = {"response_id": response_id} if way == "response.cancel" else {"input": "No"}
        await client.send({"type": way, **place, "previous_response_id": response_id})
        assert endings(await client.until_ended()) == [":response.incomplete"]
        await trio.testing.wait_all_tasks_blocked()
        await journal.wait_written(journal._latest_write())
    assert response_id not in {one.response_id for one in replay(path.read_bytes()).responses.values()}
    async with killed_server(path) as (gateway, _):
        [told] = await read_on(gateway, response_id, -1)
        assert (told["type"], told["error"]["code"]) == ("error", "response_not_found")


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


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), MemoryError()], ids=repr)
async def test_a_full_disk_or_a_shortage_of_memory_ends_the_journal_and_no_response(
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with killed_server(tmp_path / "journal") as (gateway, journal), connected(gateway) as client:
        await begin(client)
        before = list(client.events)

        def full(*arguments: object) -> int:
            raise error

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


async def test_a_journal_that_is_too_long_to_be_read_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    path, data = tmp_path / "journal", MAGIC + bytes(100)
    monkeypatch.setattr(journal_file, "MAX_JOURNAL_BYTES", 100)
    path.write_bytes(data)
    async with killed_server(path):
        assert path.read_bytes() == MAGIC
    assert (tmp_path / "journal.refused").read_bytes() == data


async def test_a_journal_of_another_model_is_renamed_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, autojump_clock: trio.testing.MockClock
) -> None:
    path = tmp_path / "journal"
    request = {name: value for name, value in create(resumable=True).items() if name not in ("type", "input")}
    saved = SavedResponse(response_id="resp_0", request=request, model="m", created_at=7)
    admitted = SavedRequest(
        request_id="resp_0", prompt_token_ids=(1,), params=SamplingParams(), answers=(SavedAnswer(seed=1),)
    )
    data = MAGIC + begin_record(0, saved, Snapshot(architecture="Other", vocab_size=50, requests=(admitted,)))
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        async with killed_server(path):
            assert path.read_bytes() == MAGIC
    [warning] = caplog.records
    assert "must be of the engine's model" in warning.getMessage()
    assert (tmp_path / "journal.refused").read_bytes() == data


async def test_a_response_with_a_chat_that_lacks_a_field_is_refused_at_the_start(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    path = tmp_path / "journal"
    request = {name: value for name, value in create(resumable=True).items() if name not in ("type", "input")}
    saved = SavedResponse(
        response_id="resp_0", request=request, model="m", created_at=7, chat=({"role": "user"},)
    )
    admitted = SavedRequest(
        request_id="resp_0", prompt_token_ids=(1,), params=SamplingParams(), answers=(SavedAnswer(seed=1),)
    )
    data = MAGIC + begin_record(0, saved, Snapshot(architecture="Fake", vocab_size=50, requests=(admitted,)))
    path.write_bytes(data)
    async with killed_server(path):
        assert path.read_bytes() == MAGIC
    assert (tmp_path / "journal.refused").read_bytes() == data


async def test_a_journal_that_is_closed_can_be_opened_by_the_next_server_of_the_same_process(
    tmp_path: Path,
) -> None:
    path, before = tmp_path / "journal", open_files()
    async with chatting_engine() as engine:
        for _ in range(2):
            async with open_gateway(engine, GatewayConfig()) as gateway, open_journal(path, gateway):
                used = open_files()
                with pytest.raises(ConfigError, match="that no other server uses"):
                    await open_journal(path, gateway).__aenter__()
                assert open_files() == used
            assert len(used - before) == 1
            assert open_files() == before


async def test_a_start_that_fails_leaves_no_journal_open_and_no_half_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = open_files()
    async with chatting_engine() as engine, open_gateway(engine, GatewayConfig()) as gateway:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match="a file that can be written"):
            await open_journal(tmp_path / "journal", gateway).__aenter__()
        monkeypatch.undo()
    assert open_files() == before
    assert os.listdir(tmp_path) == ["journal"]
