"""Tokens per second of triolet and of transformers' `generate`, on the same model and the same requests, in one run.

    python benchmarks/throughput.py [--model llama-15m] [--workload batch] [--rounds 3] [--output results.jsonl]

Workloads: `single` is one request, 128 tokens in, 128 out. `batch` is 32 requests at once, 32 to 256 tokens in and 32
to 256 out. `prefix` is 32 requests that share their first 512 tokens, 32 tokens of their own, 32 out. All greedy.

The floor is what the machine needs at least, by torch's own speed at reading memory and multiplying matrices: every
weight read once a step and multiplied with every token's row; no attention, no sampling, no engine.

The two take turns, round by round, so that a machine that gets slower gets slower for both; a line gives the median
of the rounds, and the fastest and the slowest. transformers gets its requests as one left-padded batch, the fastest
way it has: it ends when the longest answer does, and only the tokens that were asked for count. Its time to first
token and between tokens are those of the batch. One JSON line per engine, then a table.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import transformers
import trio
from common import MODELS, Machine, machine, make_model, median, percentiles, report

import triolet
from triolet import Engine, RequestOutputKind, SamplingParams

SHARED = 512  # tokens that the prompts of `prefix` begin with


@attrs.frozen
class Job:
    """One request: the prompt's ids, and how many tokens are wanted."""

    prompt: list[int]
    num_tokens: int


@attrs.frozen
class Round:
    """What one run through a workload took.

    Args:
        elapsed_s: from the first request to the last token, seconds.
        ttft_s: per request, from the start to its first token.
        itl_s: gaps between a request's tokens.
    """

    elapsed_s: float
    ttft_s: list[float]
    itl_s: list[float]


def make_jobs(workload: str, vocab_size: int) -> list[Job]:
    """The workload's requests, the same in every run."""
    dice = random.Random(0)

    def ids(count: int) -> list[int]:
        return [dice.randrange(vocab_size) for _ in range(count)]

    match workload:
        case "single":
            return [Job(ids(128), 128)]
        case "batch":
            return [Job(ids(dice.randint(32, 256)), dice.randint(32, 256)) for _ in range(32)]
        case "prefix":
            shared = ids(SHARED)
            return [Job(shared + ids(32), 32) for _ in range(32)]
        case _:
            raise ValueError(f"workload must be single, batch or prefix; got {workload!r}")


async def run_triolet(engine: Engine, jobs: Sequence[Job]) -> Round:
    """All requests at once."""
    begin = time.perf_counter()
    ttft_s: list[float] = []
    itl_s: list[float] = []

    async def one(job: Job) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=job.num_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        last = None
        async with engine.generate(job.prompt, params) as stream:
            async for _ in stream:
                now = time.perf_counter()
                if last is None:
                    ttft_s.append(now - begin)
                else:
                    itl_s.append(now - last)
                last = now

    async with trio.open_nursery() as nursery:
        for job in jobs:
            nursery.start_soon(one, job)
    return Round(time.perf_counter() - begin, ttft_s, itl_s)


class _Clock(transformers.StoppingCriteria):
    """Notes when each of the batch's tokens was there; stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def run_transformers(model: Any, jobs: Sequence[Job]) -> Round:
    """All requests as one batch, padded on the left."""
    width = max(len(job.prompt) for job in jobs)
    ids = torch.zeros(len(jobs), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, job in enumerate(jobs):
        ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
        mask[row, width - len(job.prompt) :] = 1
    clock = _Clock()
    begin = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max(job.num_tokens for job in jobs),
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
        )
    end = time.perf_counter()
    gaps = [later - earlier for earlier, later in zip(clock.times, clock.times[1:], strict=False)]
    return Round(end - begin, [clock.times[0] - begin] * len(jobs), gaps)


def summary(jobs: Sequence[Job], rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians over the rounds, with the spread."""
    num_out = sum(job.num_tokens for job in jobs)
    num_all = num_out + sum(len(job.prompt) for job in jobs)
    seconds = [each.elapsed_s for each in rounds]
    itl_s = [gap for each in rounds for gap in each.itl_s] or [0.0]
    return {
        "output_tokens_per_s": num_out / median(seconds),
        "output_tokens_per_s_min": num_out / max(seconds),
        "output_tokens_per_s_max": num_out / min(seconds),
        "total_tokens_per_s": num_all / median(seconds),
        "ttft_s": percentiles([first for each in rounds for first in each.ttft_s]),
        "itl_s": percentiles(itl_s),
        "ttft_ms": 1e3 * percentiles([first for each in rounds for first in each.ttft_s])["p50"],
        "itl_ms": 1e3 * percentiles(itl_s)["p50"],
        "rounds": len(rounds),
    }


def floor_tokens_per_s(jobs: Sequence[Job], model: Any, *, shared: int) -> float:
    """Output tokens per second that no engine can exceed with these weights; `shared` tokens are read once for all."""
    num_parameters = model.num_parameters()
    num_bytes = num_parameters * model.dtype.itemsize
    prefill = sum(len(job.prompt) - shared for job in jobs) + shared
    num_out = sum(job.num_tokens for job in jobs)
    steps = max(job.num_tokens for job in jobs)
    best = Machine.measured(num_bytes, model.dtype)
    return num_out / best.floor_s(num_parameters, num_bytes, prefill, num_out - len(jobs), steps - 1)


async def measure(
    folder: Path, jobs: Sequence[Job], arguments: argparse.Namespace
) -> tuple[dict[str, list[Round]], float]:
    """Rounds by engine, taken in turns after one that does not count; and the floor, output tokens per second."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    shared = SHARED if arguments.workload == "prefix" else 0
    floor = floor_tokens_per_s(jobs, model, shared=shared)
    rounds: dict[str, list[Round]] = {"triolet": [], "transformers": []}
    # The same work in every round: without a prefix cache, unless sharing is what is measured.
    caching = arguments.workload == "prefix"
    async with triolet.open_engine(
        model=str(folder),
        enable_prefix_caching=caching,
        max_num_seqs=32,
        runner=arguments.runner,
        quantization=arguments.quantization,
    ) as engine:
        for number in range(arguments.rounds + 1):
            for name, run in _sides(engine, model, jobs):
                taken = await run()
                if number > 0:
                    rounds[name].append(taken)
    return rounds, max(
        floor, floor_tokens_per_s(jobs, model, shared=shared)
    )  # of the machine in its better moment


def _sides(engine: Engine, model: Any, jobs: Sequence[Job]) -> list[tuple[str, Callable[[], Any]]]:
    async def ours() -> Round:
        return await run_triolet(engine, jobs)

    async def theirs() -> Round:
        return await trio.to_thread.run_sync(run_transformers, model, jobs)

    return [("triolet", ours), ("transformers", theirs)]


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="llama-15m")
    parser.add_argument("--workload", choices=("single", "batch", "prefix"), default="batch")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--runner", default="thread", help="triolet's runner")
    parser.add_argument(
        "--quantization", choices=("none", "int8"), default="none", help="of triolet's weights"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(arguments.model, Path(scratch) / "model", dtype=getattr(torch, arguments.dtype))
        jobs = make_jobs(arguments.workload, MODELS[arguments.model]["vocab_size"])
        rounds, floor = trio.run(measure, folder, jobs, arguments)
    facts = {
        name: getattr(arguments, name) for name in ("model", "workload", "dtype", "runner", "quantization")
    }
    lines = [
        {"bench": "throughput", "engine": name, **facts, **summary(jobs, taken), "floor": floor, **machine()}
        for name, taken in rounds.items()
    ]
    columns = ("model", "workload", "dtype", "quantization", "engine", "output_tokens_per_s", "floor")
    report(lines, (*columns, "ttft_ms", "itl_ms"), arguments.output)


if __name__ == "__main__":
    main()
