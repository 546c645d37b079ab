"""Send a million requests through the real actors, with a stand-in for the model, and look for leaks.

    python benchmarks/soak.py [--requests N] [--clients N] [--seconds S] [--output FILE]

Clients send one request after the other; most read to the end, some leave early, some are cancelled, some have a
deadline. After every tenth the load is stopped and counted: memory of the process, blocks, living objects by type.
Prints one JSON line per tenth, and one for all of them; exits with 1 if memory has grown by 50 MiB or more since the
first tenth, if a block is missing, or if the objects of a type have grown by more than a hundred. The cache has few
blocks, all of them in use long before the first tenth, so that its content is no growth.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import sys
import time
from collections import Counter
from typing import Any

import attrs
import trio
from common import machine
from stand_in import StandIn
from trio._core._run import GLOBAL_RUN_CONTEXT

from triolet import Engine, EngineConfig, SamplingParams
from triolet.engine.open_engine import run_engine

VOCAB_SIZE, NUM_BLOCKS = 1000, 2048
MAX_GROWTH_BYTES, MAX_MORE_OBJECTS = 50 * 2**20, 100
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@attrs.frozen
class Count:
    """Counts while no request runs.

    Args:
        num_requests: so far.
        memory_bytes: of the process, in memory.
        objects: living ones that the garbage collector knows, by type.
        num_resting_blocks: free or cached.
    """

    num_requests: int
    memory_bytes: int
    objects: Counter[str]
    num_resting_blocks: int


def count(engine: Engine, num_requests: int) -> Count:
    # Trio lets the deadlines of scopes that have ended lie until they are a thousand: no growth, and yet up to a
    # thousand objects more.
    GLOBAL_RUN_CONTEXT.runner.deadlines._prune()
    gc.collect()
    with open("/proc/self/statm") as statm:
        memory_bytes = int(statm.read().split()[1]) * PAGE_BYTES
    statistics = engine.statistics()
    return Count(
        num_requests,
        memory_bytes,
        Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects()),
        statistics.kv_blocks_free + statistics.kv_blocks_cached,
    )


async def ask(engine: Engine, draw: random.Random) -> None:
    prompt = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 24))]
    params = SamplingParams(max_tokens=draw.randint(1, 4), seed=draw.randrange(1000))
    manner = draw.random()
    deadline = trio.current_time() + 0.001 if manner < 0.02 else None
    with trio.move_on_after(0.002 if manner > 0.98 else 1e9):
        async with engine.generate(prompt, params, deadline=deadline) as stream:
            async for _ in stream:
                if 0.02 <= manner < 0.07:
                    break


async def run_client(engine: Engine, num_requests: int, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(num_requests):
        await ask(engine, draw)


async def soak(options: argparse.Namespace) -> list[Count]:
    config = EngineConfig(
        runner="thread", max_num_seqs=options.clients, max_num_batched_tokens=2048, max_queued_requests=64
    )
    counts: list[Count] = []
    per_client = options.requests // 10 // options.clients
    began_s = time.monotonic()
    async with run_engine(config, StandIn(0.0, VOCAB_SIZE, num_blocks=NUM_BLOCKS), lambda: None) as engine:
        for tenth in range(10):
            async with trio.open_nursery() as nursery:
                for number in range(options.clients):
                    nursery.start_soon(run_client, engine, per_client, tenth * options.clients + number)
            await trio.sleep(0.1)
            counts.append(count(engine, (tenth + 1) * per_client * options.clients))
            elapsed_s = time.monotonic() - began_s
            write(options, {"bench": "soak", **figures(counts[-1]), "elapsed_s": round(elapsed_s, 1)})
            if elapsed_s * (tenth + 2) / (tenth + 1) > options.seconds:
                break
        num_blocks = engine.statistics().kv_blocks_total
    options.missing_blocks = max(num_blocks - one.num_resting_blocks for one in counts)
    return counts


def figures(one: Count) -> dict[str, Any]:
    return {
        "requests": one.num_requests,
        "memory_mib": round(one.memory_bytes / 2**20, 1),
        "objects": one.objects.total(),
    }


def write(options: argparse.Namespace, line: dict[str, Any]) -> None:
    print(json.dumps(line), file=options.output, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="end early, after a tenth, rather than later"
    )
    parser.add_argument(
        "--output", type=argparse.FileType("a"), default=sys.stdout, help="where the lines go"
    )
    options = parser.parse_args()
    logging.disable()
    first, *_, last = counts = trio.run(soak, options)
    more = dict((last.objects - first.objects).most_common(5))
    growth_bytes = last.memory_bytes - first.memory_bytes
    is_flat = all(n <= MAX_MORE_OBJECTS for n in more.values())
    is_good = growth_bytes < MAX_GROWTH_BYTES and is_flat and options.missing_blocks == 0
    write(
        options,
        {
            "bench": "soak_all", "requests": last.num_requests, "measured_from": first.num_requests,
            "counts": len(counts), "growth_mib": round(growth_bytes / 2**20, 2),
            "growth_bytes_per_request": round(growth_bytes / max(1, last.num_requests - first.num_requests), 2),
            "missing_blocks": options.missing_blocks, "more_objects": more, "is_good": is_good, **machine(),
        },
    )  # fmt: skip
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
