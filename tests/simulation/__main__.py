"""Run seeds, or replay one with its trace: `python -m tests.simulation --seeds 1000 --jobs 2`, `... --seed 17`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count, islice
from math import inf

from tests.simulation.mutation import all_mutants, planted_mutant
from tests.simulation.replicas import draw_replica_story
from tests.simulation.runs import run_seeds
from tests.simulation.simulate import simulate
from tests.simulation.story import Story, draw_story


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 if any seed broke a rule."""
    arguments = _parse(argv)
    if arguments.mutants:
        print("\n".join(sorted(all_mutants())))
        return 0
    with planted_mutant(arguments.mutant):
        if arguments.seed is not None:
            return _replay(arguments.seed, arguments.replicas)
        draw = _draw_of(arguments.replicas)
        told: Iterable[int] = count(arguments.start)
        if arguments.ahead:
            told = (seed for seed in told if draw(seed).limits.get("async_scheduling"))
        seeds = tuple(islice(told, arguments.seeds))
        if arguments.digests:
            return _print_digests(seeds)
        return _run(seeds, arguments)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many to run")
    parser.add_argument("--start", type=int, default=0, help="the first one")
    parser.add_argument("--seconds", type=float, default=inf, help="begin none after this time")
    parser.add_argument("--seed", type=int, help="replay this one and print its trace")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run them")
    parser.add_argument("--digests", action="store_true", help="print the digest of every seed's trace")
    parser.add_argument("--ahead", action="store_true", help="only seeds with two plans in flight")
    parser.add_argument("--replicas", action="store_true", help="with two replicas, and kills of either")
    parser.add_argument("--mutant", metavar="NAME", help="with this defect planted in the engine")
    parser.add_argument(
        "--mutants", action="store_true", help="print the names of the defects, and run nothing"
    )
    arguments = parser.parse_args(argv)
    if arguments.mutant is not None and arguments.mutant not in all_mutants():
        parser.error(f"--mutant must be one of the names that --mutants prints; got {arguments.mutant!r}")
    return arguments


def _draw_of(has_replicas: bool) -> Callable[[int], Story]:
    return draw_replica_story if has_replicas else draw_story


def _replay(seed: int, has_replicas: bool) -> int:
    world = simulate(_draw_of(has_replicas)(seed))
    print(world.story)
    print("\n".join(world.lines))
    print(f"trace {world.digest()}")
    return _tell(seed, world.violations, None, has_replicas)


def _print_digests(seeds: Sequence[int]) -> int:
    for seed in seeds:
        print(seed, simulate(seed).digest())
    return 0


def _run(seeds: Sequence[int], arguments: argparse.Namespace) -> int:
    began_s = time.monotonic()
    runs = run_seeds(seeds, arguments.mutant, arguments.jobs, _draw_of(arguments.replicas))
    num_run = num_bad = 0
    for seed, violations in runs:
        num_run += 1
        num_bad += _tell(seed, violations, arguments.mutant, arguments.replicas)
        if time.monotonic() - began_s > arguments.seconds:
            break
    elapsed_s = time.monotonic() - began_s
    unrun = f", {len(seeds) - num_run} not run for lack of time" if num_run < len(seeds) else ""
    print(f"{num_run} seeds, {num_bad} of them bad{unrun}, {num_run / elapsed_s:.0f} seeds/s")
    return int(num_bad > 0)


def _tell(seed: int, violations: Sequence[str], mutant: str | None, has_replicas: bool) -> int:
    """1 for a bad run, whose broken rules and replaying command are printed."""
    if not violations:
        return 0
    option = " --replicas" if has_replicas else ""
    option += f" --mutant '{mutant}'" if mutant else ""
    print(f"seed {seed}: replay with: python -m tests.simulation --seed {seed}{option}")
    for rule in violations:
        print(f"    {rule}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
