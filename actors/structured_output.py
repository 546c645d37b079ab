"""The guidance actor: says what may come next in the answers that are bound to a form.

The scheduler names the requests that need guidance and goes on with the others; what it is told is put down in the
journal. So this actor keeps nothing that is not there: its next life, and the next processes of its grammars, follow
the answers again from their beginnings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import AsyncExitStack

import trio

from triolet.actors.channels import Wiring
from triolet.actors.executors.grammars import GrammarFailed, GrammarRefused, Grammars, OpenGrammars
from triolet.core.journal import JournalEntry
from triolet.core.request.grammar_state import Thinking, TokenMask, only, with_token
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.ipc.grammar import MaskAnswer


async def structured_output_actor(
    wiring: Wiring,
    open_grammars: OpenGrammars,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer questions until cancelled. The processes of grammars are started when the first one is wanted.

    Args:
        wiring: of the engine.
        open_grammars: the scope in which grammars are served.
    """
    desk, guide = wiring.guidance, StructuredOutputManager(wiring)
    desk.ask_again()
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        stack.callback(desk.serve, None)
        task_status.started()
        while True:
            serials = await desk.questions()
            if guide.grammars is None and (desk.wants_grammars or guide.needs_grammars(serials)):
                guide.grammars = await stack.enter_async_context(open_grammars())
                desk.serve(guide.grammars)
                nursery.start_soon(guide.grammars.watch)
            for params, answers in guide.sort(serials).items():
                nursery.start_soon(guide.ask, params, answers)


class StructuredOutputManager:
    """One life of the actor."""

    def __init__(self, wiring: Wiring) -> None:
        self.grammars: Grammars | None = None
        self._wiring, self._desk, self._journal = wiring, wiring.guidance, wiring.journal
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
            if entry.awaits_mask and (answer := self._freely(entry)) is not None:
                params, token_ids = answer
                asked[params][entry.serial] = token_ids
        return asked

    def _freely(self, entry: JournalEntry) -> tuple[StructuredOutputsParams, tuple[int, ...]] | None:
        """Answer without a grammar, if none is in force; else the grammar, and what it must know of the answer."""
        constraint, output = entry.request.constraint, entry.output_token_ids
        assert constraint is not None
        is_bound = constraint.grammar is not None
        thinking = self._thinking.setdefault(entry.serial, Thinking(constraint.thinking, is_bound=is_bound))
        thinking.follow(output)
        is_in_form = thinking.ended is not None or thinking.optional_token_id is not None
        if constraint.grammar is not None and is_in_form:
            return constraint.grammar, tuple(output[thinking.ended or 0 :])
        forced = thinking.forced_token_id(output)
        assert self._wiring.model_info is not None, "the runner starts before requests are let in"
        mask = None if forced is None else only(forced, self._wiring.model_info.vocab_size)
        self._answer(entry.serial, TokenMask(len(output), mask))
        return None

    def _answer(self, serial: int, guidance: TokenMask) -> None:
        self._desk.answer(serial, guidance)
        self._wiring.wake_scheduler()

    async def ask(self, params: StructuredOutputsParams, answers: dict[int, tuple[int, ...]]) -> None:
        """Ask one grammar about some answers. If it fails, ask about each alone: one of them may be the reason."""
        assert self.grammars is not None
        try:
            guided = await self.grammars.guide(params, answers)
        except (GrammarFailed, GrammarRefused) as error:  # it was compiled once; to keep it took too much
            if len(answers) > 1:
                for serial, token_ids in answers.items():
                    await self.ask(params, {serial: token_ids})
                return
            [serial] = answers
            guided = (MaskAnswer(serial, len(answers[serial]), b"", False, f"its grammar failed: {error}"),)
        for one in guided:
            self._put_down(one)

    def _put_down(self, guided: MaskAnswer) -> None:
        entry = self._journal.get(guided.serial)
        if entry is None:
            return
        thinking, mask = self._thinking.get(guided.serial), guided.mask
        position = guided.position + (0 if thinking is None else thinking.ended or 0)
        if position != len(entry.output_token_ids):
            return  # each of its stays asks; since another one was answered, it has grown
        if thinking is not None and thinking.optional_token_id is not None:
            mask = with_token(mask, thinking.optional_token_id)
        self._answer(guided.serial, TokenMask(position, mask, guided.is_over, guided.problem or None))
