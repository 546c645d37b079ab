"""Answers that survive the loss of the connection that asked for them.

A resumable answer is made by a task of the gateway's, and read by one of a connection's. It is made no faster than it
is read: while nobody reads, the engine's outputs join in their stream, and when nobody has read for the grace period,
the stream is left, which is the abort. What was sent is logged, so that another connection can begin at any number.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import attrs
import trio

from triolet.protocol.errors import WireError
from triolet.protocol.responses.output_items import Event
from triolet.protocol.responses.response import ResponseBuilder

Make = Callable[[ResponseBuilder, Callable[[], Awaitable[None]], Callable[[], None]], Awaitable[None]]
"""Has an answer made: waits for the first function before each step, and calls the second after it."""


@attrs.define(eq=False)
class ResumableResponse:
    """One answer, and who reads it.

    Args:
        answer: see there; it logs its events.
        owner: who may read it.
        error: what it could not even begin for.
        is_hurried: it waits for no reader any more.
    """

    answer: ResponseBuilder
    owner: str | None
    error: BaseException | None = None
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    num_readers: int = 0
    is_made: bool = False
    is_hurried: bool = False
    _makers: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)
    _readers: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)

    async def wanted(self) -> None:
        """Wait until a reader has read everything."""
        await trio.lowlevel.checkpoint()
        while not self._readers and not self.is_hurried:
            await self._makers.park()

    def grown(self) -> None:
        """There is more to read, or nothing more will come."""
        self._readers.unpark_all()

    async def made(self) -> None:
        """Have it made to its end, however much of it has been read."""
        self.is_hurried = True
        while not self.is_made:
            await self.more()

    async def more(self) -> None:
        """Everything has been read: wait for more, if more will come."""
        self._makers.unpark_all()
        if not self.is_made:  # perhaps since its reader last looked
            await self._readers.park()


@attrs.define(eq=False)
class ResumableResponses:
    """All that can be resumed on this server.

    Args:
        nursery: of the gateway's.
        grace_s: how long an answer waits for its reader, and can be read again after its end; seconds.
        max_answers: how many there may be.
        on_over: told of every answer that was made to its end, whoever reads it.
    """

    nursery: trio.Nursery
    grace_s: float
    max_answers: int
    on_over: Callable[[ResponseBuilder, str | None], None]
    _answers: dict[str, ResumableResponse] = attrs.field(factory=dict, init=False)

    def find(self, response_id: str, owner: str | None) -> ResponseBuilder | None:
        """The answer of that id, if this owner may read it."""
        kept = self._answers.get(response_id)
        return kept.answer if kept is not None and kept.owner == owner else None

    def begin(self, answer: ResponseBuilder, owner: str | None, make: Make) -> None:
        """Have an answer made, as fast as it will be read.

        Raises:
            WireError: there are too many already.
        """
        if len(self._answers) >= self.max_answers:
            raise WireError(
                "The server keeps as many resumable responses as it can.",
                code="rate_limit_exceeded",
                status=429,
                type="rate_limit_error",
                retry_after_s=self.grace_s,
            )
        kept = self._answers[answer.response_id] = ResumableResponse(answer, owner)
        self.nursery.start_soon(self._make, kept, make)

    def take_up(self, answer: ResponseBuilder, owner: str | None, make: Make) -> None:
        """Have an answer made on that the last server has begun: as `begin`, but it waits for its reader."""
        kept = self._answers[answer.response_id] = ResumableResponse(answer, owner)
        self.nursery.start_soon(self._make, kept, make)
        self.nursery.start_soon(self._expect_reader, kept)

    async def _expect_reader(self, kept: ResumableResponse) -> None:
        """A deadline would be the request's own: this one ends only what nobody reads."""
        await trio.sleep(self.grace_s)
        if not kept.num_readers and kept.scope.deadline == float("inf"):
            kept.scope.cancel()

    async def run_all_to_end(self) -> list[tuple[ResponseBuilder, str | None]]:
        """Every answer and its owner, once the engine has nothing left for any of them: it has been drained."""
        for kept in tuple(self._answers.values()):
            await kept.made()
        return [(kept.answer, kept.owner) for kept in self._answers.values()]

    async def read(
        self,
        answer: ResponseBuilder,
        starting_after: int,
        emit: Callable[[Sequence[Event]], None],
        wait_for_room: Callable[[], Awaitable[None]],
    ) -> None:
        """Tell of every event after a number, up to the last one.

        Args:
            answer: that `find` has found, or that was begun.
            starting_after: the number.
            tell: gets the events.
            room: waits until it should get more.
        Raises:
            Exception: what the engine refused the request with.
        """
        kept = self._answers[answer.response_id]
        with self._reading(kept):
            while True:
                if events := answer.events_after(starting_after):
                    starting_after = events[-1]["sequence_number"]
                    emit(events)
                if kept.error is not None:
                    raise kept.error
                if answer.is_over or kept.is_made:
                    return
                await wait_for_room()
                await kept.more()

    @contextmanager
    def _reading(self, kept: ResumableResponse) -> Iterator[None]:
        kept.num_readers += 1
        kept.scope.deadline = float("inf")
        try:
            yield
        finally:
            kept.num_readers -= 1
            if kept.answer.is_over:  # perhaps because it was cancelled
                kept.scope.cancel()
            elif not kept.num_readers:
                kept.scope.deadline = trio.current_time() + self.grace_s

    async def _make(self, kept: ResumableResponse, make: Make) -> None:
        try:
            with kept.scope:
                await make(kept.answer, kept.wanted, kept.grown)
        except Exception as error:
            kept.error = error
        kept.is_made = True
        if kept.answer.is_over:
            self.on_over(kept.answer, kept.owner)
        kept.grown()
        if kept.answer.is_over or kept.answer.is_handed_over:
            await trio.sleep(self.grace_s)
        del self._answers[kept.answer.response_id]
