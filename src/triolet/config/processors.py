"""Processors that a process may use, and the number of threads that a CPU step is computed with.

Three facts limit it, each from a file of Linux; where it is missing or malformed, it limits nothing:

1. The affinity: the logical processors that the process may run on.
2. The cores behind them. A step waits for memory and for the units that multiply and add. Both belong to the core: the
   second hyper-thread of a core adds nothing to them, and gets a thread only by name (`OMP_NUM_THREADS`).
3. The quota of the control group, the least on the way to its root. It is time, not processors: when the threads of a
   group have used it up, all of them stand still for the rest of the period (mostly 100 ms), and so does each stream.
   It is rounded down for that reason; what is left over serves the event loop.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

import attrs

from triolet.config.devices import CORE_LIST, cores_in

ROOT: Final = Path("/")
VARIABLE: Final = "OMP_NUM_THREADS"  # may be a list, of which the first number is the outermost level's


@attrs.frozen
class Processors:
    """What a process may use of the machine's processors.

    Args:
        usable: logical processors of its affinity.
        cores: the first of them in each physical core.
        quota: processors' worth of time that its control group may use; None without a limit.
    """

    usable: frozenset[int]
    cores: frozenset[int]
    quota: float | None = None

    @classmethod
    def read(cls, root: Path = ROOT, usable: frozenset[int] | None = None) -> Processors:
        """Read what this process may use.

        Args:
            root: of the tree with `proc` and `sys`.
            usable: logical processors; by default those of this thread's affinity.
        """
        usable = _affinity() if usable is None else usable
        siblings = {processor: _siblings(root, processor) for processor in usable}
        cores = frozenset(min(siblings[processor] & usable) for processor in usable)
        return cls(usable, cores, _quota(root))


@attrs.frozen
class ThreadChoice:
    """Number of threads of a CPU step.

    Args:
        count: at least 1.
        reason: why so many, as the rest of a sentence.
        warning: what is wrong with what was asked for.
    """

    count: int
    reason: str
    warning: str | None = None

    def within(self, num_threads: int) -> ThreadChoice:
        """Return the choice where torch has a number of threads; a lower one that the program has set stays."""
        if num_threads >= self.count:
            return self
        return attrs.evolve(self, count=num_threads, reason="as many as torch was given")


def choose_threads(processors: Processors, asked: str | None) -> ThreadChoice:
    """Choose the number of threads of a CPU step.

    Args:
        processors: that the process may use.
        asked: value of `OMP_NUM_THREADS`, if it is set.
    """
    if asked is None or not asked.strip():
        return _by_default(processors)
    outermost = asked.partition(",")[0].strip()
    if not re.fullmatch(r"\+?0*[1-9][0-9]{0,8}", outermost):
        # OpenMP's runtimes ignore it, too
        warning = f"{VARIABLE} must be a number of threads, at least 1, and is ignored; got {asked!r}"
        return attrs.evolve(_by_default(processors), warning=warning)
    return _as_asked(processors, int(outermost))


def memory_nodes(root: Path = ROOT) -> tuple[frozenset[int], ...]:
    """Return the logical processors of each node of memory that has some; () where the system does not say."""
    files = sorted((root / "sys/devices/system/node").glob("node*/cpulist"))
    return tuple(filter(None, map(_listed, files)))


def _by_default(processors: Processors) -> ThreadChoice:
    num_usable, num_cores, quota = len(processors.usable), len(processors.cores), processors.quota
    if quota is not None and quota < num_cores:
        return ThreadChoice(max(1, int(quota)), f"the container may use {quota:g} processors")
    if num_cores < num_usable:
        return ThreadChoice(num_cores, f"one for each core, of whose hyper-threads {num_usable} are usable")
    return ThreadChoice(num_usable, "one for each usable processor")


def _as_asked(processors: Processors, number: int) -> ThreadChoice:
    num_usable, quota = len(processors.usable), processors.quota
    reason = f"{VARIABLE} is {number}"
    if number > num_usable:
        rule = (
            f"{VARIABLE} must be at most the number of usable processors ({num_usable}), and is taken as that"
        )
        return ThreadChoice(num_usable, reason, f"{rule}; got {number}")
    if quota is not None and number > max(1, quota):
        waits = f"of the {quota:g} processors that the container may use, and wait when they are used up"
        return ThreadChoice(number, reason, f"the {number} threads of {VARIABLE} share the time {waits}")
    return ThreadChoice(number, reason)


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _siblings(root: Path, processor: int) -> frozenset[int]:
    """Return the logical processors of a processor's core, at least itself."""
    folder = root / f"sys/devices/system/cpu/cpu{processor}/topology"
    # Linux before 5.2 has only the second name
    found = _listed(folder / "core_cpus_list") or _listed(folder / "thread_siblings_list")
    return found if processor in found else frozenset({processor})


def _quota(root: Path) -> float | None:
    return min(filter(None, map(_share_of, _control_groups(root))), default=None)


def _control_groups(root: Path) -> Iterator[Path]:
    """List the folders of this process's control groups for processors, those above them included."""
    mounts = root / "sys/fs/cgroup"
    # In a container the mount may show the own group only, while the path below is the host's.
    yield from (mounts, mounts / "cpu")
    for line in _text(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        parts = PurePosixPath(path.lstrip("/")).parts
        if ".." in parts:  # of a group outside the namespace, whose files are not to be seen
            continue
        bases = (mounts, mounts / "unified") if not controllers else (mounts / controllers, mounts / "cpu")
        if not controllers or "cpu" in controllers.split(","):
            for base in bases:
                yield from (base.joinpath(*parts[:depth]) for depth in range(len(parts) + 1))


def _share_of(group: Path) -> float | None:
    """Return the processors' worth of time that a control group may use; None without a limit."""
    fields = _text(group / "cpu.max").split()  # version 2
    if not fields:
        fields = [_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    try:
        quota, period = map(int, fields)
        return quota / period if min(quota, period) > 0 else None
    except (ValueError, OverflowError):  # such as "max", or no file
        return None


def _listed(path: Path) -> frozenset[int]:
    text = _text(path).strip()
    return cores_in(text) if re.fullmatch(CORE_LIST, text) else frozenset()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):  # the second for a path with a zero byte
        return ""
