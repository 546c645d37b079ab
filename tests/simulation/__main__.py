"""Run seeds, or replay one with its trace: `python -m tests.simulation --seeds 1000 --jobs 2`, `... --seed 17`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tests.simulation.mutation import all_mutants, planted_mutant
from tests.simulation.runs import run_seeds
from tests.simulation.simulate import simulate


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 if any seed broke a rule."""
    arguments = _parse(argv)
    with planted_mutant(arguments.mutant):
        if arguments.seed is not None:
            return _replay(arguments.seed)
        seeds = range(arguments.start, arguments.start + arguments.seeds)
        if arguments.digests:
            return _print_digests(seeds)
        return _run(seeds, arguments.mutant, arguments.jobs)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many to run")
    parser.add_argument("--start", type=int, default=0, help="the first one")
    parser.add_argument("--seed", type=int, help="replay this one and print its trace")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run them")
    parser.add_argument("--digests", action="store_true", help="print the digest of every seed's trace")
    parser.add_argument(
        "--mutant", choices=sorted(all_mutants()), help="with this defect planted in the engine"
    )
    return parser.parse_args(argv)


def _replay(seed: int) -> int:
    world = simulate(seed)
    print(world.story)
    print("\n".join(world.lines))
    print(f"trace {world.digest()}")
    return _tell(seed, world.violations, None)


def _print_digests(seeds: range) -> int:
    for seed in seeds:
        print(seed, simulate(seed).digest())
    return 0


def _run(seeds: range, mutant: str | None, num_jobs: int) -> int:
    began_s = time.monotonic()
    num_bad = sum(_tell(seed, violations, mutant) for seed, violations in run_seeds(seeds, mutant, num_jobs))
    elapsed_s = time.monotonic() - began_s
    print(f"{len(seeds)} seeds, {num_bad} of them bad, {len(seeds) / elapsed_s:.0f} seeds/s")
    return int(num_bad > 0)


def _tell(seed: int, violations: Sequence[str], mutant: str | None) -> int:
    """1 for a bad run, whose broken rules and replaying command are printed."""
    if not violations:
        return 0
    option = f" --mutant '{mutant}'" if mutant else ""
    print(f"seed {seed}: replay with: python -m tests.simulation --seed {seed}{option}")
    for rule in violations:
        print(f"    {rule}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
