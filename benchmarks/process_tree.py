"""Processes of an engine or a server, as Linux lists them."""

from __future__ import annotations

from pathlib import Path

RUNNER = "triolet.workers.runner"
FORK_SERVER = "triolet.workers.fork_server"


def processes_of(root: int) -> dict[int, int]:
    """Return the process ids of a tree, each with its parent's; that of the root is given as 0."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = _parent_of(int(folder.name))
        except OSError:  # it has ended
            continue
    tree = {root: 0}
    while more := {pid: parent for pid, parent in parents.items() if parent in tree and pid not in tree}:
        tree |= more
    return tree


def name_of(pid: int) -> str:
    """Return what a process is for, from its command line; empty if it has ended."""
    try:
        name = _program_of(pid)
        # A fork has the command line of the server that it is a fork of.
        is_fork = name == FORK_SERVER and _program_of(_parent_of(pid)) == FORK_SERVER
    except OSError:
        return ""
    return RUNNER if is_fork else name


def _program_of(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return next((word for word in words if word.startswith("triolet.workers.")), "server")


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_running(pid: int) -> bool:
    """Return whether a process has not ended; one that only waits to be reaped has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
