"""Measure what the journal of resumable responses costs per token.

    python benchmarks/journal.py [--records N] [--turns N]

A token is noted on the event loop; a thread makes one record of all tokens of a step, and writes it. Prints one JSON
line for each part, with the best and the median turn: `begin` is what a response costs once; `note` all that the event
loop does for the journal per token, measured in a server with 32 resumable streams whose model is a stand-in; `record`
packing the tokens of a step of 32 streams, which takes the interpreter from the event loop; `write` appending that
record to the file. A token costs the sum of the last three.
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
from common import machine, median
from stand_in import StandIn

from triolet import EngineConfig
from triolet.client.address import ServerAddress
from triolet.client.websocket import open_responses_socket
from triolet.config.server import GatewayConfig
from triolet.engine.open_engine import run_engine
from triolet.model.tokenizer.tokenizer import load_tokenizer
from triolet.nano import PATH
from triolet.server import create_app
from triolet.server.responses.journal import PlainDelta, encode
from triolet.server.responses.journal_file import open_journal
from triolet.server.responses.resumable import JournalOfResponses, ResumableResponse
from triolet.server.responses.service import open_gateway
from triolet.server.transport.listener import Listener

STREAMS = 32


def step_of(index: int) -> list[PlainDelta]:
    """Return what a step of all streams adds: a token each."""
    return [(number, index, " token", (index % 32_000,)) for number in range(STREAMS)]


def records_us(num_tokens: int) -> float:
    """Return the time of packing one token, microseconds."""
    steps = [step_of(index) for index in range(num_tokens // STREAMS)]
    began = time.perf_counter()
    for step in steps:
        encode(step)
    return (time.perf_counter() - began) / (len(steps) * STREAMS) * 1e6


def written_us(num_tokens: int) -> float:
    """Return the time of appending one token, microseconds, when each write has those of one step."""
    num_steps, record = num_tokens // STREAMS, encode(step_of(100))
    with tempfile.TemporaryFile(buffering=0) as file:
        began = time.perf_counter()
        for _ in range(num_steps):
            os.write(file.fileno(), record)
        return (time.perf_counter() - began) / (num_steps * STREAMS) * 1e6


@attrs.define(eq=False)
class TimedJournal:
    """Journal whose notes are timed: the first one of each response, which holds its request, apart from the others."""

    journal: JournalOfResponses
    took_s: float = 0.0
    num_noted: int = 0
    begun_s: dict[str, float] = attrs.field(factory=dict)  # by response

    def note(self, resumable: ResumableResponse) -> int:
        # The first reading after other work takes microseconds longer, since nothing of the clock is in the processor's
        # caches. That is no part of the journal. What a later reading takes is measured here, too, and taken off: in a
        # loop of its own it would be less.
        time.thread_time()
        before_s = time.thread_time()
        began_s = time.thread_time()  # the writer's thread takes turns with this one
        mark = self.journal.note(resumable)
        took_s = (time.thread_time() - began_s) - (began_s - before_s)
        if resumable.answer.response_id in self.begun_s:
            self.took_s += took_s
            self.num_noted += 1
        else:
            self.begun_s[resumable.answer.response_id] = took_s
        return mark

    def forget(self, response_id: str) -> None:
        self.journal.forget(response_id)

    async def wait_written(self, mark: int) -> None:
        await self.journal.wait_written(mark)


async def noted_us(num_tokens: int) -> tuple[float, float]:
    """Return the times of noting a response and a later output of it, microseconds."""
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
    return median(list(timed.begun_s.values())) * 1e6, timed.took_s / timed.num_noted * 1e6


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--turns", type=int, default=25)
    options = parser.parse_args()
    took: dict[str, list[float]] = {"begin": [], "note": [], "record": [], "write": []}
    for _ in range(options.turns):
        begin, note = trio.run(noted_us, options.records)
        took["begin"].append(begin)
        took["note"].append(note)
        took["record"].append(records_us(options.records))
        took["write"].append(written_us(options.records))
    for part, times in took.items():
        figures = {"bench": "journal", "part": part, "records": options.records, "turns": options.turns}
        figures |= {"best_us": round(min(times), 3), "median_us": round(median(times), 3)}
        print(json.dumps(figures | machine()), flush=True)


if __name__ == "__main__":
    main()
