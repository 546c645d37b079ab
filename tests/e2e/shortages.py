"""Program of test_shortages: an engine whose process loses its last free descriptors and gets them back, many times.

`python -m tests.e2e.shortages FOLDER ROUNDS STREAMS`; prints one line per round, and ends with 0 if every rule held.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import trio

import triolet
from triolet import Engine, SamplingParams
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.errors import ResourceShortage

NUM_DESCRIPTORS = 320
MAX_GRAMMARS = 128  # more than rounds: a process that makes room for another one would give descriptors back
NUM_TOKENS = 20


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Take every descriptor that this process may still open."""
    taken: list[int] = []
    try:
        while True:
            try:
                taken.append(os.dup(0))
            except OSError:
                break
        yield
    finally:
        for fd in taken:
            os.close(fd)


async def free_answer(engine: Engine, seed: int, texts: list[str]) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, seed=seed)
    texts.append((await engine.complete([1, 2, 3], params)).text)


async def bound_answer(engine: Engine, word: str) -> str:
    params = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=1.0, structured_outputs=StructuredOutputsParams(choice=[word])
    )
    return (await engine.complete([1, 2, 3], params)).text


async def fails(engine: Engine, word: str, shortages: list[ResourceShortage]) -> None:
    try:
        await bound_answer(engine, word)
    except ResourceShortage as error:
        shortages.append(error)


async def main(folder: str, num_rounds: int, num_streams: int) -> None:
    async with triolet.open_engine(
        model=folder, dtype="float32", num_kv_blocks=512, runner="thread", max_grammars=MAX_GRAMMARS
    ) as engine:
        resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_DESCRIPTORS, NUM_DESCRIPTORS))
        for number in range(num_rounds):
            texts: list[str] = []
            shortages: list[ResourceShortage] = []
            with no_descriptors():
                async with trio.open_nursery() as nursery:
                    for seed in range(num_streams):
                        nursery.start_soon(free_answer, engine, seed, texts)
                    for name in ("a", "b"):
                        nursery.start_soon(fails, engine, f"{name}{number}", shortages)
            # Only the requests that needed a descriptor failed, and with the error that names it.
            assert len(texts) == num_streams, texts
            assert ["RLIMIT_NOFILE" in error.resource for error in shortages] == [True, True], shortages
            assert await bound_answer(engine, f"c{number}") == f"c{number}"
            engine.check_health()
            print(f"round {number}", flush=True)
        assert engine.statistics().num_restarts == 0
        assert engine.statistics().kv_blocks_in_use == 0


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
