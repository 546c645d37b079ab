"""The end of a process is known from the end of its lifeline, and how it ends before the system is done with it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from typing import Self

import pytest

from tests.source_tree import SRC
from triolet.actors.executors.child_process import exit_code_of

HOLDER = """
import os, signal, sys, time
from triolet.workers.runner import hold_lifeline
fd, other = map(int, sys.argv[1:3])
hold_lifeline(fd, {other}, lambda: (os.write(other, b"here"), time.sleep(60)))
try:
    os.fstat(fd)
    print("shared", flush=True)
except OSError:
    print("alone", flush=True)
for name in sys.stdin:
    exec(name)
"""
linux = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere a table of descriptors is the process's"
)


class Holder:
    """A process that holds a lifeline, and does what it is told in a line of Python."""

    def __init__(self) -> None:
        self.lifeline, life_end = os.pipe()
        self.other, other_end = os.pipe()
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-c", HOLDER, str(life_end), str(other_end)],
            pass_fds=[life_end, other_end],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(SRC)},
        )
        os.close(life_end)
        os.close(other_end)
        assert self.popen.stdout is not None
        self.kind = self.popen.stdout.readline().decode().strip()

    def do(self, line: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(line.encode() + b"\n")
        self.popen.stdin.flush()

    def has_ended(self, timeout_s: float) -> bool:
        return bool(select.select([self.lifeline], [], [], timeout_s)[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.popen.kill()
        self.popen.communicate()
        os.close(self.lifeline)
        os.close(self.other)


@linux
def test_only_one_thread_holds_a_lifeline_and_keeps_what_it_needs() -> None:
    with Holder() as holder:
        assert holder.kind == "alone"
        assert os.read(holder.other, 4) == b"here"
        assert not holder.has_ended(0.05)


@linux
def test_a_process_of_the_processes_own_does_not_hold_its_lifeline() -> None:
    with Holder() as holder:
        holder.do("import subprocess; child = subprocess.Popen(['sleep', '5'], close_fds=False, stdout=2)")
        holder.do("print(child.pid, flush=True)")
        assert holder.popen.stdout is not None and holder.popen.stdout.readline()
        holder.popen.kill()
        assert holder.has_ended(4.0)


@pytest.mark.parametrize(
    ("line", "returncode"),
    [
        ("os._exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("os.abort()", -6),
        ("raise OSError", 1),
    ],
)
def test_its_end_comes_with_that_of_the_process_and_the_exit_code_is_known_by_then(
    line: str, returncode: int
) -> None:
    with Holder() as holder:
        holder.do(line)
        assert holder.has_ended(10.0)
        assert os.read(holder.lifeline, 1) == b""
        known = exit_code_of(holder.popen.pid)
        assert known in (0, returncode) or (
            known is None and sys.platform != "linux"
        )  # 0: it is about to end
        holder.popen.wait()
        assert holder.popen.returncode == returncode


@linux
def test_how_a_process_ends_that_was_killed_is_known_at_once() -> None:
    with Holder() as holder:
        assert exit_code_of(holder.popen.pid) == 0
        holder.popen.kill()
        assert exit_code_of(holder.popen.pid) == -9


def test_the_exit_code_of_a_process_that_is_gone_is_not_known() -> None:
    with Holder() as holder:
        pass
    assert exit_code_of(holder.popen.pid) is None
