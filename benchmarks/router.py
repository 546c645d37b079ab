"""Measure what a router costs: processor time of its process for each event that it passes on, beside its engines' own.

    python benchmarks/router.py [--engines N] [--streams N] [--tokens N] [--rounds N] [--output FILE]

The engines are programs of their own, whose model is a stand-in that takes `--step-ms` for a step and no processor, so
that gateway and router are what is measured. Each round reads the same streams twice, in turns: from the first engine
itself, and through the router. Prints one JSON line per round: events and seconds of both ways, processor time of the
router and of the engines in microseconds per event, and the streams of 50 tokens a second that one core of the router
could carry.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trio
from common import machine
from stand_in import StandIn

from triolet import EngineConfig
from triolet.client.address import ServerAddress
from triolet.client.websocket import open_responses_socket
from triolet.config.server import GatewayConfig
from triolet.engine.gc_freeze import freeze_gc
from triolet.engine.open_engine import run_engine
from triolet.model.tokenizer.tokenizer import load_tokenizer
from triolet.nano import PATH
from triolet.server.routes.serve import serve

MODEL = "triolet-nano"
TOKENS_PER_S = 50  # of a stream that a person reads
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


async def be_an_engine(step_s: float, streams: int) -> None:
    """Serve a stand-in until killed; print the address."""
    tokenizer = load_tokenizer(Path(PATH))
    assert tokenizer is not None
    config = EngineConfig(max_num_seqs=streams)
    async with run_engine(
        config, StandIn(step_s, tokenizer.backend.get_vocab_size()), lambda: tokenizer
    ) as engine:
        freeze_gc()
        async with trio.open_nursery() as nursery:
            print(await nursery.start(serve, engine, GatewayConfig(port=0)), flush=True)


@contextlib.contextmanager
def program(*arguments: str) -> Iterator[tuple[int, str]]:
    """Start a program of Python; yield its process id and the first line that it prints."""
    with subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process.pid, process.stdout.readline().strip()
        finally:
            process.kill()


def cpu_s(process_id: int) -> float:
    """Return the processor time that a process has taken, seconds."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


async def read_all(url: str, streams: int, tokens: int) -> int:
    """Read streams at the same time; return the number of events."""
    num_events = 0

    async def read(index: int) -> None:
        nonlocal num_events
        async with open_responses_socket(ServerAddress.of(url)) as socket:
            payload = {
                "model": MODEL,
                "input": f"Story {index}",
                "max_output_tokens": tokens,
                "ignore_eos": True,
            }
            await socket.send(json.dumps({"type": "response.create", **payload}))
            kind = ""
            while kind not in ("response.completed", "response.incomplete"):
                kind = json.loads(await socket.receive())["type"]
                assert kind not in ("error", "response.failed"), kind
                num_events += 1

    async with trio.open_nursery() as nursery:
        for index in range(streams):
            nursery.start_soon(read, index)
    return num_events


async def measure_round(
    options: argparse.Namespace, engines: list[tuple[int, str]], router: tuple[int, str]
) -> Any:
    """Read the streams both ways."""
    line: dict[str, Any] = {
        "bench": "router",
        "engines": len(engines),
        "streams": options.streams,
        "tokens": options.tokens,
        "step_ms": options.step_ms,
    }
    for way, url in (("direct", engines[0][1]), ("routed", router[1])):
        began_s, router_s = time.monotonic(), cpu_s(router[0])
        engines_s = sum(cpu_s(process_id) for process_id, _ in engines)
        num_events = await read_all(url, options.streams, options.tokens)
        engines_s = sum(cpu_s(process_id) for process_id, _ in engines) - engines_s
        line[f"{way}_events"], line[f"{way}_s"] = num_events, round(time.monotonic() - began_s, 3)
        line[f"{way}_engine_us_per_event"] = round(engines_s / num_events * 1e6, 1)
    us = (cpu_s(router[0]) - router_s) / num_events * 1e6
    return {
        **line,
        "router_us_per_event": round(us, 1),
        "streams_per_core": round(1e6 / (us * TOKENS_PER_S)) if us else None,
        **machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200, help="of every answer")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--output", type=argparse.FileType("a"), default=sys.stdout, help="where the lines go"
    )
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        trio.run(be_an_engine, options.step_ms / 1000, options.streams)
        return
    with contextlib.ExitStack() as stack:
        flags = ("--engine", "--step-ms", str(options.step_ms), "--streams", str(options.streams))
        engines = [stack.enter_context(program(__file__, *flags)) for _ in range(options.engines)]
        urls = [url for _, url in engines]
        router = stack.enter_context(program("-m", "triolet", "route", "--port", "0", *urls))
        for _ in range(options.rounds):
            line = trio.run(measure_round, options, engines, router)
            print(json.dumps(line), file=options.output, flush=True)


if __name__ == "__main__":
    main()
