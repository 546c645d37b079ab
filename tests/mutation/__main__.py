"""Mutation testing of the pure parts: `python -m tests.mutation src/triolet/core/kv_cache`.

Prints a line for each survivor and the score of each module; --out keeps a line of JSON for every mutant. A survivor is
closed by a test that states the rule, by deleting code that decides nothing, or by a line in
tests/mutation/equivalent.jsonl with the reason why no test can notice it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from pathlib import Path

import attrs

from tests.mutation.operators import Mutant, load, mutants_of
from tests.mutation.run import run_mutants
from tests.source_tree import ROOT

EQUIVALENT = ROOT / "tests" / "mutation" / "equivalent.jsonl"
Key = tuple[str, str, str, str, str, int]


@attrs.define
class Score:
    """Mutants of one module, counted."""

    tried: int = 0
    killed: int = 0
    equivalent: int = 0

    @property
    def percent(self) -> float:
        """Killed mutants among those that are not equivalent."""
        return 100.0 * self.killed / max(1, self.tried - self.equivalent)


def main() -> int:
    options = _options()
    sources = [file for path in options.sources for file in _python_files(path)]
    mutants = [mutant for file in sources for mutant in mutants_of(load(ROOT / file), file)]
    chosen = _chosen(mutants, options)
    tests = options.tests or sorted({test for file in sources for test in nearest_tests(file)})
    print(
        f"{len(chosen)} of {len(mutants)} mutants (seed {options.seed}), tests: {' '.join(tests)}", flush=True
    )
    equivalent = {_key(row) for row in _rows(EQUIVALENT)}
    scores: dict[str, Score] = defaultdict(Score)
    out = options.out.open("a", encoding="utf-8") if options.out else None

    def report(mutant: Mutant, killed_by: str | None, asked: int) -> None:
        score = scores[mutant.file]
        score.tried += 1
        score.killed += killed_by is not None
        known = killed_by is None and mutant.key in equivalent
        score.equivalent += known
        if killed_by is None and not known:
            print(f"{_sentence(mutant)}   ({asked} tests)", flush=True)
        if out is not None:
            print(json.dumps(_row(mutant, killed_by, asked)), file=out, flush=True)

    number = run_mutants(chosen, tests, options.slowest, report)
    for file, score in sorted(scores.items()):
        print(
            f"{score.percent:5.1f} %  {score.killed} killed of {score.tried}, {score.equivalent} equivalent  {file}"
        )
    print(f"{number} tests took part")
    return 0


def nearest_tests(file: str) -> list[str]:
    """Return the tests of a module: the folder that mirrors its own, of tests/core only the files in it."""
    folder = ROOT / "tests" / Path(file).parent.relative_to("src/triolet")
    while not folder.is_dir():
        folder = folder.parent
    if folder == ROOT / "tests" / "core":
        return [str(path.relative_to(ROOT)) for path in sorted(folder.glob("test_*.py"))]
    return [str(folder.relative_to(ROOT))]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("sources", nargs="+", type=Path, help="modules or folders under src/triolet")
    parser.add_argument(
        "--tests", nargs="+", help="arguments of pytest; default: the tests beside the modules"
    )
    parser.add_argument("--sample", type=int, help="try this many mutants of each module, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--function", help="only functions with this in their qualified name")
    parser.add_argument("--again", type=Path, help="only the survivors in this file, written by --out")
    parser.add_argument(
        "--slowest", type=float, default=20.0, help="leave out tests that take longer, seconds"
    )
    parser.add_argument("--out", type=Path, help="append a line of JSON for every mutant to this file")
    return parser.parse_args()


def _chosen(mutants: list[Mutant], options: argparse.Namespace) -> list[Mutant]:
    if options.function:
        mutants = [mutant for mutant in mutants if options.function in mutant.function]
    if options.again:
        survivors = {_key(row) for row in _rows(options.again) if row["killed_by"] is None}
        mutants = [mutant for mutant in mutants if mutant.key in survivors]
    if options.sample is None:
        return mutants
    by_file: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        by_file[mutant.file].append(mutant)
    draw = random.Random(options.seed)
    drawn = [draw.sample(some, min(options.sample, len(some))) for some in by_file.values()]
    return sorted(
        (mutant for some in drawn for mutant in some), key=lambda mutant: (mutant.file, mutant.line)
    )


def _python_files(path: Path) -> list[str]:
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [str(file.resolve().relative_to(ROOT)) for file in files]


def _rows(path: Path) -> list[dict[str, object]]:
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )


def _key(row: dict[str, object]) -> Key:
    names = ("file", "function", "operator", "before", "after", "nth")
    return tuple(row[name] for name in names)  # type: ignore[return-value]


def _row(mutant: Mutant, killed_by: str | None, asked: int) -> dict[str, object]:
    names = ("file", "line", "function", "operator", "before", "after", "nth")
    return {name: getattr(mutant, name) for name in names} | {"tests": asked, "killed_by": killed_by}


def _sentence(mutant: Mutant) -> str:
    return f"{mutant.file}:{mutant.line} {mutant.function}  {mutant.operator}: {mutant.before}  ->  {mutant.after}"


if __name__ == "__main__":
    sys.exit(main())
