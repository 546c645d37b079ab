"""The compiled kernels for each kind of CPU that this machine can be, for the tests that go through them all."""

from __future__ import annotations

import ctypes
import functools
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from triolet.kernels.cpu.build import BuildError, build
from triolet.kernels.cpu.library import load
from triolet.kernels.cpu.targets import TARGETS, missing, runnable


def compiled(name: str = "") -> ctypes.CDLL:
    """The kernels for a target, or for the best that this machine can run."""
    candidates = [target for target in runnable() if name in ("", target.name)]
    for target in candidates:
        try:
            return load(target, _built(target.name)).cpp
        except (BuildError, OSError) as error:
            reason = str(error)
    pytest.skip(reason)


@functools.cache
def _built(name: str) -> Path:
    """Return a copy of the library that an engine would build and keep in the user's cache.

    A library remembers whether it may use tiles, and `amx` and `avx512_bf16` are one library: with a copy for each, a
    test of one leaves the other, and the engines of this process, as they are.
    """
    built = build(next(target for target in TARGETS if target.name == name))
    return Path(shutil.copy(built, Path(_folder().name) / f"{name}.so"))


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="triolet-kernels-")  # removed with this process


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


def each_on_some_variants(cases: Iterable[Any]) -> list[Any]:
    """Return (case, variant) as parameters: a case runs on every other kind of CPU always, on all with the slow tests.

    Of two cases one after the other each kind of CPU runs one.

    Args:
        cases: a `pytest.param`, or the only argument.
    """
    params = []
    for number, case in enumerate(cases):
        # A parameter is a tuple as well, of its values, marks and name.
        values, marks, name = case if isinstance(case, type(pytest.param())) else ((case,), (), str(case))
        for place, variant in enumerate(VARIANTS):
            slow = [pytest.mark.slow] if (number + place) % 2 else []
            params.append(
                pytest.param(
                    *values, *variant.values, marks=[*marks, *variant.marks, *slow], id=f"{name}-{variant.id}"
                )
            )
    return params
