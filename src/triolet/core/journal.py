"""The error kernel: for every live request, what was asked and what has been answered.

Everything else can be lost. A runner that dies takes the KV with it, a scheduler its block tables, a
detokenizer its half characters; all of it is computed again from here. So this object does almost nothing,
and it does it exactly once: a token is committed only at the position where the answer ends, and only for the
stay (`epoch`) that the scheduler is counting on.

A stay is one continuous presence of a request in a scheduler. Epochs are never reused, neither after a crash
nor by another request of the same id, so that a late result can not be mistaken for a current one.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from triolet.core.outputs import FinishReason
from triolet.core.plan import SampledToken, TokenLogprobs
from triolet.core.request import Request
from triolet.core.tally import Tally
from triolet.errors import InvariantViolated


@attrs.define(eq=False)
class JournalEntry:
    """One request and its answer so far. Times are monotonic seconds; None before they happened.

    Args:
        request: what was asked.
        serial: its number in order of admission; never reused.
        epoch: of its present stay.
    """

    request: Request
    serial: int
    epoch: int
    output_token_ids: list[int] = attrs.field(factory=list)
    output_logprobs: list[TokenLogprobs] = attrs.field(factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    failure: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Ids of prompt and answer from `start` up to `end`, positions in the sequence."""
        prompt = self.request.prompt_token_ids
        if end <= len(prompt):
            return prompt[start:end]
        answer = self.output_token_ids[max(0, start - len(prompt)) : end - len(prompt)]
        return prompt[start:] + tuple(answer)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Write down why it ended; the first reason stays."""
        if self.finish_reason is None:
            self.finish_reason, self.stop_reason = reason, stop_reason


class Journal:
    """The live requests of one engine, in order of admission."""

    def __init__(self) -> None:
        self.tally = Tally()
        self._live: dict[int, JournalEntry] = {}
        self._arrivals: list[int] = []
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

    def get(self, serial: int) -> JournalEntry | None:
        """The live entry of that number, if there is one."""
        return self._live.get(serial)

    def open(self, request: Request) -> JournalEntry:
        """Take a request in."""
        self._num_serials += 1
        entry = JournalEntry(request, self._num_serials, self._next_epoch())
        self._live[entry.serial] = entry
        self._arrivals.append(entry.serial)
        self._num_queued_tokens += len(request.prompt_token_ids)
        return entry

    def take_arrivals(self) -> list[JournalEntry]:
        """Entries opened since the last call that are still live, in order."""
        arrivals = [self._live[serial] for serial in self._arrivals if serial in self._live]
        self._arrivals.clear()
        return arrivals

    def _next_epoch(self) -> int:
        self._num_epochs += 1
        return self._num_epochs

    def begin_stay(self, entry: JournalEntry) -> int:
        """Results of earlier stays of this request count no more."""
        entry.epoch = self._next_epoch()
        return entry.epoch

    def scheduled(self, entry: JournalEntry, now_s: float) -> None:
        """Its first step has been planned."""
        if entry.scheduled_s is None:
            entry.scheduled_s = now_s
            self._num_queued_tokens -= len(entry.request.prompt_token_ids)

    def commit(self, entry: JournalEntry, token: SampledToken, now_s: float) -> bool:
        """Append a token, if it belongs exactly here; False for one that is late or came twice."""
        if token.epoch != entry.epoch or token.position != len(entry.output_token_ids) or entry.finish_reason:
            return False
        self._count(entry, now_s)
        entry.output_token_ids.append(token.token_id)
        if token.logprobs is not None:
            entry.output_logprobs.append(token.logprobs)
        if entry.first_token_s is None:
            entry.first_token_s = now_s
        entry.last_token_s = now_s
        return True

    def _count(self, entry: JournalEntry, now_s: float) -> None:
        if entry.last_token_s is None:
            num_prompt_tokens = len(entry.request.prompt_token_ids)
            self.tally.first_token(
                now_s - entry.request.arrival_s, num_prompt_tokens, entry.num_cached_tokens
            )
        else:
            self.tally.next_token(now_s - entry.last_token_s)

    def close(self, entry: JournalEntry) -> None:
        """The request has ended: it will not be computed again. Harmless when repeated."""
        if self._live.pop(entry.serial, None) is not None and entry.scheduled_s is None:
            self._num_queued_tokens -= len(entry.request.prompt_token_ids)

    def check(self) -> None:
        """Hold the counts against the entries.

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
