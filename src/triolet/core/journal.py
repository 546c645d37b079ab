"""Journal of the live requests: each request and its answer so far. Everything else can be recomputed from it.

Theory of operation
-------------------
A crash of the runner loses the KV cache, a crash of the scheduler its block tables, a crash of the detokenizer its
incomplete characters. All of that is computed again from the journal. A token is committed exactly once: only at the
position where the answer ends, and only for the present epoch of its entry.

A stay is one continuous presence of a request in a scheduler, and has an epoch. Epochs are never reused, neither after
a crash nor by another request of the same id, so that a late result cannot be mistaken for a current one.

The answers to one prompt (n > 1) are entries of their own. All but the first are held until the first has a token: by
then the prompt has been computed, and they find its blocks in the prefix cache. If the first ends before that, the
others end with the same reason.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import attrs

from triolet.core.metrics.iteration_stats import StatsAccumulator
from triolet.core.request.grammar_state import TokenMask
from triolet.core.request.request import FinishReason, Request
from triolet.core.step_plan import PooledVectors, PromptLogprobs, SampledToken, TokenLogprobs
from triolet.errors import InvariantViolated


@attrs.define(eq=False)
class JournalEntry:
    """One request and its answer so far. Times are monotonic seconds; None before they happened."""

    request: Request
    serial: int  # number in order of admission; never reused
    epoch: int  # number of the present stay
    replica: int | None = (
        None  # number of the replica that computes it; None without replicas, or while none does
    )
    leader_serial: int = 0  # serial of the entry that this one is or was held for; 0 if there is none
    # Latest mask of the tokens that may come next; only of requests with a constraint.
    guidance: TokenMask | None = None
    # Log-probabilities of the prompt from its second token on, as far as they are known, if they were asked
    # for.
    prompt_logprobs: list[TokenLogprobs] = attrs.field(factory=list)
    output_token_ids: list[int] = attrs.field(factory=list)
    output_logprobs: list[TokenLogprobs] = attrs.field(factory=list)
    # Parts of the result of a pooled request, in the order of the prompt.
    pooled: list[PooledVectors] = attrs.field(factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    failure: str | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache when the request was first scheduled
    num_cache_creation_tokens: int = 0  # prompt tokens computed for the request and left in the prefix cache
    num_preemptions: int = 0
    num_moved_tokens: int = 0  # tokens that it had when it moved to another replica
    weight_version: int = 0  # of the weights that computed the newest token
    prompt_weight_version: int = 0  # of those that computed the log-probabilities of the prompt
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_needed_places(self) -> int:
        """Shortest sequence in which the request goes on, tokens: its own, and a place for an answer's next."""
        return self.num_tokens + (self.request.pooling is None)

    @property
    def awaits_mask(self) -> bool:
        """True if the mask for its next token is missing: no token is computed before it is there."""
        if self.request.constraint is None:
            return False
        return self.guidance is None or self.guidance.position != len(self.output_token_ids)

    @property
    def ended_by_token(self) -> bool:
        """True if the last token, an EOS or stop token, ended the answer: that token gives no text."""
        if self.finish_reason is not FinishReason.STOP or not self.output_token_ids:
            return False
        return self.output_token_ids[-1] in self.request.ending_token_ids

    @property
    def mask(self) -> bytes | None:
        """Mask of the tokens that may come next, a bit for each; None for any."""
        return None if self.guidance is None else self.guidance.mask

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if some of the prompt's log-probabilities were asked for and are missing."""
        num_wanted = len(self.request.prompt_token_ids) - 1
        return self.request.params.prompt_logprobs is not None and len(self.prompt_logprobs) < num_wanted

    @property
    def reads_prefix_cache(self) -> bool:
        """True if the request may use KV from the prefix cache."""
        return not (self.wants_prompt_logprobs or self.request.params.skip_reading_prefix_cache)

    @property
    def is_pooled(self) -> bool:
        """True if the result of a pooled request is complete."""
        return bool(self.pooled) and self.pooled[-1].is_last

    def add_prompt_logprobs(self, share: PromptLogprobs, weight_version: int) -> None:
        """Append the log-probabilities of a step.

        Args:
            weight_version: of the weights that computed them.
        """
        # Other weights compute the prompt again from its beginning: those of two models are not mixed.
        if weight_version != self.prompt_weight_version:
            self.prompt_logprobs.clear()
            self.prompt_weight_version = weight_version
        # After a preemption the prompt is computed again: positions that are known already are skipped.
        self.prompt_logprobs += share.logprobs[len(self.prompt_logprobs) + 1 - share.start :]

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Ids of prompt and answer from `start` up to `end`, positions in the sequence."""
        prompt = self.request.prompt_token_ids
        if end <= len(prompt):
            return prompt[start:end]
        answer = self.output_token_ids[max(0, start - len(prompt)) : end - len(prompt)]
        return prompt[start:] + tuple(answer)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Record the reason of the ending; the first one stays."""
        if self.finish_reason is None:
            self.finish_reason, self.stop_reason = reason, stop_reason


class Journal:
    """The live requests of one engine, in order of admission."""

    def __init__(self) -> None:
        self.stats = StatsAccumulator()
        self.weight_version = 0  # of the weights that compute now
        self._live: dict[int, JournalEntry] = {}
        self._arrivals: list[int] = []
        self._held: dict[int, list[JournalEntry]] = {}  # by the serial of the first answer
        self._unguided: dict[int, None] = {}
        self._num_serials = 0
        self._num_epochs = 0
        self._num_queued_tokens = 0

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[JournalEntry]:
        return iter(self._live.values())

    def __contains__(self, serial: int) -> bool:
        return serial in self._live

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of the requests that have never been scheduled."""
        return self._num_queued_tokens

    @property
    def last_serial(self) -> int:
        """Serial of the request that was admitted last; 0 before the first."""
        return self._num_serials

    def get(self, serial: int) -> JournalEntry | None:
        """Return the live entry of that serial, if there is one."""
        return self._live.get(serial)

    def open(self, request: Request, *, after: JournalEntry | None = None) -> JournalEntry:
        """Add an entry for a request.

        Args:
            after: entry with the same prompt and without a token: the new entry is held until that has one.
        """
        self._num_serials += 1
        entry = JournalEntry(
            request, self._num_serials, self._next_epoch(), leader_serial=after.serial if after else 0
        )
        self._live[entry.serial] = entry
        if after is None:
            self._arrivals.append(entry.serial)
        else:
            self._held.setdefault(after.serial, []).append(entry)
        self._num_queued_tokens += len(request.prompt_token_ids)
        return entry

    def is_held(self, entry: JournalEntry) -> bool:
        """Return True if the entry waits for the first token of another one."""
        return any(entry in held for held in self._held.values())

    @property
    def arrivals(self) -> tuple[JournalEntry, ...]:
        """The live entries that the next `take_arrivals` returns."""
        return tuple(self._live[serial] for serial in self._arrivals if serial in self._live)

    def take_arrivals(self) -> list[JournalEntry]:
        """Return the live entries that were opened or released since the last call, in order."""
        arrivals = [self._live[serial] for serial in self._arrivals if serial in self._live]
        self._arrivals.clear()
        return arrivals

    def _next_epoch(self) -> int:
        self._num_epochs += 1
        return self._num_epochs

    def begin_stay(self, entry: JournalEntry) -> int:
        """Give the entry a new epoch, so that results of earlier stays are recognised as late."""
        entry.epoch = self._next_epoch()
        self._note_guidance(entry)
        return entry.epoch

    def _note_guidance(self, entry: JournalEntry) -> None:
        if entry.awaits_mask:
            self._unguided[entry.serial] = None

    def take_unmasked(self, among: Container[int] | None = None) -> tuple[int, ...]:
        """Return the serials of the live requests that have come to need a mask since the last call.

        Args:
            among: serials of the requests that are asked about; by default all.
        """
        if not self._unguided:
            return ()
        serials = tuple(serial for serial in self._unguided if among is None or serial in among)
        for serial in serials:
            del self._unguided[serial]
        return tuple(serial for serial in serials if serial in self._live)

    def scheduled(self, entry: JournalEntry, now_s: float, num_cached_tokens: int = 0) -> None:
        """Record the first step that was planned with a request, and its prompt tokens found in the prefix cache."""
        if entry.scheduled_s is None:  # later stays change neither
            entry.scheduled_s, entry.num_cached_tokens = now_s, num_cached_tokens
            self._num_queued_tokens -= len(entry.request.prompt_token_ids)

    def commit(self, entry: JournalEntry, token: SampledToken, now_s: float) -> bool:
        """Append a token; False, and nothing done, for one that is late or came twice."""
        if token.epoch != entry.epoch or token.position != len(entry.output_token_ids) or entry.finish_reason:
            return False
        self._count(entry, now_s)
        entry.output_token_ids.append(token.token_id)
        entry.weight_version = self.weight_version
        if token.logprobs is not None:
            entry.output_logprobs.append(token.logprobs)
        if entry.first_token_s is None:
            entry.first_token_s = now_s
            self._arrivals += [held.serial for held in self._held.pop(entry.serial, ())]
        entry.last_token_s = now_s
        self._note_guidance(entry)
        return True

    def commit_pooled(self, entry: JournalEntry, part: PooledVectors) -> bool:
        """Append a part of a pooled request's result; False, and nothing done, for one that is late or came twice."""
        if part.epoch != entry.epoch or entry.is_pooled or entry.finish_reason:
            return False
        if part.start == 0:  # after a preemption or a crash the prompt is computed again from its beginning
            entry.pooled.clear()
        entry.pooled.append(part)
        if part.is_last:
            self.stats.pooled(len(entry.request.prompt_token_ids), entry.num_cached_tokens)
        return True

    def _count(self, entry: JournalEntry, now_s: float) -> None:
        if entry.last_token_s is None:
            num_prompt_tokens = len(entry.request.prompt_token_ids)
            self.stats.first_token(
                now_s - entry.request.arrival_s, num_prompt_tokens, entry.num_cached_tokens
            )
        else:
            self.stats.next_token(now_s - entry.last_token_s)

    def close(self, entry: JournalEntry) -> list[int]:
        """Remove a request that has ended. Harmless when repeated.

        Returns:
            The serial of the request, and those of the requests that were held for its first token and end with it.
        """
        held = self._held.pop(entry.serial, [])
        for follower in held:
            follower.finish(entry.finish_reason or FinishReason.ABORT)
            follower.failure = entry.failure
        for ended in (entry, *held):
            if self._live.pop(ended.serial, None) is not None and ended.scheduled_s is None:
                self._num_queued_tokens -= len(ended.request.prompt_token_ids)
            self._unguided.pop(ended.serial, None)
        return [ended.serial for ended in (entry, *held)]

    def check(self) -> None:
        """Check the counts against the entries.

        Raises:
            InvariantViolated: with the numbers that differ.
        """
        queued = sum(len(entry.request.prompt_token_ids) for entry in self if entry.scheduled_s is None)
        if queued != self._num_queued_tokens:
            raise InvariantViolated(f"queued tokens must be {queued}; counted {self._num_queued_tokens}")
        for entry in self:
            if entry.finish_reason is not None:
                raise InvariantViolated(
                    f"entry {entry.serial} has ended ({entry.finish_reason}) and is still live"
                )
            if len(entry.output_token_ids) > entry.request.max_tokens:
                raise InvariantViolated(
                    f"entry {entry.serial} is longer than its {entry.request.max_tokens} tokens"
                )
