"""Answers that are being made, by their ids: somebody else than who asked for one can look at it, and end it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import trio

from triolet.actors.answering import Room, Tell, go_on_with_answer, make_answer
from triolet.actors.engine import Engine
from triolet.actors.stream import TokenStream
from triolet.wire.answer import Answer
from triolet.wire.items import Message
from triolet.wire.kept_answers import Rest


@attrs.frozen(eq=False)
class _Running:
    answer: Answer
    owner: str | None
    tell: Tell
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)


@attrs.frozen(eq=False)
class RunningAnswers:
    """Those of one server, whatever they are told over."""

    _running: dict[str, _Running] = attrs.field(factory=dict, init=False)

    @property
    def ids(self) -> tuple[str, ...]:
        """Of all of them."""
        return tuple(self._running)

    async def make(
        self,
        engine: Engine,
        answer: Answer,
        messages: list[Message],
        owner: str | None,
        tell: Tell,
        room: Room,
    ) -> None:
        """See `make_answer`; an answer that `cancel` ends is told to its end, too."""
        with self._registered(answer, owner, tell):
            await make_answer(engine, answer, messages, owner, tell, room)

    async def go_on(
        self, answer: Answer, owner: str | None, stream: TokenStream, rest: Rest, tell: Tell, room: Room
    ) -> None:
        """See `go_on_with_answer`; the rest is as in `make`."""
        with self._registered(answer, owner, tell):
            await go_on_with_answer(answer, stream, rest, tell, room)

    @contextmanager
    def _registered(self, answer: Answer, owner: str | None, tell: Tell) -> Iterator[None]:
        running = self._running[answer.response_id] = _Running(answer, owner, tell)
        try:
            with running.scope:
                yield
        finally:
            del self._running[answer.response_id]

    def find(self, response_id: str, owner: str | None) -> Answer | None:
        """The answer of that id, if it is this owner's."""
        running = self._running.get(response_id)
        return running.answer if running is not None and running.owner == owner else None

    def cancel(self, response_id: str, owner: str | None, now: int) -> Answer | None:
        """End an answer with what there is; its blocks are free within a step.

        Args:
            response_id: which.
            owner: whose it must be.
            now: seconds since the epoch.
        Returns:
            The answer, which is over; None if none of that id is being made.
        """
        answer = self.find(response_id, owner)
        if answer is not None:
            running = self._running[response_id]
            running.tell(answer.cancel(now))
            running.scope.cancel()
        return answer
