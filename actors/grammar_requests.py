"""Where the scheduler asks what may come next in an answer, and where it finds what was found out."""

from __future__ import annotations

from collections.abc import Iterable

import trio

from triolet.actors.executors.grammars import Grammars, GrammarsDied
from triolet.core.journal import Journal
from triolet.core.request.grammar_state import TokenMask
from triolet.core.request.structured_outputs import StructuredOutputsParams

PATIENCE_S = 0.002
"""How long a step waits for guidance. It takes some 0.2 ms; whoever needs longer sits the step out."""


class GrammarRequests:
    """Where the scheduler asks and the guidance actor answers; it outlives both.

    Args:
        journal: where requests and their guidance are.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._asked: dict[int, None] = {}
        self._given: dict[int, TokenMask] = {}
        self._latest: set[int] = set()
        self._patient_until_s = 0.0
        self._questions = trio.lowlevel.ParkingLot()
        self.wants_grammars = False
        self._grammars: Grammars | None = None
        self._arrivals = trio.lowlevel.ParkingLot()

    # -------------------------------------------------------------------------------- the scheduler's side

    def ask(self, serials: Iterable[int], now_s: float) -> None:
        """These requests need guidance. Never waits."""
        if serials := dict.fromkeys(serials):
            self._asked.update(serials)
            self._latest, self._patient_until_s = set(serials), now_s + PATIENCE_S
            self._questions.unpark_all()

    def take_given(self) -> dict[int, TokenMask]:
        """What was answered since the last call."""
        given, self._given = self._given, {}
        return given

    def step_waits_until(self, now_s: float) -> float:
        """Until when the next step should wait, monotonic seconds; infinity if it should not."""
        self._latest = {serial for serial in self._latest if serial in self._journal}
        waits = bool(self._latest) and now_s < self._patient_until_s
        return self._patient_until_s if waits else float("inf")

    # ---------------------------------------------------------------------------------- the caller's side

    async def open_grammar(self, params: StructuredOutputsParams) -> None:
        """Have a grammar compiled before a request with it is let in.

        Raises:
            InvalidParams: it can not be.
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

    # ----------------------------------------------------------------------------------- the actor's side

    async def questions(self) -> tuple[int, ...]:
        """Wait for requests that need guidance, or for somebody who needs a grammar; the former."""
        while not self._asked and not (self.wants_grammars and self._grammars is None):
            await self._questions.park()
        asked = tuple(self._asked)
        self._asked.clear()
        return asked

    def ask_again(self) -> None:
        """A new life of the actor knows not what the last one was asked."""
        self._asked.update((entry.serial, None) for entry in self._journal if entry.awaits_mask)

    def serve(self, grammars: Grammars | None) -> None:
        """These are the grammars from now on; None for none."""
        self._grammars = grammars
        self.wants_grammars = False
        self._arrivals.unpark_all()

    def answer(self, serial: int, guidance: TokenMask) -> None:
        """Put down what may come next."""
        self._given[serial] = guidance
        self._latest.discard(serial)
