"""Load the compiled kernels into this process, or warn once and leave the work to torch.

Of the kinds of CPU that they can be compiled for (targets.py) the best that this machine can run is taken: as the
wheel has brought it, or else compiled now. `TRIOLET_CPU_TARGET` names another, or none.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
from pathlib import Path

import attrs

from triolet.errors import ConfigError
from triolet.kernels.cpu.abi import check_layouts
from triolet.kernels.cpu.build import BuildError, Toolchain, build, shipped
from triolet.kernels.cpu.targets import NAMES, TARGETS, Target, missing, runnable

logger = logging.getLogger(__name__)

SWITCH = "TRIOLET_CPU_TARGET"
"""Environment variable: a target's name, or `auto`; `off` (or 0) leaves everything to torch."""


@attrs.frozen(eq=False)
class Kernels:
    """Loaded library of kernels."""

    cpp: ctypes.CDLL  # the functions. Calls into it release the GIL.
    target: Target  # the kind of CPU that they use
    path: Path  # of the library


@functools.cache
def kernels() -> Kernels | None:
    """Return the kernels, compiled at the first call if there is need; None where torch does their work.

    Raises:
        ConfigError: `TRIOLET_CPU_TARGET` names what there is not, or what this machine cannot run.
    """
    wish = os.environ.get(SWITCH, "") or "auto"
    if wish in ("0", "off"):
        return None
    try:
        loaded = _best() if wish == "auto" else _forced(wish)
    except (BuildError, OSError) as error:
        logger.warning("the CPU kernels could not be built, torch's slower ones do their work: %s", error)
        return None
    logger.info("the CPU kernels are those for %s, %s", loaded.target.name, loaded.path)
    return loaded


def library() -> ctypes.CDLL | None:
    """Return the functions of `kernels()`."""
    loaded = kernels()
    return None if loaded is None else loaded.cpp


def load(target: Target, path: Path) -> Kernels:
    """Load a library and make it ready.

    Raises:
        OSError: it cannot be loaded, or the system does not let this process use AMX.
        InvariantViolated: its structs are not those that abi.py mirrors.
    """
    cpp = ctypes.CDLL(str(path))
    check_layouts(cpp)
    if not cpp.triolet_use_amx(ctypes.c_int32(target.tiles)) and target.tiles:
        raise OSError("the system does not let this process use AMX")
    if (start := _threads_of_torch()) is not None:
        cpp.triolet_use_threads(ctypes.cast(start, ctypes.c_void_p))
    return Kernels(cpp, target, path)


def _best() -> Kernels:
    """Load the best target that there is a library for: from the package, or else compiled now.

    Raises:
        BuildError: there is none; says why for each target.
    """
    candidates, reasons = runnable(), list[str]()
    for target in candidates:
        if (path := shipped(target)) is not None:
            try:
                return load(target, path)
            except OSError as error:  # no tiles here, or a C library that is too old for what was shipped
                reasons.append(str(error))
    toolchain = Toolchain.find()
    for target in filter(toolchain.accepts, candidates):
        try:
            return load(target, build(target, toolchain))
        except OSError as error:
            reasons.append(str(error))
    raise BuildError("; ".join(reasons) or f"{toolchain.compiler} knows no flags for this CPU")


def _forced(name: str) -> Kernels:
    target = next((target for target in TARGETS if target.name == name), None)
    if target is None:
        raise ConfigError(SWITCH, f"one of auto, off, {', '.join(NAMES)}", name)
    if lacking := missing(target):
        raise ConfigError(SWITCH, f"what this CPU can run, which has no {', '.join(lacking)}", name)
    try:
        return load(target, shipped(target) or build(target))
    except (BuildError, OSError) as error:
        raise ConfigError(SWITCH, f"what can be used here ({error})", name) from error


def _threads_of_torch() -> ctypes._FuncPointer | None:
    """Find `GOMP_parallel` in the OpenMP runtime that torch has loaded; None if there is none."""
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    found = re.search(r"(/\S*/lib(?:gomp|iomp5|omp)\b[^/\s]*\.so[^/\s]*)$", mapped, re.MULTILINE)
    return getattr(ctypes.CDLL(found[1]), "GOMP_parallel", None) if found else None
