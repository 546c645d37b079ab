"""Meeting point of tasks that need grammars and the actor that serves them; each side waits here for the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import trio

from triolet.actors.executors.grammar.grammars import Grammars, GrammarsDied
from triolet.core.engine_core import GrammarMasks
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.errors import ResourceShortage


class GrammarRequests:
    """Grammars that are served now, and the tasks that wait for them; it outlives the structured-output actor.

    Args:
        masks: questions of the scheduler.
    """

    def __init__(self, masks: GrammarMasks) -> None:
        self.masks = masks
        self.wants_grammars = False
        self.num_hangs: Counter[int] = Counter()  # of the actor over a request, by serial
        self._questions = trio.lowlevel.ParkingLot()
        self._grammars: Grammars | None = None
        self._shortage: ResourceShortage | None = None  # that kept the latest grammars from being served
        self._arrivals = trio.lowlevel.ParkingLot()
        self.opening_s: dict[object, float] = {}  # since when each task waits for its grammar, oldest first
        self._openings: set[trio.CancelScope] = set()
        self._num_pauses = 0  # of the actor, before it asks once more
        self._is_starting = False  # the process of the grammars, which has a time limit
        self._handled: Counter[int] = Counter()  # requests whose grammars are being asked, by serial

    def wake(self) -> None:
        """Wake the actor if there are questions for it."""
        if self.masks.has_questions:
            self._questions.unpark_all()

    async def open_grammar(self, params: StructuredOutputsParams, owner: str | None = None) -> None:
        """Have a grammar compiled, before a request that is bound to it is admitted.

        Raises:
            InvalidParams: it cannot be compiled.
            ResourceShortage: it needs a process, and none can be started now.
            UnsupportedFeature: no grammar works with the model's tokenizer.
        """
        question = object()
        self.opening_s[question] = trio.current_time()
        try:
            while not await self._open(await self._served_grammars(), params, owner):
                pass
        finally:
            del self.opening_s[question]

    async def _served_grammars(self) -> Grammars:
        while self._grammars is None:
            self.wants_grammars = True
            self._questions.unpark_all()
            await self._arrivals.park()
            if (shortage := self._shortage) is not None:
                raise ResourceShortage(shortage.resource, shortage.purpose) from shortage
        return self._grammars

    async def _open(self, grammars: Grammars, params: StructuredOutputsParams, owner: str | None) -> bool:
        """Compile the grammar; return False if these grammars are replaced meanwhile."""
        with trio.CancelScope() as scope:
            self._openings.add(scope)
            try:
                await grammars.open(params, owner)
                return True
            except GrammarsDied:
                while self._grammars is grammars:  # the actor has not noticed yet
                    await self._arrivals.park()
            finally:
                self._openings.discard(scope)
        return False

    # ----------------------------------------------------------------------------------- the actor's side

    async def questions(self) -> tuple[int, ...]:
        """Wait until masks are asked for, or a grammar is wanted and there are none; return the requests."""
        while not self.masks.has_questions and not (self.wants_grammars and self._grammars is None):
            await self._questions.park()
        return self.masks.take_questions()

    def serve(self, grammars: Grammars | None) -> None:
        """Set the grammars that are served from now on; None for none."""
        self._grammars, self._shortage = grammars, None
        self.wants_grammars = False
        for scope in self._openings:  # whatever they wait for in earlier grammars will not come
            scope.cancel()
        self._arrivals.unpark_all()

    def refuse(self, shortage: ResourceShortage) -> None:
        """Fail the tasks that wait for grammars: there can be none now. The next task makes another attempt."""
        self._shortage = shortage
        self.wants_grammars = False
        self._arrivals.unpark_all()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Scope in which the actor starts grammars, within a time limit of their own; all other questions wait."""
        self._is_starting = True
        try:
            yield
        finally:
            self._is_starting = False

    @contextmanager
    def pausing(self, serials: Iterable[int]) -> Iterator[None]:
        """Scope in which the actor waits before it asks grammars about these requests once more."""
        self._num_pauses += 1
        try:
            with self.handling(serials):
                yield
        finally:
            self._num_pauses -= 1

    @contextmanager
    def handling(self, serials: Iterable[int]) -> Iterator[None]:
        """Scope in which grammars are asked about these requests."""
        serials = tuple(serials)
        self._handled.update(serials)
        try:
            yield
        finally:
            self._handled -= Counter(serials)

    # -------------------------------------------------------------------------------- the watchdog's side

    def oldest(self) -> tuple[object, float] | None:
        """Return what has waited longest for the actor, and since when; None if nothing hangs.

        Returns:
            The serial of a request that needs a mask, or an object for a task that waits for its grammar.
        """
        if self._is_starting:
            return None
        is_timed = self._num_pauses > 0 or (self._grammars is not None and self._grammars.is_timed)
        waiting: list[tuple[object, float]] = [
            (serial, at_s)
            for serial, at_s in self.masks.unanswered()
            if not is_timed
            or serial not in self._handled  # grammars wait for each other, but not before they are asked
        ]
        if not is_timed:
            waiting += self.opening_s.items()
        return min(waiting, key=lambda item: item[1], default=None)

    def count_hang(self) -> None:
        """Note that the actor is being ended because of the oldest question."""
        oldest = self.oldest()
        if oldest is not None and isinstance(oldest[0], int):
            self.num_hangs[oldest[0]] += 1
