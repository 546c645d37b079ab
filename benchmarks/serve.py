"""Measure the cost of the server over the engine: the same requests embedded, and over HTTP from another process.

    python benchmarks/serve.py [--model llama-15m] [--clients 1 8 32] [--tokens 128] [--rounds 3]

Each client sends `/v1/completions` with `stream` for 128 prompt tokens and reads the events to the end. The floor is
the engine in the measuring program itself, with the runner in a process, as in the server. Both take turns. One JSON
line per number of clients and side, then a table: tokens per second, time to first token and between tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs
import torch
import trio
from common import MODELS, machine, make_model, median, percentiles, report

import triolet
from triolet import Engine, RequestOutputKind, SamplingParams

PROMPT_TOKENS = 128


@attrs.define
class Times:
    """Times of one answer's tokens, seconds."""

    asked: float
    tokens: list[float] = attrs.field(factory=list)

    def note(self) -> None:
        """Note the time of a token."""
        self.tokens.append(time.perf_counter())


One = Callable[[list[int], Times], Awaitable[None]]


@contextmanager
def serving(folder: Path) -> Any:
    """Run a server on a free port in this scope; yield its address."""
    command = [sys.executable, "-m", "triolet", "serve", "--port", "0", "--model", str(folder)]
    command += ["--max-num-seqs", "32", "--no-enable-prefix-caching"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = next(
                word for line in process.stdout for word in line.split() if word.startswith("http")
            )
            yield urlsplit(address)
        finally:
            process.terminate()


async def over_http(address: Any, num_tokens: int, ids: list[int], times: Times) -> None:
    """Read one streamed completion line by line."""
    body = {"model": "model", "prompt": ids, "stream": True, "temperature": 0, "max_tokens": num_tokens}
    text = json.dumps({**body, "ignore_eos": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    head += f"Connection: close\r\nContent-Length: {len(text)}\r\n\r\n"
    stream = await trio.open_tcp_stream(address.hostname, address.port)
    async with stream:
        await stream.send_all((head + text).encode())
        seen = b""
        async for part in stream:
            seen = seen[-20:] + part
            for _ in range(part.count(b"data: {")):
                times.note()
            if b"data: [DONE]" in seen:
                break
    if not times.tokens:
        raise RuntimeError(f"the server answered {seen[:300]!r}")


async def embedded(engine: Engine, num_tokens: int, ids: list[int], times: Times) -> None:
    """Read one answer of the engine in this program."""
    params = SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    async with engine.generate(ids, params) as stream:
        async for _ in stream:
            times.note()


async def run_round(one: One, clients: int, vocab_size: int) -> tuple[float, list[Times]]:
    """Run all clients at once; return the seconds and the times of their tokens."""
    dice = random.Random(clients)
    prompts = [[dice.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(clients)]
    began = time.perf_counter()
    answers = [Times(began) for _ in prompts]
    async with trio.open_nursery() as nursery:
        for ids, times in zip(prompts, answers, strict=True):
            nursery.start_soon(one, ids, times)
    return time.perf_counter() - began, answers


async def measure(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a line per side and number of clients."""
    vocab_size, num_tokens = MODELS[arguments.model]["vocab_size"], arguments.tokens
    rounds: dict[tuple[int, str], list[tuple[float, list[Times]]]] = {}
    with serving(folder) as address:
        async with triolet.open_engine(
            model=str(folder), runner="process", max_num_seqs=32, enable_prefix_caching=False
        ) as engine:

            async def http(ids: list[int], times: Times) -> None:
                await over_http(address, num_tokens, ids, times)

            async def inside(ids: list[int], times: Times) -> None:
                await embedded(engine, num_tokens, ids, times)

            for number in range(arguments.rounds + 1):
                for clients in arguments.clients:
                    for side, one in (("embedded", inside), ("http", http)):
                        taken = await run_round(one, clients, vocab_size)
                        if number > 0:
                            rounds.setdefault((clients, side), []).append(taken)
    return [line(side, clients, taken, arguments) for (clients, side), taken in rounds.items()]


def line(
    side: str, clients: int, rounds: list[tuple[float, list[Times]]], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return the results of one side."""
    answers = [times for _, all_times in rounds for times in all_times]
    first_ms = [1e3 * (times.tokens[0] - times.asked) for times in answers]
    gaps_ms = [
        1e3 * (later - earlier)
        for times in answers
        for earlier, later in zip(times.tokens, times.tokens[1:], strict=False)
    ]
    return {
        "bench": "serve",
        "model": arguments.model,
        "dtype": arguments.dtype,
        "side": side,
        "clients": clients,
        "tokens_per_s": clients * arguments.tokens / median([seconds for seconds, _ in rounds]),
        "ttft_ms": percentiles(first_ms)["p50"],
        "itl_ms": percentiles(gaps_ms)["p50"],
        "itl_ms_p99": percentiles(gaps_ms)["p99"],
        "rounds": arguments.rounds,
        **machine(),
    }


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="llama-15m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        dtype = getattr(torch, arguments.dtype)
        folder = make_model(arguments.model, Path(scratch) / "model", dtype=dtype)
        lines = trio.run(measure, folder, arguments)
    columns = ("model", "side", "clients", "tokens_per_s", "ttft_ms", "itl_ms", "itl_ms_p99")
    report(lines, columns, arguments.output)


if __name__ == "__main__":
    main()
