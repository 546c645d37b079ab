"""Run mixed load on a real server for half an hour and account for the memory of each of its processes.

    python benchmarks/soak_server.py [--minutes 30] [--clients 3] [--output FILE]

`triolet serve --runner process` with triolet-nano and a small KV cache. Clients send chats over HTTP, streamed and
whole, responses over one WebSocket each, answers bound to JSON schemas (a new one from time to time, so that grammars
come and go), and leave some of them in the middle. Every half minute the load pauses, and the memory of every process
is read from /proc/PID/smaps_rollup. One JSON line per process at the end:

    start_mb    private memory a tenth of the way, when caches and pools have their size: of pages that it has written.
                Pages of libraries that are only read count as shared, though the system takes them for private while
                no other program has them mapped
    end_mb      private memory at the end
    shared_mb   memory that it shares with others: libraries, and what a fork has of its parent
    imports_mb  private memory of the fork server, which has imported torch and the modules of a model and does nothing
                else; the process of the model is a fork of it and shares that
    weights_mb  size of the weights, in the process of the model; kv_mb likewise, the KV cache
    rest_mb     end_mb without these three
    slope_mb_per_minute  of the private memory, by least squares from a tenth of the way on
    series      of each round [minute, private memory in MB, requests so far], from the first one on

Exits with 1 if a slope is 0.2 MB per minute or more, a request failed, or a block is not free at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import trio
from common import machine, report
from process_tree import FORK_SERVER, RUNNER, name_of, processes_of
from trio_websocket import open_websocket_url

import triolet

MODEL = "triolet-nano"
KV_CACHE_MB = 64
MAX_SLOPE = 0.2  # MB per minute
ROUND_S = 30.0
WEIGHTS = Path(triolet.__file__).parent / "nano" / "model.safetensors"


@contextmanager
def server() -> Iterator[tuple[str, int]]:
    """Start a server, and yield its address and process id."""
    command = [sys.executable, "-m", "triolet", "serve", "--port", "0", "--runner", "process"]
    command += ["--kv-cache-bytes", str(KV_CACHE_MB * 2**20)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.terminate()
        process.wait(60)


# ------------------------------------------------------------------------------------------- memory


def memory_of(pid: int) -> tuple[float, float] | None:
    """Return the private and the shared memory of a process, MB; None if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return None
    kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    private = kilobytes["Private_Dirty"]
    return private / 1024, (kilobytes["Rss"] - private) / 1024


def slope(points: list[tuple[float, float, int]]) -> float:
    """Return the slope of a line through (minute, MB, requests), in MB per minute, by least squares."""
    mean_x, mean_y = (sum(point[axis] for point in points) / len(points) for axis in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y, _ in points) / spread if spread else 0.0


# --------------------------------------------------------------------------------------------- load


def get(url: str) -> str:
    """Return the body of a page."""
    with urlopen(url, timeout=10) as reply:
        body: bytes = reply.read()
    return body.decode()


def schema(random_: random.Random) -> dict[str, Any]:
    """Return one of some hundred JSON schemas."""
    names = random_.sample(["a", "b", "c", "d", "e", "f", "g"], 3)
    properties = {name: {"type": random_.choice(["integer", "boolean"])} for name in names}
    schema = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "soak", "schema": schema}}


def chat(address: str, random_: random.Random) -> str:
    """Send one chat over HTTP, and leave it in the middle one time in four. Return how it ended."""
    count = random_.randrange(2, 40)
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Count from {random_.randrange(1000)} to 2000."}],
        "max_tokens": count,
        "temperature": random_.choice([0, 1]),
        "stream": random_.random() < 0.5,
    }
    if random_.random() < 0.2:
        body |= {"response_format": schema(random_), "max_tokens": 60}
    request = Request(f"{address}/v1/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    try:
        with urlopen(request, timeout=60) as reply:
            if body["stream"] and random_.random() < 0.5:
                reply.readline()
                return "left"
            reply.read()
            return "done"
    except HTTPError as error:
        return f"status {error.code}"


async def respond(address: str, random_: random.Random) -> str:
    """Have some responses on one WebSocket; cancel some."""
    async with open_websocket_url(address.replace("http", "ws", 1) + "/v1/responses") as socket:
        has_cancelled = False
        for _ in range(random_.randrange(1, 6)):
            create = {"type": "response.create", "model": MODEL, "input": "Tell a story."}
            await socket.send_message(json.dumps(create | {"max_output_tokens": random_.randrange(1, 40)}))
            is_cancelled = random_.random() < 0.2
            while True:
                event = json.loads(await socket.get_message())
                if event["type"] == "error":
                    if has_cancelled and event["error"]["code"] == "response_not_found":
                        continue  # a cancellation that came when its response was complete
                    return f"error {event['error']['code']}"
                if event["type"] == "response.created" and is_cancelled:
                    has_cancelled = True
                    await socket.send_message(json.dumps({"type": "response.cancel"}))
                if event["type"] in ("response.completed", "response.incomplete", "response.cancelled"):
                    break
    return "done"


async def client(address: str, seed: int, until: float, endings: Counter[str]) -> None:
    """Send one request after the other."""
    random_ = random.Random(seed)
    while trio.current_time() < until:
        if random_.random() < 0.7:
            endings[f"chat {await trio.to_thread.run_sync(chat, address, random_)}"] += 1
        else:
            endings[f"websocket {await respond(address, random_)}"] += 1


async def soak(minutes: float, num_clients: int) -> tuple[list[dict[str, Any]], bool]:
    """Return a line per process, and whether all was well."""
    endings: Counter[str] = Counter()
    history: dict[int, list[tuple[float, float, int]]] = defaultdict(list)
    shared: dict[int, float] = {}
    with server() as (address, root):
        began = time.monotonic()
        rounds = 0
        while time.monotonic() - began < 60 * minutes:
            async with trio.open_nursery() as nursery:
                for number in range(num_clients):
                    seed = rounds * num_clients + number
                    nursery.start_soon(client, address, seed, trio.current_time() + ROUND_S, endings)
            rounds += 1
            await trio.sleep(2)  # blocks in quarantine and closed connections are gone then
            for pid in processes_of(root):
                if (memory := memory_of(pid)) is not None:
                    minute = (time.monotonic() - began) / 60
                    history[pid].append((minute, memory[0], sum(endings.values())))
                    shared[pid] = memory[1]
        alive = {pid: name_of(pid) for pid in processes_of(root)}
        metrics = await trio.to_thread.run_sync(get, f"{address}/metrics")
    in_use = [line for line in metrics.splitlines() if re.match(r'triolet:kv_blocks{.*state="in_use"', line)]
    common = {
        "bench": "soak_server",
        "minutes": minutes,
        "clients": num_clients,
        "requests": sum(endings.values()),
    }
    lines = []
    for pid, name in alive.items():
        points = [point for point in history[pid] if point[0] >= 0.1 * minutes]
        if len(points) < 3:
            continue  # a grammar that came just now
        has_model = name == RUNNER
        imports_mb = points[-1][1] if name == FORK_SERVER else 0.0
        weights_mb, kv_mb = (WEIGHTS.stat().st_size / 2**20, KV_CACHE_MB) if has_model else (0.0, 0)
        figures = {
            "process": name,
            "start_mb": round(points[0][1], 1),
            "end_mb": round(points[-1][1], 1),
            "shared_mb": round(shared[pid], 1),
            "imports_mb": round(imports_mb, 1),
            "weights_mb": round(weights_mb, 1),
            "kv_mb": kv_mb,
            "rest_mb": round(points[-1][1] - imports_mb - weights_mb - kv_mb, 1),
            "slope_mb_per_minute": round(slope(points), 3),
            "series": [(round(minute, 2), round(mb, 2), count) for minute, mb, count in history[pid]],
        }
        lines.append({**common, **figures, "endings": dict(endings), "in_use": in_use, **machine()})
    has_failed = any("status" in ending or "error" in ending for ending in endings)
    are_blocks_back = all(float(line.split()[-1]) == 0 for line in in_use)
    is_flat = all(line["slope_mb_per_minute"] < MAX_SLOPE for line in lines)
    return lines, is_flat and are_blocks_back and bool(in_use) and not has_failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    lines, is_well = trio.run(soak, arguments.minutes, arguments.clients)
    columns = (
        "process start_mb end_mb shared_mb imports_mb weights_mb kv_mb rest_mb slope_mb_per_minute requests"
    )
    report(lines, columns.split(), arguments.output)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
