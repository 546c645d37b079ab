"""Measure what the journal of resumable responses costs per token.

    python benchmarks/journal.py [--records N] [--turns N]

A record is made on the event loop for every output; a thread writes it. Prints one JSON line for each part, with the
best and the median turn: `record` is making and packing a record; `note` all that the event loop does for the journal
per token, measured in a server with 32 resumable streams whose model is a stand-in; `write` what a thread takes to
append a record to the file, one step of 32 streams at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import attrs
import trio
from stand_in import StandIn

from triolet import EngineConfig
from triolet.client.address import ServerAddress
from triolet.client.websocket import open_responses_socket
from triolet.config.server import GatewayConfig
from triolet.engine.open_engine import run_engine
from triolet.model.tokenizer.tokenizer import load_tokenizer
from triolet.nano import PATH
from triolet.protocol.responses.response import ResponseBuilder
from triolet.protocol.responses.response_items import ResponseDelta
from triolet.server import create_app
from triolet.server.responses.journal import JournalDelta, delta_record
from triolet.server.responses.journal_file import open_journal
from triolet.server.responses.resumable import JournalOfResponses
from triolet.server.responses.service import open_gateway
from triolet.server.transport.listener import Listener

STREAMS = 32


def records_us(num_records: int) -> float:
    """Return the time of one record, microseconds: the delta is made and packed."""
    piece = ResponseDelta(text=" token", num_tokens=1)
    began = time.perf_counter()
    for index in range(num_records):
        delta_record(3, JournalDelta(index=index, piece=piece, token_ids=(index % 32_000,)))
    return (time.perf_counter() - began) / num_records * 1e6


def written_us(num_records: int) -> float:
    """Return the time of appending one record, microseconds, when each write has those of one step."""
    piece = ResponseDelta(text=" token", num_tokens=1)
    step = delta_record(3, JournalDelta(index=100, piece=piece, token_ids=(17,))) * STREAMS
    with tempfile.TemporaryFile(buffering=0) as file:
        began = time.perf_counter()
        for _ in range(num_records // STREAMS):
            os.write(file.fileno(), step)
        return (time.perf_counter() - began) / (num_records // STREAMS * STREAMS) * 1e6


@attrs.define(eq=False)
class TimedJournal:
    """Journal whose notes are timed."""

    journal: JournalOfResponses
    took_s: float = 0.0
    num_noted: int = 0

    def note(self, answer: ResponseBuilder, owner: str | None) -> int:
        began_s = time.thread_time()  # the writer's thread takes turns with this one
        mark = self.journal.note(answer, owner)
        self.took_s += time.thread_time() - began_s
        self.num_noted += 1
        return mark

    def forget(self, response_id: str) -> None:
        self.journal.forget(response_id)

    async def wait_written(self, mark: int) -> None:
        await self.journal.wait_written(mark)


async def note_us(num_tokens: int) -> float:
    """Return the time of noting one token, microseconds: all calls of a server, by their number."""
    tokenizer = load_tokenizer(Path(PATH))
    assert tokenizer is not None
    executor = StandIn(0.001, tokenizer.backend.get_vocab_size())
    with tempfile.TemporaryDirectory() as folder:
        config = GatewayConfig(port=0, journal=f"{folder}/journal")
        async with (
            run_engine(EngineConfig(max_num_seqs=STREAMS), executor, lambda: tokenizer) as engine,
            open_gateway(engine, config) as gateway,
            open_journal(Path(folder, "journal"), gateway),
            trio.open_nursery() as nursery,
        ):
            assert gateway.resumable.journal is not None
            timed = gateway.resumable.journal = TimedJournal(gateway.resumable.journal)
            listener = Listener(config, create_app(engine, config, gateway=gateway), gateway.serve_websocket)
            url: str = await nursery.start(listener.run)
            await read_streams(url, num_tokens // STREAMS)
            nursery.cancel_scope.cancel()
    return timed.took_s / timed.num_noted * 1e6


async def read_streams(url: str, num_tokens: int) -> None:
    """Read resumable responses of this length."""

    async def read(index: int) -> None:
        async with open_responses_socket(ServerAddress.of(url)) as socket:
            wish = {"model": "triolet-nano", "input": f"Story {index}", "resumable": True, "ignore_eos": True}
            await socket.send(
                json.dumps({"type": "response.create", "max_output_tokens": num_tokens, **wish})
            )
            while json.loads(await socket.receive())["type"] not in (
                "response.completed",
                "response.incomplete",
            ):
                pass

    async with trio.open_nursery() as nursery:
        for index in range(STREAMS):
            nursery.start_soon(read, index)


def main() -> None:
    from common import machine, median

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--turns", type=int, default=25)
    options = parser.parse_args()
    for part, measure in (
        ("record", records_us),
        ("note", lambda number: trio.run(note_us, number)),
        ("write", written_us),
    ):
        took = [measure(options.records) for _ in range(options.turns)]
        figures = {"bench": "journal", "part": part, "records": options.records, "turns": options.turns}
        figures |= {"best_us": round(min(took), 3), "median_us": round(median(took), 3)}
        print(json.dumps(figures | machine()), flush=True)


if __name__ == "__main__":
    main()
