"""Dot products of bytes are exact, to the largest bytes of each sign, on every kind of CPU."""

from __future__ import annotations

import ctypes
import functools
import itertools
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.kernels.cpu_variants import on_every_cpu_variant
from triolet.kernels.cpu.build import SOURCES, BuildError, Toolchain
from triolet.kernels.cpu.targets import TARGETS

INPUTS = (-127, -1, 0, 1, 127)
WEIGHTS = (-128, -127, -1, 0, 1, 127)
NIBBLES = (0, 1, 15)
GROUP_WORDS = 8


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ctypes.CDLL]:
    """Compile the products for a kind of CPU, each once."""

    @functools.cache
    def library_of(variant: str) -> ctypes.CDLL:
        target = next(target for target in TARGETS if target.name == variant)
        library = tmp_path_factory.mktemp(variant) / "byte_dot.so"
        source = Path(__file__).with_name("byte_dot.cpp")
        try:
            compiler = Toolchain.find()
        except BuildError as error:
            pytest.skip(str(error))
        if not compiler.accepts(target):
            pytest.skip("the compiler does not know this kind of CPU")
        flags = ("-std=c++17", "-O2", "-fPIC", "-shared", "-Wno-psabi")
        subprocess.run(
            [str(compiler.compiler), *flags, *target.flags, f"-I{SOURCES}", str(source), "-o", str(library)],
            check=True,
        )
        return ctypes.CDLL(str(library))

    return library_of


@pytest.fixture
def byte_dot(variant: str, compiled: Callable[[str], ctypes.CDLL]) -> ctypes.CDLL:
    return compiled(variant)


@on_every_cpu_variant
@pytest.mark.parametrize("function", ["dot_signed", "dot_signs_apart"])
def test_a_dot_product_of_bytes_is_exact(byte_dot: ctypes.CDLL, function: str) -> None:
    lanes, dots = byte_dot.lanes(), byte_dot[function]
    weights = torch.tensor(list(itertools.product(WEIGHTS, repeat=4)), dtype=torch.int8)
    weights = weights[: len(weights) // lanes * lanes].view(-1, lanes, 4)
    for x in itertools.product(INPUTS, repeat=4):
        some = weights[sum(x) % len(weights)].contiguous()
        assert dot(dots, x, some) == (some.int() @ torch.tensor(x, dtype=torch.int32)).tolist()
    for some in weights:
        assert dot(dots, (127,) * 4, some) == (127 * some.int().sum(1)).tolist()
        assert dot(dots, (-127,) * 4, some) == (-127 * some.int().sum(1)).tolist()


@on_every_cpu_variant
def test_a_sum_of_a_groups_nibbles_is_exact(byte_dot: ctypes.CDLL) -> None:
    nibbles = torch.tensor(list(itertools.product(NIBBLES, repeat=4))[-byte_dot.lanes() :], dtype=torch.uint8)
    for x in itertools.product((-127, 0, 127), repeat=4):
        once = nibbles.int() @ torch.tensor(x, dtype=torch.int32)
        assert dot(byte_dot.dot_nibbles, x, nibbles, GROUP_WORDS) == (GROUP_WORDS * once).tolist()


def dot(function: Callable[..., object], x: tuple[int, ...], weights: torch.Tensor, *more: int) -> list[int]:
    sums = torch.empty(len(weights), dtype=torch.int32)
    inputs = torch.tensor(x, dtype=torch.int8)
    pointers = [ctypes.c_void_p(part.data_ptr()) for part in (inputs, weights, sums)]
    function(pointers[0], pointers[1], *more, pointers[2])
    return [int(number) for number in sums]
