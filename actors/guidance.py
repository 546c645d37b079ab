"""The guidance actor: says what may come next in the answers that are bound to a form.

The scheduler names the requests that need guidance and goes on with the others; what it is told is put down in the
journal. So this actor keeps nothing that is not there: its next life, and the next processes of its grammars, follow
the answers again from their beginnings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import trio

from triolet.actors.grammar_process import (
    GrammarFailed,
    Grammars,
)
from triolet.core.guidance import Guidance, Thinking, only
from triolet.core.journal import Journal, JournalEntry
from triolet.core.model_info import ModelInfo
from triolet.core.structured_outputs import StructuredOutputsParams
from triolet.ipc.grammar import Guided

PATIENCE_S = 0.002
"""How long a step waits for guidance. It takes some 0.2 ms; whoever needs longer sits the step out."""

OpenGrammars = Callable[[], AbstractAsyncContextManager[Grammars]]


class GuidanceDesk:
    """Where the scheduler asks and the guidance actor answers; it outlives both.

    Args:
        journal: where requests and their guidance are.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._asked: dict[int, None] = {}
        self._given: dict[int, Guidance] = {}
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

    def take_given(self) -> dict[int, Guidance]:
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
        while self._grammars is None:
            self.wants_grammars = True
            self._questions.unpark_all()
            await self._arrivals.park()
        await self._grammars.open(params)

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
        self._asked.update((entry.serial, None) for entry in self._journal if entry.awaits_guidance)

    def serve(self, grammars: Grammars | None) -> None:
        """These are the grammars from now on; None for none."""
        self._grammars = grammars
        self.wants_grammars = False
        self._arrivals.unpark_all()

    def answer(self, serial: int, guidance: Guidance) -> None:
        """Put down what may come next."""
        self._given[serial] = guidance
        self._latest.discard(serial)


async def guidance_actor(
    desk: GuidanceDesk,
    journal: Journal,
    info: Callable[[], ModelInfo],
    open_grammars: OpenGrammars,
    wake_scheduler: Callable[[], None],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer questions until cancelled. The process of grammars is started when the first one is wanted.

    Args:
        desk: where questions come from.
        journal: the answers so far.
        info: of the model.
        open_grammars: the scope in which grammars are served.
        wake_scheduler: have it look at what was answered.
    """
    desk.ask_again()
    guide = Guide(desk, journal, info, wake_scheduler)
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        stack.callback(desk.serve, None)
        task_status.started()
        while True:
            serials = await desk.questions()
            if guide.grammars is None and (desk.wants_grammars or guide.needs_grammars(serials)):
                guide.grammars = await stack.enter_async_context(open_grammars())
                desk.serve(guide.grammars)
            for params, answers in guide.sort(serials).items():
                nursery.start_soon(guide.ask, params, answers)


class Guide:
    """One life of the actor."""

    def __init__(
        self,
        desk: GuidanceDesk,
        journal: Journal,
        info: Callable[[], ModelInfo],
        wake_scheduler: Callable[[], None],
    ) -> None:
        self.grammars: Grammars | None = None
        self._desk, self._journal, self._info, self._wake_scheduler = desk, journal, info, wake_scheduler
        self._thinking: dict[int, Thinking] = {}

    def needs_grammars(self, serials: Iterable[int]) -> bool:
        """Whether any of these requests is bound to a grammar."""
        constraints = [entry.request.constraint for entry in map(self._journal.get, serials) if entry]
        return any(constraint is not None and constraint.grammar is not None for constraint in constraints)

    def sort(self, serials: Iterable[int]) -> dict[StructuredOutputsParams, dict[int, tuple[int, ...]]]:
        """Answer what can be answered at once; what a grammar must be asked, by grammar."""
        self._thinking = {
            serial: thinking for serial, thinking in self._thinking.items() if serial in self._journal
        }
        if self.grammars is not None:
            self.grammars.forget(self._journal.__contains__)
        asked: dict[StructuredOutputsParams, dict[int, tuple[int, ...]]] = defaultdict(dict)
        for entry in filter(None, map(self._journal.get, serials)):
            if entry.awaits_guidance and (answer := self._freely(entry)) is not None:
                params, token_ids = answer
                asked[params][entry.serial] = token_ids
        return asked

    def _freely(self, entry: JournalEntry) -> tuple[StructuredOutputsParams, tuple[int, ...]] | None:
        """Answer without a grammar, if none is in force; else the grammar, and what it must know of the answer."""
        constraint, output = entry.request.constraint, entry.output_token_ids
        assert constraint is not None
        thinking = self._thinking.setdefault(entry.serial, Thinking(constraint.thinking))
        thinking.follow(output)
        if thinking.ended is not None and constraint.grammar is not None:
            return constraint.grammar, tuple(output[thinking.ended :])
        forced = thinking.forced_token_id(output)
        mask = None if forced is None else only(forced, self._info().vocab_size)
        self._answer(entry.serial, Guidance(len(output), mask))
        return None

    def _answer(self, serial: int, guidance: Guidance) -> None:
        self._desk.answer(serial, guidance)
        self._wake_scheduler()

    async def ask(self, params: StructuredOutputsParams, answers: dict[int, tuple[int, ...]]) -> None:
        """Ask one grammar about some answers. If it fails, ask about each alone: one of them may be the reason."""
        assert self.grammars is not None
        try:
            guided = await self.grammars.guide(params, answers)
        except GrammarFailed as error:
            if len(answers) > 1:
                for serial, token_ids in answers.items():
                    await self.ask(params, {serial: token_ids})
                return
            [serial] = answers
            guided = (Guided(serial, len(answers[serial]), b"", False, f"its grammar failed: {error}"),)
        for one in guided:
            self._put_down(one, len(answers[one.serial]))

    def _put_down(self, guided: Guided, num_tokens: int) -> None:
        entry = self._journal.get(guided.serial)
        if entry is None:
            return
        position = len(entry.output_token_ids)  # nothing is added to an answer that awaits guidance
        problem = guided.problem or None
        self._answer(guided.serial, Guidance(position, guided.mask, guided.is_over, problem))
