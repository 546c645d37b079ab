"""More defects to plant: in what is done about steps that always go wrong, and in handing over; see `mutation`."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from tests.simulation.mutation import mutant
from triolet.actors import supervisor, watchdog
from triolet.core.journal import JournalEntry
from triolet.core.recovery.recovery_state import CrashOutcome, OomBackoff, PoisonBisection, RareHangLimit
from triolet.core.recovery.supervision import RestartIntensity
from triolet.core.scheduling.scheduler import Scheduler
from triolet.core.step_plan import StepResult
from triolet.engine import engine, snapshot

# ------------------------------------------------------------------------- steps that always go wrong


@mutant("no request is ever convicted")
def _none_convicted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PoisonBisection, "step_failed", lambda self, marks, num_rows: CrashOutcome(None, 0))


@mutant("a request that is in a failing step for the second time is convicted, whatever else is in it")
def _convicted_in_company(patch: pytest.MonkeyPatch) -> None:
    step_failed = PoisonBisection.step_failed
    patch.setattr(
        PoisonBisection, "step_failed", lambda self, marks, num_rows: step_failed(self, marks, num_rows=1)
    )


@mutant("no request is held back during a trial")
def _none_held_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PoisonBisection, "may_run", lambda self, serial: True)


@mutant("a step that succeeds clears no request")
def _none_cleared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PoisonBisection, "step_done", lambda self, num_computed: None)


@mutant("a request that leaves stays on trial")
def _leavers_stay_on_trial(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PoisonBisection, "ended", lambda self, serial: None)


@mutant("a step without memory counts as computed")
def _misfits_count(patch: pytest.MonkeyPatch) -> None:
    apply = Scheduler.apply

    def mutated(self: Scheduler, result: StepResult, now_s: float) -> None:
        apply(self, attrs.evolve(result, out_of_memory=None), now_s)

    patch.setattr(Scheduler, "apply", mutated)


@mutant("what does not fit into a smaller later life waits for ever")
def _misfits_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_fail_if_too_long", lambda self, sequence: None)


@mutant("after a step without memory the same one is tried again")
def _never_smaller(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OomBackoff, "step_did_not_fit", lambda self, row_tokens: 0)


# --------------------------------------------------------------------------------- handing over


@mutant("a snapshot leaves out what has not been scheduled")
def _waiting_left_behind(patch: pytest.MonkeyPatch) -> None:
    take = snapshot.take_snapshot

    def mutated(info: Any, submissions: Any) -> Any:
        return take(info, [s for s in submissions if any(e.scheduled_s is not None for e in s.entries)])

    patch.setattr(engine, "take_snapshot", mutated)


@mutant("a snapshot has the last token of an answer twice")
def _saved_twice(patch: pytest.MonkeyPatch) -> None:
    save = snapshot._saved_answer

    def mutated(entry: JournalEntry) -> Any:
        saved = save(entry)
        tokens = saved.output_token_ids
        return attrs.evolve(saved, output_token_ids=tokens + tokens[-1:])

    patch.setattr(snapshot, "_saved_answer", mutated)


# ------------------------------------------------------------------------------------------ hangs


@mutant("the watchdog ends no actor")
def _none_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(watchdog, "_end", lambda progress, grammars, lives, name: None)


@mutant("the watchdog does not know of the tokenizer")
def _tokenizer_forgotten(patch: pytest.MonkeyPatch) -> None:
    end = watchdog._end
    patch.setattr(
        watchdog,
        "_end",
        lambda progress, grammars, lives, name: name == "tokenizer" or end(progress, grammars, lives, name),
    )


@mutant("a load that hangs is never ended")
def _loads_hang_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RareHangLimit, "limit_s", lambda self: None)


@mutant("a load has no more time after one that hung")
def _loads_have_no_more_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RareHangLimit, "count_hang", lambda self: None)


# -------------------------------------------------------------------------------------- shortages


@mutant("an actor that finds no memory or a full disk is not started again")
def _no_restart_without_memory(patch: pytest.MonkeyPatch) -> None:
    allow = RestartIntensity.allow
    causes = list[BaseException | None]()
    note = supervisor.Supervisor._report

    def noting(self: Any, context: str, reason: BaseException | None, offender: str) -> None:
        causes.append(reason)
        note(self, context, reason, offender)

    def mutated(self: RestartIntensity, *arguments: Any, **named: Any) -> bool:
        reason = causes[-1] if causes else None
        is_shortage = reason is not None and isinstance(supervisor.root_cause(reason), MemoryError | OSError)
        return allow(self, *arguments, **named) and not is_shortage

    patch.setattr(supervisor.Supervisor, "_report", noting)
    patch.setattr(RestartIntensity, "allow", mutated)
