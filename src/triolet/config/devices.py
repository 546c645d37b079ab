"""Devices by name: `auto`, `cpu`, `cuda`, a GPU by its number (`cuda:1`), or cores of the CPU (`cpu:0-3+8-11`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

_CORES: Final = r"[0-9]{1,4}(-[0-9]{1,4})?"
DEVICE: Final = rf"auto|cpu(:{_CORES}(\+{_CORES})*)?|cuda(:[0-9]{{1,3}})?"
CORE_LIST: Final = rf"{_CORES}(,{_CORES})*"  # as Linux writes it
DEVICE_NAMES: Final = "auto, cpu, cpu:CORES, cuda, cuda:N"


def is_device(value: object) -> bool:
    """Return True if this is the name of a device."""
    return isinstance(value, str) and re.fullmatch(DEVICE, value) is not None


def kind_of(device: str) -> str:
    """Return `auto`, `cpu` or `cuda`."""
    return device.partition(":")[0]


def cores_of(device: str) -> frozenset[int] | None:
    """Return the cores that a device is bound to; None if it is not bound to any."""
    kind, _, cores = device.partition(":")
    return cores_in(cores.replace("+", ",")) if kind == "cpu" and cores else None


def cores_in(text: str) -> frozenset[int]:
    """Return the cores that a list of the kernel names, such as 0-3,8."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def device_of_cores(cores: Iterable[int]) -> str:
    """Return the name of the device that is these cores, at least one."""
    parts: list[str] = []
    run: list[int] = []
    for core in [*sorted(cores), -1]:
        if run and core != run[-1] + 1:
            parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
            run = []
        run.append(core)
    return "cpu:" + "+".join(parts)


def split_cores(
    usable: frozenset[int], nodes: Sequence[frozenset[int]], num_parts: int
) -> tuple[frozenset[int], ...]:
    """Divide cores among replicas: a node of memory each if there are as many, otherwise equally, in order.

    Args:
        usable: cores that this process may use.
        nodes: cores of each node of memory.
        num_parts: replicas, at most as many as usable cores.
    """
    own = [node & usable for node in nodes]
    if len([node for node in own if node]) == num_parts:
        return tuple(node for node in own if node)
    # neighbours share caches, and mostly a node
    by_node = {core: number for number, node in enumerate(own) for core in node}
    ordered = sorted(usable, key=lambda core: (by_node.get(core, 0), core))
    size, rest = divmod(len(ordered), num_parts)
    ends = [size * number + min(number, rest) for number in range(num_parts + 1)]
    return tuple(frozenset(ordered[start:end]) for start, end in pairwise(ends))
