"""Kinds of CPU that the kernels are compiled for, and the ones that this machine can run.

A library for one kind runs on every CPU that has its features. Which features there are is what the kernel of the
operating system says, which knows what it saves of a thread's registers, too; a newer CPU under an old system has less.
"""

from __future__ import annotations

import functools
import platform
import sys
from pathlib import Path

import attrs


@attrs.frozen
class Target:
    """A kind of CPU."""

    name: str  # what `TRIOLET_CPU_TARGET` calls it
    # Name of the library that is compiled for it; two targets may differ in what they use of one.
    library: str
    flags: tuple[str, ...]  # of g++ and clang++
    features: frozenset[str] = frozenset()  # what the CPU has to have, in the words of /proc/cpuinfo
    # Whether the library uses Intel's AMX; the system has to allow it, see `triolet_use_amx`.
    tiles: bool = False


def _flags(features: str, more: str = "") -> tuple[str, ...]:
    """Return the compiler's flags for CPU features."""
    # /proc/cpuinfo writes underscores in some names; the compiler writes none.
    return tuple(f"-m{word.replace('_', '')}" for word in features.split()) + tuple(more.split())


_AVX2 = "avx2 fma f16c"
_AVX512 = f"{_AVX2} avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni"
_BF16 = f"{_AVX512} avx512_bf16"
_AMX = "amx_tile amx_int8 amx_bf16"
_AMX_FLAGS = _AMX.replace("_", "-").split()


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The instructions for tiles stand behind a question at run time: a CPU without them runs the same library.
_WITH_TILES = (*_flags(_BF16), *(f"-m{word}" for word in _AMX_FLAGS))

X86_TARGETS = (
    Target("amx", "avx512_bf16", _WITH_TILES, _words(f"{_BF16} {_AMX}"), tiles=True),  # Sapphire Rapids
    Target("avx512_bf16", "avx512_bf16", _WITH_TILES, _words(_BF16)),  # Cooper Lake, Zen 4
    Target("avx512", "avx512", _flags(_AVX512), _words(_AVX512)),  # Cascade Lake, Ice Lake
    Target("avx2", "avx2", _flags(_AVX2), _words(_AVX2)),  # Haswell, Zen
    Target("portable", "portable", ()),  # every x86-64
)
"""Best first."""

ARM64_TARGETS = (
    # Neoverse N1, Cortex-A76, and later. GCC knows the instruction from Armv8.2 on, and uses what else that brings.
    Target(
        "dotprod", "dotprod", ("-march=armv8.2-a+dotprod",), _words("asimddp asimdrdm atomics crc32 dcpop")
    ),
    Target("neon", "neon", ("-march=armv8-a",)),  # every 64-bit Arm
)
"""Best first."""

NATIVE = Target(
    "native", "native", ("-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native",)
)
"""Whatever the compiler finds, on machines that the others are not for."""

_OF_LINUX = {"x86_64": X86_TARGETS, "aarch64": ARM64_TARGETS}

TARGETS = _OF_LINUX.get(platform.machine(), (NATIVE,)) if sys.platform == "linux" else (NATIVE,)
"""Targets for this kind of machine, best first."""

NAMES = tuple(target.name for target in TARGETS)


def runnable() -> tuple[Target, ...]:
    """Return the targets that this machine can run, best first; there is at least one."""
    return tuple(target for target in TARGETS if not missing(target))


def missing(target: Target) -> tuple[str, ...]:
    """Return the features that this machine lacks, sorted."""
    return tuple(sorted(target.features - _features()))


@functools.cache
def _features() -> frozenset[str]:
    """Return the features of the first processor, as the system names them."""
    return _words(next((line for line in cpu_facts() if line.startswith(("flags", "Features"))), ""))


def cpu_facts() -> tuple[str, ...]:
    """Return model and features of the CPU, in lines of /proc/cpuinfo."""
    try:
        processor = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return (f"{platform.machine()} {platform.processor()}",)
    kept = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return tuple(line for line in processor.splitlines() if line.startswith(kept))
