"""Measure tokens per step and per second with and without drafts, on the same requests, in one run.

    python benchmarks/speculation.py [--model llama-15m] [--workload loop] [--batch 1] [--drafts 4] [--rounds 3]
        [--counts] [--output results.jsonl]

Workloads: `loop` is greedy answers of a model of random weights, which soon repeat themselves: the best case of n-gram
look-ups. `free` is drawn at temperature 1, where nothing repeats: the cost of drafts that are never accepted. The two
engines take turns, round by round; the answers are compared, and must be the same. With `--counts` only that is told
which does not depend on the machine: tokens per step, and guesses accepted.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import attrs
import torch
import trio
from common import MODELS, machine, make_model, median, report

import triolet
from triolet import Engine, SamplingParams

NUM_IN, NUM_OUT = 64, 256
WORKLOADS: dict[str, dict[str, Any]] = {"loop": {"temperature": 0}, "free": {"temperature": 1.0, "seed": 1}}


@attrs.frozen
class Round:
    """Results of one run through the requests.

    Args:
        elapsed_s: seconds.
        num_steps: forward passes.
        token_ids: of the answers.
    """

    elapsed_s: float
    num_steps: int
    token_ids: list[tuple[int, ...]]


async def run(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> Round:
    """Run all requests at once."""
    token_ids: list[tuple[int, ...]] = [()] * len(prompts)
    num_steps, began_s = engine.statistics().steps, time.perf_counter()

    async def one(place: int) -> None:
        token_ids[place] = tuple((await engine.complete(prompts[place], params)).outputs[0].token_ids)

    async with trio.open_nursery() as nursery:
        for place in range(len(prompts)):
            nursery.start_soon(one, place)
    return Round(time.perf_counter() - began_s, engine.statistics().steps - num_steps, token_ids)


async def measure(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a line of results per engine."""
    dice = random.Random(0)
    vocab_size = MODELS[arguments.model]["vocab_size"]
    prompts = [[dice.randrange(vocab_size) for _ in range(NUM_IN)] for _ in range(arguments.batch)]
    params = SamplingParams(max_tokens=NUM_OUT, ignore_eos=True, **WORKLOADS[arguments.workload])
    fields = {"model": str(folder), "enable_prefix_caching": False, "max_num_seqs": arguments.batch}
    drafts = {"speculative": "ngram", "num_speculative_tokens": arguments.drafts}
    async with (
        triolet.open_engine(**fields) as plain,
        triolet.open_engine(**fields, **drafts) as guessing,
    ):
        engines = {"none": plain, "ngram": guessing}
        rounds: dict[str, list[Round]] = {name: [] for name in engines}
        for number in range(arguments.rounds + 1):
            for name, engine in engines.items():
                taken = await run(engine, prompts, params)
                if number > 0:  # the first warms up
                    rounds[name].append(taken)
        now = guessing.statistics()
    assert rounds["none"][0].token_ids == rounds["ngram"][0].token_ids, "drafts have changed an answer"
    accepted = now.spec_decode_num_accepted_tokens / max(1, now.spec_decode_num_draft_tokens)
    return [
        {"speculative": name, **summary(taken), "accepted": accepted if name == "ngram" else None}
        for name, taken in rounds.items()
    ]


def summary(rounds: list[Round]) -> dict[str, Any]:
    """Return medians over the rounds, with the spread."""
    num_tokens = sum(map(len, rounds[0].token_ids))
    seconds = [each.elapsed_s for each in rounds]
    return {
        "tokens_per_step": num_tokens / rounds[0].num_steps,
        "tokens_per_s": num_tokens / median(seconds),
        "tokens_per_s_min": num_tokens / max(seconds),
        "tokens_per_s_max": num_tokens / min(seconds),
        "rounds": len(rounds),
    }


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="llama-15m")
    parser.add_argument("--workload", choices=WORKLOADS, default="loop")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--batch", type=int, default=1, help="requests at once")
    parser.add_argument("--drafts", type=int, default=4, help="num_speculative_tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--counts", action="store_true", help="no times")
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        folder = make_model(arguments.model, Path(parent) / "model", dtype=getattr(torch, arguments.dtype))
        lines = trio.run(measure, folder, arguments)
    shown = {name: value for name, value in vars(arguments).items() if name not in ("counts", "output")}
    lines = [{"bench": "speculation", **shown, **line, **machine()} for line in lines]
    columns = ["speculative", "tokens_per_step", "accepted"]
    times = ["tokens_per_s", "tokens_per_s_min", "tokens_per_s_max"]
    if arguments.counts:
        lines = [{name: value for name, value in line.items() if name not in times} for line in lines]
    report(lines, columns if arguments.counts else columns + times, arguments.output)


if __name__ == "__main__":
    main()
