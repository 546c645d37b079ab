"""Conversion of exceptions to one line on stderr and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import IO, Any, Final

import click
from click.exceptions import Exit

from triolet.errors import ConfigError, TrioletError, shown

INTERRUPTED: Final = 130  # 128 + SIGINT, what a shell reports for a program that Ctrl-C ended
TERMINATED: Final = 143  # 128 + SIGTERM
# They come from a write, which unlike an opening does not know the file.
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CommandFailure(click.ClickException):
    """Failure of a command that was called correctly; exit code 1."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"triolet: error: {self.message}", err=True, file=file)


def ending(error: BaseException) -> click.ClickException | Exit:
    """Return the exception by which click ends; with TRIOLET_DEBUG=1 the traceback is printed first.

    Args:
        error: exception of a command; a group of a single exception counts as that exception.
    """
    error = unwrapped(error)
    if isinstance(error, SystemExit | Exit):
        return Exit(_exit_code(error))
    if isinstance(error, KeyboardInterrupt):
        return Exit(INTERRUPTED)
    if isinstance(error, BrokenPipeError):
        return _reader_left()
    if os.environ.get("TRIOLET_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)
    if isinstance(error, click.ClickException):
        return error
    if isinstance(error, ConfigError):
        flag = "--" + error.field.replace("_", "-")
        return click.UsageError(f"{flag} must be {error.rule}; got {shown(error.got)}")
    return CommandFailure(one_line(error))


def one_line(error: BaseException) -> str:
    """Return the message of `error` in one line; it names the file of an `OSError`, and else an unexpected type."""
    message = " ".join(str(error).split())
    if isinstance(error, TrioletError):
        return message
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)} cannot be read or written; {error.strerror}"
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return f"the output cannot be written; {error.strerror}"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def unwrapped(error: BaseException) -> BaseException:
    """Return the first exception inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _exit_code(error: SystemExit | Exit) -> int:
    code = error.exit_code if isinstance(error, Exit) else error.code
    return code if isinstance(code, int) else int(code is not None)


def _reader_left() -> Exit:
    # `triolet ... | head` is no failure. The flush at exit must not fail again, so stdout becomes /dev/null.
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
    return Exit(0)
