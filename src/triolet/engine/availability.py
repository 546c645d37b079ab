"""State of an engine: open, closed or dead."""

from __future__ import annotations

import attrs

from triolet.errors import EngineClosed, EngineDead


@attrs.define
class Availability:
    """State of an engine: open, then closed or dead. Death is final.

    Args:
        is_serving: whether admitted requests are still computed; True also while an engine drains.
    """

    is_serving: bool = True
    _closed: str | None = None
    _cause: BaseException | None = None
    _was_death_told: bool = False

    @property
    def is_open(self) -> bool:
        """True if requests are taken."""
        return self._closed is None and self._cause is None

    @property
    def death(self) -> EngineDead | None:
        """Error of a dead engine; None while it lives."""
        return None if self._cause is None else death_by(self._cause)

    def close(self, reason: str, *, still_serving: bool = False) -> None:
        """Refuse requests from now on; the first reason stays.

        Args:
            reason: text of the error for later requests.
            still_serving: whether admitted requests go on, if they have not been ended before.
        """
        self._closed = self._closed or reason
        self.is_serving &= still_serving

    def die(self, cause: BaseException, *, was_told: bool) -> None:
        """Record the death of the engine.

        Args:
            cause: error of the last crash.
            was_told: whether a stream gets the error now.
        """
        self._cause = cause
        self._was_death_told = was_told

    def check_open(self) -> None:
        """Check that requests are taken.

        Raises:
            EngineDead: the engine has died.
            EngineClosed: the engine is closed or drains.
        """
        if (death := self.death) is not None:
            self._was_death_told = True
            raise death
        if self._closed is not None:
            raise EngineClosed(self._closed)

    def check_death_told(self) -> None:
        """Raise the death of the engine, if no stream and no caller has seen it.

        Raises:
            EngineDead: the engine has died, and no stream or caller has got the error.
        """
        if not self._was_death_told and (death := self.death) is not None:
            raise death


def death_by(cause: BaseException) -> EngineDead:
    """Return a new error for a dead engine."""
    # One for each reader: a shared one would collect the tracebacks of all.
    error = EngineDead(f"the engine gave up after repeated crashes; the last one was: {cause!r}")
    error.__cause__ = cause
    return error
