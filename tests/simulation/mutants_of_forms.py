"""Defects of answers that are bound to a form; see `mutation`."""

from __future__ import annotations

from contextlib import nullcontext

import attrs
import pytest

from tests.simulation.mutation import mutant
from triolet.actors import structured_output, supervisor, tokenizer
from triolet.actors.executors.grammar.grammars import GrammarsDied
from triolet.actors.grammar_requests import GrammarRequests
from triolet.core.engine_core import GrammarMasks
from triolet.core.journal import JournalEntry
from triolet.core.request.grammar_state import TokenMask
from triolet.core.scheduling import step_planner
from triolet.core.scheduling.scheduler import Scheduler
from triolet.core.scheduling.step_planner import StepPlanner


@mutant("a mask is good for the rest of the answer")
def _mask_stays(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: JournalEntry) -> bool:
        return self.request.constraint is not None and self.guidance is None

    patch.setattr(JournalEntry, "awaits_mask", property(mutated))


@mutant("the runner is told no mask")
def _no_mask(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JournalEntry, "mask", None)


@mutant("what may come next counts for whatever the answer is by now")
def _no_position_check(patch: pytest.MonkeyPatch) -> None:
    set_mask = GrammarMasks.set_mask

    def mutated(self: GrammarMasks, serial: int, mask: TokenMask) -> bool:
        if (entry := self._journal.get(serial)) is None:
            return False
        return set_mask(self, serial, attrs.evolve(mask, position=len(entry.output_token_ids)))

    patch.setattr(GrammarMasks, "set_mask", mutated)


@mutant("a request that is bound to a form has a part in runs")
def _bound_in_runs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step_planner, "_can_go_on", lambda sequence: sequence.num_pending_tokens == 1)


@mutant("a form that is over goes on")
def _never_over(patch: pytest.MonkeyPatch) -> None:
    guide = Scheduler.guide

    def mutated(self: Scheduler, serial: int, guidance: TokenMask) -> None:
        guide(self, serial, attrs.evolve(guidance, is_over=False))

    patch.setattr(Scheduler, "guide", mutated)


@mutant("a new life of the guidance does not ask what the last one was asked")
def _asked_in_vain(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GrammarMasks, "ask_again", lambda self: None)


@mutant("a hang of the structured-output actor is no matter for the watchdog")
def _not_watched(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GrammarRequests, "oldest", lambda self: None)


@mutant("a shortage when grammars start crashes the structured-output actor")
def _shortage_is_a_crash(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(structured_output, "typed_shortages", lambda purpose: nullcontext())


@mutant("a runner that cannot be spawned uses up the restarts")
def _shortage_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(supervisor, "ResourceShortage", GrammarsDied)


@mutant("a prompt is blamed for a shortage of threads")
def _prompt_is_blamed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tokenizer, "shortage_of", lambda error, purpose: None)


@mutant("a request that sits a step out lets another one in that has no token beside it")
def _more_rows_than_tokens(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: StepPlanner) -> int:
        return self.recovery.memory.max_rows(self.config.max_num_seqs)

    patch.setattr(StepPlanner, "_max_rows", property(mutated))
