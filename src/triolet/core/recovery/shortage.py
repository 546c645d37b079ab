"""Shortages of a machine's resources: which exceptions are one, and how long to wait before the next attempt.

A shortage is nobody's fault and passes. So it becomes one typed error, `ResourceShortage`: the request that needed the
resource fails with it, and a restart that needed it is tried again after a growing pause, for as long as it takes.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import attrs

from triolet.errors import ResourceShortage

MIN_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 5.0

RESOURCES: Final = {
    errno.EMFILE: "file descriptors for this process (RLIMIT_NOFILE)",
    errno.ENFILE: "file descriptors on this machine",
    errno.EAGAIN: "processes or threads",
    errno.ENOMEM: "memory",
    errno.ENOBUFS: "network buffers",
    errno.ENOSPC: "disk space",
    errno.EDQUOT: "disk quota",
}
# Texts of exceptions that have no errno: of `threading.Thread.start`, and of the dynamic loader in an ImportError.
_TEXTS: Final = {
    "can't start new thread": "processes or threads",
    "annot allocate memory": "memory",
    "failed to map segment": "memory",
}
MAX_CAUSES: Final = 8  # of an exception; a chain of them may be a circle


def shortage_of(error: BaseException, purpose: str) -> ResourceShortage | None:
    """Return the shortage that an exception, or one of its causes, reports; None if it reports none.

    Args:
        error: any exception.
        purpose: what the resource was needed for, completing "there is a shortage of ... for ...".
    """
    cause: BaseException | None = error
    for _ in range(MAX_CAUSES):
        if cause is None:
            break
        if isinstance(cause, ResourceShortage):
            return cause
        if (resource := _resource(cause)) is not None:
            shortage = ResourceShortage(resource, purpose)
            shortage.__cause__ = error
            return shortage
        cause = cause.__cause__
    return None


def _resource(error: BaseException) -> str | None:
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, OSError) and error.errno in RESOURCES:
        return RESOURCES[error.errno]
    if isinstance(error, RuntimeError | ImportError):
        return next((resource for text, resource in _TEXTS.items() if text in str(error)), None)
    return None


@contextmanager
def typed_shortages(purpose: str) -> Iterator[None]:
    """Scope in which every shortage becomes a `ResourceShortage`; other exceptions pass unchanged.

    Args:
        purpose: what resources are needed for, as in `shortage_of`.
    """
    try:
        yield
    except Exception as error:
        if (shortage := shortage_of(error, purpose)) is None or shortage is error:
            raise
        raise shortage from error


@attrs.define
class Backoff:
    """Pauses between attempts: each is twice as long as the last one, up to a limit.

    Args:
        min_s: the first pause, seconds.
        max_s: the longest pause, seconds.
    """

    min_s: float = MIN_PAUSE_S
    max_s: float = MAX_PAUSE_S
    _next_s: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._next_s = self.min_s

    def next_s(self) -> float:
        """Return the pause before the next attempt, seconds."""
        pause_s, self._next_s = self._next_s, min(self._next_s * 2, self.max_s)
        return pause_s

    def reset(self) -> None:
        """Begin with the first pause again: an attempt has succeeded."""
        self._next_s = self.min_s
