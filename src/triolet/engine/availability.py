"""Whether an engine takes requests, and why it does not."""

from __future__ import annotations

import attrs

from triolet.errors import EngineClosed, EngineDead


@attrs.define
class Availability:
    """An engine is open, then closed or dead. A dead one is never anything else again.

    Args:
        is_serving: whether what was taken in is still computed; an engine that drains takes nothing new and serves.
    """

    is_serving: bool = True
    _closed: str | None = None
    _cause: BaseException | None = None
    _was_death_told: bool = False

    @property
    def is_open(self) -> bool:
        """Whether requests are taken."""
        return self._closed is None and self._cause is None

    @property
    def death(self) -> EngineDead | None:
        """Why nothing will be served any more; None while the engine lives."""
        return None if self._cause is None else death_by(self._cause)

    def close(self, reason: str, *, still_serving: bool = False) -> None:
        """Take nothing new from now on; the first reason is the one that is given.

        Args:
            reason: what those hear who come too late.
            still_serving: what was taken in goes on, if it has not been ended before.
        """
        self._closed = self._closed or reason
        self.is_serving &= still_serving

    def die(self, cause: BaseException, *, was_told: bool) -> None:
        """Nothing is served any more.

        Args:
            cause: of the last crash.
            was_told: whether somebody hears of it now.
        """
        self._cause = cause
        self._was_death_told = was_told

    def check_open(self) -> None:
        """Refuse what comes too late.

        Raises:
            EngineDead, EngineClosed: the engine is.
        """
        if (death := self.death) is not None:
            self._was_death_told = True
            raise death
        if self._closed is not None:
            raise EngineClosed(self._closed)

    def check_death_told(self) -> None:
        """A death that no stream and no caller has seen must not pass in silence.

        Raises:
            EngineDead: nobody has.
        """
        if not self._was_death_told and (death := self.death) is not None:
            raise death


def death_by(cause: BaseException) -> EngineDead:
    """An error of the reader's own: tracebacks grow where errors are shared."""
    error = EngineDead(f"the engine gave up after repeated crashes; the last one was: {cause!r}")
    error.__cause__ = cause
    return error
