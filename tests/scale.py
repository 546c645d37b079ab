"""Scale of the tests that go through very many cases: which of them run when.

The slow tests go through a fifth of what could run, or all with ALL_CASES=1.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest


def num_cases(whole: int) -> int:
    """Return how many of a test's `whole` cases are to run."""
    return whole if os.environ.get("ALL_CASES") else whole // 5


def one_in(number: int, cases: Iterable[Any]) -> list[Any]:
    """Return cases as parameters, of which each `number`-th runs always and the others only with the slow tests.

    Args:
        number: 2 for every other one, from the first on.
        cases: a `pytest.param`, the tuple of the arguments, or the only argument.
    """
    params = []
    for place, case in enumerate(cases):
        # A parameter is a tuple as well, of its values, marks and name.
        values, _, name = case if isinstance(case, type(pytest.param())) else (case, (), None)
        marks = pytest.mark.slow if place % number else ()
        params.append(pytest.param(*values if isinstance(values, tuple) else (values,), id=name, marks=marks))
    return params
