"""The one place that reaches into Trio: its order of tasks is random on purpose, and a replay needs it twice.

Trio reverses every batch of runnable tasks with a chance of one half. With `_ALLOW_DETERMINISTIC_SCHEDULING` a batch
is sorted before that, and `_r` tosses the coin: Hypothesis' plug-in for Trio uses the same two names.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio

NAMES = ("_ALLOW_DETERMINISTIC_SCHEDULING", "_r")


@contextmanager
def seeded_scheduling(seed: int) -> Iterator[None]:
    """Within this scope, the order in which Trio runs its tasks is a function of the seed.

    Raises:
        RuntimeError: this Trio does not have the two private names any more.
    """
    run = trio._core._run
    if missing := [name for name in NAMES if not hasattr(run, name)]:
        raise RuntimeError(
            f"Trio {trio.__version__} can not be seeded: {missing} are gone from trio._core._run"
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, NAMES[0], True)
        patch.setattr(run, NAMES[1], random.Random(seed))
        yield
