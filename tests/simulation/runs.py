"""Many stories, one after the other or in several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from tests.simulation.mutation import planted_mutant
from tests.simulation.simulate import simulate
from tests.simulation.story import Story, draw_story

CHUNK = 50  # seeds that a process is given at a time


def run_seeds(
    seeds: Sequence[int], mutant: str | None, num_jobs: int, draw: Callable[[int], Story] = draw_story
) -> Iterator[tuple[int, list[str]]]:
    """The rules that each seed broke, in order of the seeds.

    Args:
        seeds: of the stories.
        mutant: a defect to plant; None for the engine as it is.
        num_jobs: processes.
        draw: gives the story of a seed.
    """
    run = partial(_run_seed, mutant, draw)
    if num_jobs == 1:
        yield from map(run, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(num_jobs) as pool:
        yield from pool.imap(run, seeds, chunksize=CHUNK)


def _run_seed(mutant: str | None, draw: Callable[[int], Story], seed: int) -> tuple[int, list[str]]:
    with planted_mutant(mutant):
        return seed, simulate(draw(seed)).violations
