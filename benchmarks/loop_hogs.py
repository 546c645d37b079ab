"""Find the longest task steps of the event loop under many streams while a long prompt arrives.

    python benchmarks/loop_hogs.py [--streams N] [--tokens N] [--prompt-chars N] [--rounds N] [--output FILE]

The model is a stand-in that takes `--step-ms` for a step and no processor, so that the engine alone is measured:
scheduler, detokenizer, streams, and the real tokenizer of triolet-nano. Each round is run twice, in turns: without the
long prompt and with it. Prints one JSON line per run: the number of task steps; those over 10 ms by the wall clock, the
longest, and the name of its task (`over_10_ms`, `longest_ms`, `longest_task`); the same in processor time
(`over_10_ms_of_work`, `longest_work_ms`), which leaves out what a step waits for the core or for Python's lock; and the
gaps between the tokens of a stream. `slowness` says how many times 10 ms a fixed loop of Python takes on this machine,
and `long_steps` counts the steps of more work than that loop. Only the wall clock says how long other tasks waited.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from functools import partial
from pathlib import Path

import attrs
import trio
from common import machine, percentiles
from stand_in import StandIn
from task_steps import TaskSteps

from triolet import Engine, EngineConfig, RequestOutputKind, SamplingParams
from triolet.engine.gc_freeze import freeze_gc
from triolet.engine.open_engine import run_engine
from triolet.errors import InvalidRequest
from triolet.model.tokenizer.tokenizer import load_tokenizer
from triolet.nano import PATH
from triolet.observability.loop_monitor import LONG_STEP_S

# About 10 ms of work on a server's core of 2023 or later that has its own cache: what LONG_STEP_S allows, counted in
# work instead of time.
CALIBRATION_ROUNDS = 40_000

WORDS = "the a dog fox boat king went to sea and came back with 12 34 apples, pears; stories!".split()


@attrs.define(eq=False)
class Work(TaskSteps):
    """Processor time of all task steps."""

    steps_s: list[float] = attrs.field(factory=list)

    def observe_work(self, work_s: float, task: trio.lowlevel.Task) -> None:
        super().observe_work(work_s, task)
        self.steps_s.append(work_s)

    def num_longer(self, limit_s: float) -> int:
        return sum(step_s > limit_s for step_s in self.steps_s)


def slowness() -> float:
    """Return how many times LONG_STEP_S the calibration loop takes here; at least 1.

    The longest of a few rounds counts: a neighbour on the same core comes and goes, and doubles the time.
    """
    longest_s = LONG_STEP_S
    for _ in range(10):
        began_s = time.thread_time()
        kept = {}
        for number in range(CALIBRATION_ROUNDS):
            kept[number % 1000] = (number, str(number))
        longest_s = max(longest_s, time.thread_time() - began_s)
    return longest_s / LONG_STEP_S


async def read(engine: Engine, index: int, num_tokens: int, gaps_s: list[float]) -> None:
    params = SamplingParams(
        max_tokens=num_tokens, seed=index, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    async with engine.generate([index + 1] * (index % 40 + 1), params) as stream:
        last_s = None
        async for _ in stream:
            now_s = trio.current_time()
            if last_s is not None:
                gaps_s.append(now_s - last_s)
            last_s = now_s


def long_text(num_chars: int) -> str:
    draw = random.Random(0)
    return " ".join(draw.choice(WORDS) for _ in range(num_chars // 3))[:num_chars]


async def ask_at_length(engine: Engine, text: str) -> None:
    try:
        await engine.complete(text, SamplingParams(max_tokens=1))
    except InvalidRequest as error:
        print(error, file=sys.stderr)


async def measure(options: argparse.Namespace, *, is_long: bool) -> dict[str, object]:
    config = EngineConfig(
        runner="thread",
        max_num_seqs=options.streams + 1,
        max_queued_requests=options.streams,
        max_queued_tokens=10**6,
        max_num_batched_tokens=2048,
    )
    tokenizer = load_tokenizer(Path(PATH))
    assert tokenizer is not None
    text = long_text(options.prompt_chars)
    if options.settle:
        freeze_gc()
    slowness_before = slowness()
    executor = StandIn(options.step_ms / 1000, tokenizer.backend.get_vocab_size())
    gaps_s: list[float] = []
    async with run_engine(config, executor, lambda: tokenizer) as engine:
        work = Work()
        trio.lowlevel.add_instrument(work)
        async with trio.open_nursery() as nursery:
            for index in range(options.streams):
                nursery.start_soon(read, engine, index, options.tokens, gaps_s)
            await trio.sleep(0.2)
            if is_long:
                nursery.start_soon(ask_at_length, engine, text)
        watch = engine._loop_watch
        # Taken on both sides of the run, because the machine's speed changes meanwhile.
        times_slower = max(slowness_before, slowness())
        return {
            "long_prompt": is_long,
            "settled": options.settle,
            "task_steps": len(work.steps_s),
            "over_10_ms": watch.num_long,
            "longest_ms": round(watch.longest_s * 1000, 2),
            "over_10_ms_of_work": work.num_longer(LONG_STEP_S),
            "longest_work_ms": round(max(work.steps_s) * 1000, 2),
            "slowness": round(times_slower, 2),
            "long_steps": work.num_longer(LONG_STEP_S * times_slower),
            "longest_task": work.longest_work_task.rpartition(".")[2],
            "gap_ms": percentiles([gap_s * 1000 for gap_s in gaps_s]),
            "longest_gap_ms": round(max(gaps_s) * 1000, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=100, help="of every answer")
    parser.add_argument("--prompt-chars", type=int, default=1_000_000)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--settle", action="store_true", help="keep the garbage collector from what is there")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--output", type=argparse.FileType("a"), default=sys.stdout, help="where the lines go"
    )
    options = parser.parse_args()
    for _ in range(options.rounds):
        for is_long in (False, True):
            figures = trio.run(partial(measure, options, is_long=is_long))
            line = {"bench": "loop_hogs", "streams": options.streams, **figures, **machine()}
            print(json.dumps(line), file=options.output, flush=True)


if __name__ == "__main__":
    main()
