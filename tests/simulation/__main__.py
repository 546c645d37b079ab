"""Run seeds, or replay one with its trace: `python -m tests.simulation --seeds 1000 --start 0`, `... --seed 17`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tests.simulation.mutants import MUTANTS, planted_mutant
from tests.simulation.simulate import simulate
from tests.simulation.world import World


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 if any seed broke a rule."""
    arguments = _parse(argv)
    with planted_mutant(arguments.mutant):
        if arguments.seed is not None:
            return _replay(arguments.seed)
        seeds = range(arguments.start, arguments.start + arguments.seeds)
        return _print_digests(seeds) if arguments.digests else _run(seeds, arguments.mutant)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many to run")
    parser.add_argument("--start", type=int, default=0, help="the first one")
    parser.add_argument("--seed", type=int, help="replay this one and print its trace")
    parser.add_argument("--digests", action="store_true", help="print the digest of every seed's trace")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="with this defect planted in the engine")
    return parser.parse_args(argv)


def _replay(seed: int) -> int:
    world = simulate(seed)
    print(world.story)
    print("\n".join(world.lines))
    print(f"trace {world.digest()}")
    return _tell(world, None)


def _print_digests(seeds: range) -> int:
    for seed in seeds:
        print(seed, simulate(seed).digest())
    return 0


def _run(seeds: range, mutant: str | None) -> int:
    began_s = time.process_time()
    num_bad = sum(_tell(simulate(seed), mutant) for seed in seeds)
    elapsed_s = time.process_time() - began_s
    print(f"{len(seeds)} seeds, {num_bad} of them bad, {len(seeds) / elapsed_s:.0f} seeds/s of CPU time")
    return int(num_bad > 0)


def _tell(world: World, mutant: str | None) -> int:
    """1 for a bad run, whose broken rules and replaying command are printed."""
    if not world.violations:
        return 0
    option = f" --mutant '{mutant}'" if mutant else ""
    print(
        f"seed {world.story.seed}: replay with: python -m tests.simulation --seed {world.story.seed}{option}"
    )
    for rule in world.violations:
        print(f"    {rule}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
