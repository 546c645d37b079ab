"""Kill a server with -9, and measure how long its other processes live on.

    python benchmarks/orphans.py [--rounds 20] [--output FILE]

In each round `triolet serve` is started and killed: while it answers requests, one of them bound to a schema, so that
there are the model's process and those of grammars; or while the model's process loads. Prints one JSON line for each
of the two: the number of processes that were left, and the time from the kill until none of them ran. Exits with 1 if
one outlived the server by more than a second. For Linux.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from common import machine, percentiles, report
from process_tree import FORK_SERVER, RUNNER, is_running, name_of, processes_of

MODEL = "triolet-nano"
MAX_S = 1.0
TIMEOUT_S = 60.0
GRAMMARS = "triolet.workers.grammar"
FORM = {"type": "json_schema", "json_schema": {"name": "form", "schema": {"type": "object"}}}


@contextmanager
def started() -> Iterator[subprocess.Popen[str]]:
    """Start a server; it is killed at the end if it lives."""
    command = [sys.executable, "-m", "triolet", "serve", "--port", "0", "--runner", "process"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that will hold."""
    until_s = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > until_s:
            raise TimeoutError("the server was not ready in time")
        time.sleep(0.005)


def names(root: int) -> list[str]:
    """Return the names of a server's processes."""
    return [name_of(pid) for pid in processes_of(root)]


def ask(address: str, **fields: Any) -> None:
    """Ask for a long answer; the end of the server ends it."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Count to 1000."}], **fields}
    request = Request(f"{address}/v1/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with suppress(OSError), urlopen(request, timeout=TIMEOUT_S) as reply:
        reply.read()


def make_serve(server: subprocess.Popen[str]) -> None:
    """Let a server answer two requests."""
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    for fields in ({"ignore_eos": True}, {"response_format": FORM, "max_tokens": 1000}):
        threading.Thread(target=ask, args=(address,), kwargs=fields, daemon=True).start()
    wait_until(lambda: GRAMMARS in names(server.pid))


def make_load(server: subprocess.Popen[str]) -> None:
    """Wait for the process that imports and loads."""
    wait_until(lambda: not {FORK_SERVER, RUNNER}.isdisjoint(names(server.pid)))


def kill(make: Callable[[subprocess.Popen[str]], None], delay_s: float) -> tuple[int, float]:
    """Kill a server; return the number of processes that it left, and how long they lived, seconds."""
    with started() as server:
        make(server)
        time.sleep(delay_s)
        left = [pid for pid in processes_of(server.pid) if pid != server.pid]
        began_s = time.monotonic()
        server.send_signal(signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, left)))
        return len(left), time.monotonic() - began_s


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    draw, lines = random.Random(0), []
    for state, make in (("serving", make_serve), ("loading", make_load)):
        killed = [kill(make, draw.random()) for _ in range(options.rounds)]
        in_ms = [1000 * took_s for _, took_s in killed]
        line = {"bench": "orphans", "state": state, "rounds": options.rounds}
        line |= {"processes": max(number for number, _ in killed)}
        lines.append(line | {"gone_ms": percentiles(in_ms) | {"max": round(max(in_ms), 1)}} | machine())
    report(lines, ("state", "processes", "gone_ms"), options.output)
    return int(any(line["gone_ms"]["max"] > 1000 * MAX_S for line in lines))


if __name__ == "__main__":
    sys.exit(main())
