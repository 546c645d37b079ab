"""Defects of the blocks, the journal, the restarts and the streams; see `mutation`."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
import trio

from tests.simulation.mutation import mutant
from triolet.actors import supervisor, tokenizer
from triolet.actors.channels import Channels
from triolet.core.engine_core import EngineCore
from triolet.core.journal import Journal, JournalEntry
from triolet.core.kv_cache.block_pool import BlockPool
from triolet.core.kv_cache.prefix_cache import PrefixCache
from triolet.core.output.output_processor import OutputCollector, OutputProcessor
from triolet.core.request.request import FinishReason
from triolet.core.request.tokenizer_interface import Tokenize
from triolet.core.scheduling import scheduler
from triolet.core.scheduling.admission import Admission, RequestQueues, publish_computed
from triolet.core.scheduling.scheduler import Scheduler
from triolet.core.scheduling.sequence import Sequence, commit_tokens
from triolet.core.step_plan import SampledToken, StepPlan, StepResult
from triolet.engine.token_stream import TokenStream

# -------------------------------------------------------------------------------- blocks and the cache


@mutant("no free on abort")
def _no_free_on_abort(patch: pytest.MonkeyPatch) -> None:
    _never_free(patch, lambda entry: entry.finish_reason is FinishReason.ABORT)


@mutant("no free on preempt")
def _no_free_on_preempt(patch: pytest.MonkeyPatch) -> None:
    _never_free(patch, lambda entry: entry.finish_reason is None)


def _never_free(patch: pytest.MonkeyPatch, is_kept: Callable[[JournalEntry], bool]) -> None:
    take_back = RequestQueues._take_back

    def mutated(self: RequestQueues, sequence: Sequence, step_id: int | None) -> None:
        if is_kept(sequence.entry):
            sequence.block_table = []
        take_back(self, sequence, step_id)

    patch.setattr(RequestQueues, "_take_back", mutated)


@mutant("publish unfilled blocks")
def _publish_unfilled(patch: pytest.MonkeyPatch) -> None:
    def mutated(cache: PrefixCache, sequence: Sequence) -> None:
        num_computed = sequence.num_computed_tokens
        sequence.num_computed_tokens = sequence.entry.num_tokens
        publish_computed(cache, sequence)
        sequence.num_computed_tokens = num_computed

    patch.setattr(scheduler, "publish_computed", mutated)


@mutant("a cache hit includes the last token")
def _hit_includes_last(patch: pytest.MonkeyPatch) -> None:
    find = PrefixCache.find

    def mutated(self: PrefixCache, token_ids: Tokens[int], *arguments: Any) -> Any:
        return find(self, (*token_ids, -1), *arguments)

    patch.setattr(PrefixCache, "find", mutated)


@mutant("an evicted block is still found")
def _evicted_is_found(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "_forget", lambda self, block_id: None)


@mutant("quarantine skipped")
def _no_quarantine(patch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release
    patch.setattr(BlockPool, "release", lambda self, block_ids, step_id=None: release(self, block_ids))


# ------------------------------------------------------------------------------------------- journal


@mutant("commit without the position check")
def _no_position_check(patch: pytest.MonkeyPatch) -> None:
    commit = Journal.commit

    def mutated(self: Journal, entry: JournalEntry, token: SampledToken, now_s: float) -> bool:
        return commit(self, entry, attrs.evolve(token, position=len(entry.output_token_ids)), now_s)

    patch.setattr(Journal, "commit", mutated)


@mutant("results are matched by request id instead of epoch")
def _no_epoch_check(patch: pytest.MonkeyPatch) -> None:
    apply = Scheduler.apply

    def mutated(self: Scheduler, result: StepResult, now_s: float) -> None:
        epochs = {s.entry.request.request_id: s.entry.epoch for s in self._queues.live.values()}
        tokens = tuple(attrs.evolve(t, epoch=epochs.get(t.request_id, t.epoch)) for t in result.tokens)
        others = tuple(row for row in result.rows if not isinstance(row, SampledToken))
        apply(self, attrs.evolve(result, rows=(*tokens, *others)), now_s)

    patch.setattr(Scheduler, "apply", mutated)


@mutant("a wrong guess counts as computed")
def _wrong_guess_computed(patch: pytest.MonkeyPatch) -> None:
    end_step = Sequence.end_step

    def mutated(self: Sequence) -> tuple[int, int]:
        num_computed = self.num_computed_tokens + self.num_scheduled_tokens
        num_tried, num_right = end_step(self)
        self.num_computed_tokens = num_computed
        return num_tried, num_right

    patch.setattr(Sequence, "end_step", mutated)


@mutant("tokens after the end of an answer belong to it")
def _tokens_after_the_end(patch: pytest.MonkeyPatch) -> None:
    def mutated(journal: Journal, tokens: Tokens[SampledToken], *arguments: Any) -> Any:
        grown: dict[int, Any] = {}
        for token in tokens:
            grown |= commit_tokens(journal, [token], *arguments)
        return grown

    patch.setattr(scheduler, "commit_tokens", mutated)


@mutant("late results are applied")
def _late_results(patch: pytest.MonkeyPatch) -> None:
    apply = Scheduler.apply

    def mutated(self: Scheduler, result: StepResult, now_s: float) -> None:
        step_id = self._in_flight[0].step_id if self._in_flight else result.step_id
        apply(self, attrs.evolve(result, step_id=step_id), now_s)

    patch.setattr(Scheduler, "apply", mutated)


@mutant("the next life goes on behind a token that ended the answer")
def _last_token_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler, "ending_of", lambda entry: None)


# ------------------------------------------------------------------------------------------ restarts


@mutant("a restarted scheduler does not requeue")
def _no_requeue(patch: pytest.MonkeyPatch) -> None:
    new_scheduler = EngineCore.new_scheduler

    def mutated(self: EngineCore, config: Any) -> Scheduler:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Scheduler, "add", lambda self, entry: None)
            return new_scheduler(self, config)

    patch.setattr(EngineCore, "new_scheduler", mutated)


@mutant("a restarted scheduler waits for a wake that was thrown away")
def _wake_lost(patch: pytest.MonkeyPatch) -> None:
    discard = Channels.discard_scheduler_messages

    def mutated(self: Channels) -> None:
        is_woken = self._is_woken
        discard(self)
        self._is_woken = is_woken

    patch.setattr(Channels, "discard_scheduler_messages", mutated)


@mutant("a new runner gets the plans of the old one")
def _old_plans(patch: pytest.MonkeyPatch) -> None:
    discard, discard_plans = Channels.discard_scheduler_messages, Channels.discard_plans

    def mutated(self: Channels) -> None:
        discard_plans(self)
        discard(self)

    patch.setattr(Channels, "discard_plans", lambda self: None)
    patch.setattr(Channels, "discard_scheduler_messages", mutated)


@mutant("one_for_one instead of rest_for_one")
def _one_for_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(supervisor, "children_to_restart", lambda strategy, names, dead: (dead,))


@mutant("a panic of foreign code is not caught")
def _panic_passes(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def only_exceptions(keep: Callable[[BaseException], None]) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            keep(error)

    patch.setattr(supervisor, "foreign_errors_kept", only_exceptions)


@mutant("a feed delivers twice after a crash of the detokenizer")
def _delivered_twice(patch: pytest.MonkeyPatch) -> None:
    rebuilt = OutputProcessor._rebuilt

    def mutated(self: OutputProcessor) -> Any:
        num_tokens, self.collector._num_tokens = self.collector._num_tokens, 0
        text = rebuilt(self)
        self.collector._num_tokens = num_tokens
        return text

    patch.setattr(OutputProcessor, "_rebuilt", mutated)


@mutant("a question is lost with its tokenizer")
def _question_lost(patch: pytest.MonkeyPatch) -> None:
    async def ask_once(channels: Channels, progress: Any, message: Tokenize) -> Any:
        reply_send, reply = trio.open_memory_channel[Any](1)
        with reply:
            await channels.to_tokenizer.send((message, reply_send))
            return await reply.receive()

    patch.setattr(tokenizer, "_ask", ask_once)


# ------------------------------------------------------------------------------- endings and readers


@mutant("an abort forgets to wake the scheduler")
def _abort_wakes_nothing(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: EngineCore, serial: int, reason: FinishReason) -> None:
        if self.scheduler is not None and serial in self.journal:
            self.scheduler.abort(serial, reason)

    patch.setattr(EngineCore, "finish", mutated)


@mutant("a stop string does not end the request in the scheduler")
def _stop_goes_on(patch: pytest.MonkeyPatch) -> None:
    advance = OutputProcessor.advance

    def mutated(self: OutputProcessor) -> bool:
        advance(self)
        return False

    patch.setattr(OutputProcessor, "advance", mutated)


@mutant("a deadline is forgotten once the queue timeout has passed")
def _deadline_forgotten(patch: pytest.MonkeyPatch) -> None:
    expire = Scheduler.expire

    def mutated(self: Scheduler, now_s: float) -> None:
        due = {serial for moment_s, serial in self._deadlines._heap if moment_s <= now_s}
        expire(self, now_s)
        _forget_deadlines(self, due)

    patch.setattr(Scheduler, "expire", mutated)


@mutant("a preemption ends the deadline")
def _deadline_lost_to_preemption(patch: pytest.MonkeyPatch) -> None:
    plan_step, preempt = Scheduler.plan_step, RequestQueues.preempt
    preempted: set[int] = set()

    def mutated_preempt(self: RequestQueues, victim: Sequence) -> None:
        preempt(self, victim)
        preempted.add(victim.entry.serial)

    def mutated(self: Scheduler, now_s: float) -> StepPlan | None:
        preempted.clear()
        plan = plan_step(self, now_s)
        _forget_deadlines(self, preempted)
        return plan

    patch.setattr(RequestQueues, "preempt", mutated_preempt)
    patch.setattr(Scheduler, "plan_step", mutated)


def _forget_deadlines(scheduler: Scheduler, serials: set[int]) -> None:
    heap = scheduler._deadlines._heap
    heap[:] = [deadline for deadline in heap if deadline[1] not in serials]
    heapq.heapify(heap)


@mutant("a queue timeout ends requests that run")
def _queue_timeout_for_all(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: Scheduler, now_s: float) -> None:
        for sequence in list(self._queues.live.values()):
            request = sequence.entry.request
            if min(request.deadline_s, request.queue_deadline_s) <= now_s:
                self._finish(sequence, FinishReason.DEADLINE)

    patch.setattr(Scheduler, "expire", mutated)


@mutant("an admission's place is not given back on cancel")
def _place_kept(patch: pytest.MonkeyPatch) -> None:
    give_back = Admission.give_back

    def mutated(self: Admission, num_places: int = 1, client: str | None = None) -> None:
        if not isinstance(sys.exc_info()[1], trio.Cancelled):
            give_back(self, num_places, client)

    patch.setattr(Admission, "give_back", mutated)


@mutant("leaving waits before it frees")
def _leaving_waits(patch: pytest.MonkeyPatch) -> None:
    leave = TokenStream.__aexit__

    async def mutated(self: TokenStream, *error: Any) -> None:
        await trio.lowlevel.checkpoint()
        await leave(self, *error)

    patch.setattr(TokenStream, "__aexit__", mutated)


@mutant("a read that is cancelled takes its output along")
def _output_lost(patch: pytest.MonkeyPatch) -> None:
    read = TokenStream.__anext__

    async def mutated(self: TokenStream) -> Any:
        output = await read(self)
        await trio.lowlevel.checkpoint()
        return output

    patch.setattr(TokenStream, "__anext__", mutated)


@mutant("a slow reader loses what it has not read")
def _slow_loses(patch: pytest.MonkeyPatch) -> None:
    put = OutputCollector.put

    def mutated(self: OutputCollector, text: str, num_tokens: int) -> None:
        self._pieces.clear()
        put(self, text, num_tokens)

    patch.setattr(OutputCollector, "put", mutated)


@mutant("a duplicate id takes the place of the first")
def _id_taken_over(patch: pytest.MonkeyPatch) -> None:
    from triolet.engine.submission import Submission

    patch.setattr(Submission, "is_live", False)
