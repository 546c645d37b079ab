"""Number of cases of the tests that go through very many: a fifth of them, or all with ALL_CASES=1."""

from __future__ import annotations

import os


def num_cases(whole: int) -> int:
    """Return how many of a test's `whole` cases are to run."""
    return whole if os.environ.get("ALL_CASES") else whole // 5
