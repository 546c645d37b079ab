"""Requests that engines are compared by, and the summary of a run through them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from common import Machine, median, percentiles

SHARED = 512  # tokens that the prompts of `prefix` begin with
MAX_TOKENS = 1024  # of the longest sequence there is room for, unless a workload has longer ones
# What every engine is given room for, all sequences together, unless a workload needs more.
NUM_KV_TOKENS = 16_384
PROMPTS = {"prompt-128": 128, "prompt-512": 512, "prompt-2048": 2048, "prompt-8192": 8192}
BATCHES = {"batch": 32, "batch-128": 128, "batch-256": 256}  # requests at once
WORKLOADS = ("single", *BATCHES, "short-batch", "prefix", *PROMPTS)


@attrs.frozen
class Job:
    """One request: the prompt's ids, the number of tokens, and its arrival, seconds from the beginning."""

    prompt: list[int]
    num_tokens: int
    due_s: float = 0.0


@attrs.frozen
class Round:
    """Results of one run through a workload.

    Args:
        elapsed_s: from the first request to the last token, seconds.
        ttft_s: per request, from its coming to its first token.
        itl_s: gaps between a request's tokens.
    """

    elapsed_s: float
    ttft_s: list[float]
    itl_s: list[float]


@attrs.frozen
class Room:
    """What an engine is given room for.

    Args:
        max_num_seqs: sequences at once.
        max_tokens: of the longest of them.
        num_kv_tokens: of all of them together.
    """

    max_num_seqs: int = 32
    max_tokens: int = MAX_TOKENS
    num_kv_tokens: int = NUM_KV_TOKENS

    @classmethod
    def needed_by(cls, workloads: Sequence[str]) -> Room:
        """Return the room for the most requests at once, and for the longest prompt."""
        num_streams = max(BATCHES.get(workload, 32) for workload in workloads)
        longest = max(MAX_TOKENS, *(PROMPTS.get(workload, 0) + 128 for workload in workloads))
        return cls(num_streams, longest, max(512 * num_streams, 2 * longest, NUM_KV_TOKENS))


def make_jobs(workload: str, vocab_size: int, number: int) -> list[Job]:
    """Return the workload's requests.

    Args:
        workload: one of WORKLOADS.
        vocab_size: ids are below it.
        number: of the round: lengths are the same in every round, tokens are not, so that no cache knows them.
    """
    lengths, dice = random.Random(0), random.Random(number)

    def ids(count: int) -> list[int]:
        return [dice.randrange(vocab_size) for _ in range(count)]

    match workload:
        case "single":
            return [Job(ids(128), 128)]
        case _ if workload in BATCHES:
            count = BATCHES[workload]
            return [Job(ids(lengths.randint(32, 256)), lengths.randint(32, 256)) for _ in range(count)]
        case "prefix":
            shared = ids(SHARED)
            return [Job(shared + ids(32), 32) for _ in range(32)]
        case "short-batch":
            return [Job(ids(lengths.randint(8, 64)), lengths.randint(8, 64)) for _ in range(32)]
        case _ if workload in PROMPTS:
            # A prompt that begins as one of another workload would be found in the cache.
            dice = random.Random(f"{workload}, round {number}")
            return [Job(ids(PROMPTS[workload]), 1)]
        case _:
            raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}; got {workload!r}")


def arriving_jobs(rate: float, count: int, vocab_size: int, number: int) -> list[Job]:
    """Return requests that arrive one after another, whether those before them are done or not: 128 tokens in, 64 out.

    Args:
        rate: requests a second, in the mean; the gaps are those of a Poisson process.
        count: of requests.
        vocab_size: ids are below it.
        number: of the round: gaps are the same in every round, tokens are not, so that no cache knows them.
    """
    gaps, dice, due_s = random.Random(0), random.Random(number), 0.0
    jobs = []
    for _ in range(count):
        jobs.append(Job([dice.randrange(vocab_size) for _ in range(128)], 64, due_s))
        due_s += gaps.expovariate(rate)
    return jobs


def summary(jobs: Sequence[Job], rounds: Sequence[Round]) -> dict[str, Any]:
    """Return medians over the rounds, with the spread."""
    num_out = sum(job.num_tokens for job in jobs)
    num_all = num_out + sum(len(job.prompt) for job in jobs)
    seconds = [each.elapsed_s for each in rounds]
    ttft_s = percentiles([first for each in rounds for first in each.ttft_s])
    itl_s = percentiles([gap for each in rounds for gap in each.itl_s] or [0.0])
    return {
        "output_tokens_per_s": num_out / median(seconds),
        "output_tokens_per_s_min": num_out / max(seconds),
        "output_tokens_per_s_max": num_out / min(seconds),
        "total_tokens_per_s": num_all / median(seconds),
        "ttft_s": ttft_s,
        "itl_s": itl_s,
        "ttft_ms": 1e3 * ttft_s["p50"],
        "itl_ms": 1e3 * itl_s["p50"],
        "rounds": len(rounds),
    }


def floor_tokens_per_s(jobs: Sequence[Job], num_parameters: int, dtype: torch.dtype, *, shared: int) -> float:
    """Return an upper bound of output tokens per second with these weights; `shared` tokens are read once for all."""
    num_bytes = num_parameters * dtype.itemsize
    prefill = sum(len(job.prompt) - shared for job in jobs) + shared
    num_out = sum(job.num_tokens for job in jobs)
    steps = max(job.num_tokens for job in jobs)
    best = Machine.measured(num_bytes, dtype)
    return num_out / best.floor_s(num_parameters, num_bytes, prefill, num_out - len(jobs), steps - 1)
