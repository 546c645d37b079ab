"""Processes of this machine that compute for an engine: children of this one, and children of a fork server.

The system tells only a parent how a child has ended. The parent of a forked process is the fork server, which waits for
it and writes the exit code into a pipe.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

import attrs
import trio

from triolet.config.engine import EngineConfig

SECRET_VARIABLES: Final = EngineConfig.secret_variables()

# Of the fields behind the name in /proc/PID/stat.
STAT_TIMES = slice(11, 13)  # in user mode and in the system, ticks
STAT_EXIT_CODE = 49
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
EXIT_CODE: Final = struct.Struct("i")
"""What a fork server writes when a process has ended: its exit code, as in `Popen.returncode`."""


class ChildProcess(Protocol):
    """Process that can be killed and waited for."""

    @property
    def pid(self) -> int:
        """Number of the process."""
        ...

    @property
    def returncode(self) -> int | None:
        """Exit code of a process that has been waited for, as in `Popen`; None before."""
        ...

    @property
    def is_alive(self) -> bool:
        """False once the system says that it has ended."""
        ...

    def kill(self) -> None:
        """Kill it; harmless when repeated, and after its end."""
        ...

    async def wait(self) -> None:
        """Wait until it has ended, and the system has freed what it held. Once only, or `end_now`."""
        ...

    def end_now(self) -> None:
        """Kill it, block until it has ended, and close what belongs to it."""
        ...


@attrs.define(eq=False)
class SpawnedProcess:
    """Child of this process."""

    popen: subprocess.Popen[bytes]
    _pidfd: int | None  # of Linux only; open until the process has been reaped

    @classmethod
    def spawn(
        cls, command: Sequence[str], cores: frozenset[int] | None = None, **options: Any
    ) -> SpawnedProcess:
        """Start a process; return when its program has been found.

        Args:
            cores: that it is bound to, as far as the system can do that; None for those of this one.
            options: of `Popen`.
        Raises:
            OSError: no process can be started now; nothing is left of the attempt.
        """
        # A Ctrl-C at the terminal is for the engine, which knows in which order to stop.
        popen = subprocess.Popen(command, start_new_session=True, **options)
        try:
            if cores is not None and sys.platform == "linux":
                with suppress(OSError):  # the load says what is wrong with them
                    os.sched_setaffinity(popen.pid, cores)
            # Opened here, where it may fail: the task that waits for the end of the process has no one to tell.
            return cls(popen, os.pidfd_open(popen.pid) if sys.platform == "linux" else None)
        except BaseException:
            popen.kill()
            popen.wait()
            raise

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def returncode(self) -> int | None:
        return self.popen.returncode

    @property
    def is_alive(self) -> bool:
        return self.popen.poll() is None

    def kill(self) -> None:
        self.popen.kill()

    async def wait(self) -> None:
        if self.popen.poll() is not None:  # `Popen.kill` looks first, and reaps
            await trio.lowlevel.checkpoint()
        elif self._pidfd is not None:
            await trio.lowlevel.wait_readable(self._pidfd)
            self.popen.wait()
        else:
            await trio.to_thread.run_sync(self.popen.wait, limiter=trio.CapacityLimiter(1))

    def end_now(self) -> None:
        self.popen.kill()
        self.popen.wait()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


@attrs.define(eq=False)
class ForkedProcess:
    """Child of a fork server."""

    pid: int
    _pidfd: int  # open until its end is known
    _exit: int  # to read its exit code from
    returncode: int | None = attrs.field(default=None, init=False)

    @property
    def is_alive(self) -> bool:
        return self.returncode is None and not _is_readable(self._pidfd)

    def kill(self) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait(self) -> None:
        await trio.lowlevel.wait_readable(self._pidfd)
        # A fork server that hangs leaves it to be asked for here.
        if (code := exit_code_of(self.pid)) is None:
            await trio.lowlevel.wait_readable(self._exit)
        self._note_end(code)

    def end_now(self) -> None:
        self.kill()
        if self.returncode is None:
            _is_readable(self._pidfd, None)
            self._note_end(exit_code_of(self.pid))

    def _note_end(self, code: int | None) -> None:
        told = os.read(self._exit, EXIT_CODE.size) if code is None or _is_readable(self._exit) else b""
        if len(told) == EXIT_CODE.size:
            [code] = EXIT_CODE.unpack(told)
        # A fork server that has ended has taken its children along.
        self.returncode = -signal.SIGKILL if code is None else code
        os.close(self._pidfd)
        os.close(self._exit)


def _is_readable(fd: int, timeout_ms: int | None = 0) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_ms))


def describe_exit(returncode: int) -> str:
    """Describe an exit in words, for a log."""
    if returncode >= 0:
        return f"ended with exit status {returncode}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"was killed by signal {-returncode}"


def exit_code_of(process_id: int) -> int | None:
    """Return the exit code of a process that is dying or not yet waited for, as in `Popen.returncode`.

    Returns:
        None if it cannot be known before the process is waited for; 0 if it lives or is about to end.
    """
    with suppress(OSError, ValueError, IndexError):
        return os.waitstatus_to_exitcode(int(_stat_of(process_id)[STAT_EXIT_CODE]))
    return None


def processor_s_of(process_id: int) -> float:
    """Return the processor time that a process has used, seconds; 0 if the system does not say."""
    with suppress(OSError, ValueError):
        return sum(map(int, _stat_of(process_id)[STAT_TIMES])) / TICKS_PER_S
    return 0.0


def _stat_of(process_id: int) -> list[bytes]:
    """Return the fields behind the name that Linux tells of a process.

    Raises:
        OSError: there is no such process, or another system.
    """
    with open(f"/proc/{process_id}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def worker_environment() -> dict[str, str]:
    """Return this program's environment without secrets, and with its module search path."""
    search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    shared = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    return {**shared, "PYTHONPATH": search_path}
