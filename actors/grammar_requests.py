"""Where tasks wait for grammars, and the actor that serves grammars waits for tasks."""

from __future__ import annotations

import trio

from triolet.actors.executors.grammars import Grammars, GrammarsDied
from triolet.core.grammar_masks import GrammarMasks
from triolet.core.request.structured_outputs import StructuredOutputsParams


class GrammarRequests:
    """Meeting point of the structured-output actor with the tasks that need grammars; it outlives the actor.

    Args:
        masks: where the scheduler asks for masks.
    """

    def __init__(self, masks: GrammarMasks) -> None:
        self.masks = masks
        self.wants_grammars = False
        self._questions = trio.lowlevel.ParkingLot()
        self._grammars: Grammars | None = None
        self._arrivals = trio.lowlevel.ParkingLot()

    def wake(self) -> None:
        """Wake the actor if there are questions for it."""
        if self.masks.has_questions:
            self._questions.unpark_all()

    async def open_grammar(self, params: StructuredOutputsParams) -> None:
        """Have a grammar compiled, before a request that is bound to it is admitted.

        Raises:
            InvalidParams: it cannot be compiled.
            UnsupportedFeature: no grammar works with the model's tokenizer.
        """
        while True:
            while self._grammars is None:
                self.wants_grammars = True
                self._questions.unpark_all()
                await self._arrivals.park()
            grammars = self._grammars
            try:
                return await grammars.open(params)
            except GrammarsDied:
                while self._grammars is grammars:  # the actor has not noticed yet
                    await self._arrivals.park()

    async def questions(self) -> tuple[int, ...]:
        """Wait until masks are asked for, or a grammar is wanted and there are none; return the requests."""
        while not self.masks.has_questions and not (self.wants_grammars and self._grammars is None):
            await self._questions.park()
        return self.masks.take_questions()

    def serve(self, grammars: Grammars | None) -> None:
        """Set the grammars that are served from now on; None for none."""
        self._grammars = grammars
        self.wants_grammars = False
        self._arrivals.unpark_all()
