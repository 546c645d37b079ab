"""The compiled kernels for each kind of CPU that this machine can be, for the tests that go through them all."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import pytest

from triolet.kernels.cpu.build import BuildError, build
from triolet.kernels.cpu.library import load
from triolet.kernels.cpu.targets import TARGETS, missing, runnable


def compiled(name: str = "") -> ctypes.CDLL:
    """The kernels for a target, or for the best that this machine can run.

    Targets that share a library share what it remembers, too: one at a time.
    """
    candidates = [target for target in runnable() if name in ("", target.name)]
    for target in candidates:
        try:
            return load(target, _built(target.name)).cpp
        except (BuildError, OSError) as error:
            reason = str(error)
    pytest.skip(reason)


@functools.cache
def _built(name: str) -> Path:
    """Kept in the user's cache like those that the engine builds."""
    return build(next(target for target in TARGETS if target.name == name))


VARIANTS: list[Any] = [
    pytest.param(
        target.name,
        marks=pytest.mark.skipif(
            bool(missing(target)), reason=f"needs a CPU with {', '.join(missing(target))}"
        ),
        id=target.name,
    )
    for target in TARGETS
]

on_every_cpu_variant = pytest.mark.parametrize("variant", VARIANTS)
