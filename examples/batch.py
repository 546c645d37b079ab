"""Answer a file of prompts, one a line, and print one JSON line each, in the order in which they finish.

However long the file is, at most `--workers` requests run: each worker takes the next prompt when it has finished the
last. A prompt that cannot be answered becomes a line with the error; the others continue.

python examples/batch.py [--model PATH_OR_HUB_ID] [--workers N] [FILE]
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import attrs
import trio

import triolet

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
WORDS = ("hot", "big", "old", "fast", "light", "happy", "open")
PROMPTS = [f"Which day comes after {day}?" for day in DAYS] + [
    f"What is the opposite of {word}?" for word in WORDS
]

Numbered = tuple[int, str]


async def read(prompts: Iterable[str], send: trio.MemorySendChannel[Numbered]) -> None:
    with send:
        for line, prompt in enumerate(prompts, start=1):
            await send.send((line, prompt))


async def work(
    engine: triolet.Engine, params: triolet.SamplingParams, todo: trio.MemoryReceiveChannel[Numbered]
) -> None:
    with todo:
        async for line, prompt in todo:
            try:
                output = await engine.complete([{"role": "user", "content": prompt}], params)
                result = {"answer": output.text, "finish_reason": output.finish_reason}
            except (triolet.errors.InvalidRequest, triolet.errors.RequestFailed) as error:
                result = {"error": str(error)}
            print(json.dumps({"line": line, "prompt": prompt, **result}), flush=True)


async def main(model: str | None, prompts: Iterable[str], num_workers: int) -> None:
    async with triolet.open_engine(model=model) as engine:
        params = attrs.evolve(engine.default_sampling_params(), temperature=0.0, max_tokens=100)
        send, todo = trio.open_memory_channel[Numbered](0)  # a prompt is read when a worker is free for it
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, prompts, send)
            with todo:
                for _ in range(num_workers):
                    nursery.start_soon(work, engine, params, todo.clone())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="by default, questions about days and words")
    parser.add_argument("--model", help="folder or hub id; by default triolet-nano")
    parser.add_argument("--workers", type=int, default=8)
    arguments = parser.parse_args()
    lines = arguments.file.read_text(encoding="utf-8").splitlines() if arguments.file else PROMPTS
    trio.run(main, arguments.model, lines, arguments.workers)
