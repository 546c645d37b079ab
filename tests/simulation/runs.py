"""Many stories, one after the other or in several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from functools import partial

from tests.simulation.mutation import planted_mutant
from tests.simulation.simulate import simulate

CHUNK = 50  # seeds that a process is given at a time


def run_seeds(seeds: range, mutant: str | None, num_jobs: int) -> Iterator[tuple[int, list[str]]]:
    """The rules that each seed broke, in order of the seeds.

    Args:
        seeds: of the stories.
        mutant: a defect to plant; None for the engine as it is.
        num_jobs: processes.
    """
    run = partial(_run_seed, mutant)
    if num_jobs == 1:
        yield from map(run, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(num_jobs) as pool:
        yield from pool.imap(run, seeds, chunksize=CHUNK)


def _run_seed(mutant: str | None, seed: int) -> tuple[int, list[str]]:
    with planted_mutant(mutant):
        return seed, simulate(seed).violations
