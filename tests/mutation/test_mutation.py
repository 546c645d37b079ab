"""The mutants that the tool makes, and one run of it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.operators import mutants_of
from tests.source_tree import ROOT, SRC


def changes(source: str) -> set[tuple[str, str]]:
    return {(mutant.before, mutant.after) for mutant in mutants_of(ast.parse(source), "m.py")}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a < b", {("a < b", "a <= b"), ("a < b", "a >= b")}),
        ("x = a == b", {("a == b", "a != b")}),
        ("x = a and b", {("a and b", "a or b"), ("a and b", "a"), ("a and b", "b")}),
        ("x = not a", {("not a", "a")}),
        ("x = -a", {("-a", "a")}),
        ("x = a + b", {("a + b", "a - b")}),
        ("x = a + 'text'", set()),
        ("x = 3", {("3", "4")}),
        ("x = True", {("True", "False")}),
        ("x = min(a, b)", {("min(a, b)", "max(a, b)")}),
        ("a.b = c", {("a.b = c", "pass")}),
        ("f(a)", {("f(a)", "pass")}),
        ("if a:\n    pass", {("if a:", "if not a:")}),
        ("def f(a=True): return a", {("True", "False"), ("return a", "return None")}),
        ("x: Literal[1] = a", set()),
        ("x = attrs.field(init=False)", set()),
        ("'''a text'''", set()),
    ],
)
def test_a_change_is_made_wherever_an_operator_applies(source: str, expected: set[tuple[str, str]]) -> None:
    assert changes(source) == expected


def test_a_mutant_differs_from_its_source_in_the_changed_node_only() -> None:
    tree = ast.parse("class C:\n    def f(self):\n        return self.a < 2\n")
    [mutant] = [one for one in mutants_of(tree, "m.py") if one.operator == "boundary"]
    assert (mutant.function, mutant.first_line, mutant.line, mutant.lines) == ("C.f", 2, 3, (3, 3))
    assert ast.unparse(mutant.apply(tree)) == ast.unparse(tree).replace("<", "<=")


def test_mutants_that_are_alike_have_names_of_their_own() -> None:
    mutants = mutants_of(ast.parse("def f():\n    return g(1) + g(1)\n"), "m.py")
    assert len({mutant.key for mutant in mutants}) == len(mutants)


@pytest.mark.parametrize("jump", ["continue", "break"])
def test_a_jump_is_asked_of_the_tests_that_run_its_condition(jump: str) -> None:
    source = f"def f():\n    for a in b:\n        if not (a and c):\n            {jump}\n        d(a)\n"
    [mutant] = [one for one in mutants_of(ast.parse(source), "m.py") if one.before == jump]
    assert (mutant.after, mutant.line, mutant.lines) == ("pass", 4, (3, 3))


@pytest.mark.slow
def test_a_run_says_which_test_killed_a_mutant_of_a_function(tmp_path: Path) -> None:
    source, tests = (
        "src/triolet/core/scheduling/ngram_proposer.py",
        "tests/core/scheduling/test_ngram_proposer.py",
    )
    out = tmp_path / "mutants.jsonl"
    subprocess.run(
        [sys.executable, "-m", "tests.mutation", source, "--tests", tests, "--function", "._token", "--out", out],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{SRC}:{ROOT}"}, check=True, capture_output=True,
    )  # fmt: skip
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert {row["after"] for row in rows} == {"position // self._window", "return None"}
    assert all(row["killed_by"].startswith(tests) for row in rows)
