"""The compiled kernels in each width of vectors that this machine can run, for the tests that go through them all."""

from __future__ import annotations

import ctypes
import functools
import platform
from pathlib import Path
from typing import Any

import attrs
import pytest

from triolet.kernels.cpu.build import BuildError, Toolchain, build


@functools.cache
def compiled(target: str) -> ctypes.CDLL:
    """The kernels for one `-march`; kept in the user's cache like those that the engine builds."""
    try:
        toolchain = Toolchain.find()
    except BuildError as error:
        pytest.skip(str(error))
    return ctypes.CDLL(str(build(attrs.evolve(toolchain, target=target or toolchain.target))))


def _has_avx2() -> bool:
    try:
        return " avx2 " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


_on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86-64 CPU")
_with_avx2 = pytest.mark.skipif(not _has_avx2(), reason="needs a CPU with AVX2")

VARIANTS: list[Any] = [
    pytest.param("", id="native"),
    pytest.param("-march=x86-64-v3", marks=[_on_x86, _with_avx2], id="avx2"),
    pytest.param("-march=x86-64", marks=_on_x86, id="portable"),
]

on_every_cpu_variant = pytest.mark.parametrize("variant", VARIANTS)
