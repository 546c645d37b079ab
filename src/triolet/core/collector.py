"""What a stream has for its reader, however slowly it is read.

The detokenizer puts, the reader takes, and neither waits for the other: what is put before the last was taken is
joined with it. So a reader that lags loses nothing, and what it costs is bounded by the length of one answer.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from triolet.core.journal import JournalEntry
from triolet.core.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from triolet.core.params import RequestOutputKind
from triolet.core.plan import TokenLogprobs


@attrs.define(eq=False)
class OutputCollector:
    """One request's outputs.

    Args:
        entry: the request in the journal; its tokens are read from here.
        decode_token: text of one token id, for logprobs.
        arrival_time: wall clock, seconds since the epoch.
    """

    entry: JournalEntry
    decode_token: Callable[[int], str]
    arrival_time: float = 0.0
    _pieces: list[str] = attrs.field(factory=list, init=False)
    _text: str = attrs.field(default="", init=False)
    _num_tokens: int = attrs.field(default=0, init=False)
    _num_taken: int = attrs.field(default=0, init=False)
    _finish_reason: FinishReason | None = attrs.field(default=None, init=False)
    _stop_reason: int | str | None = attrs.field(default=None, init=False)
    _has_news: bool = attrs.field(default=False, init=False)

    @property
    def num_tokens(self) -> int:
        """Answer tokens put so far."""
        return self._num_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer ended; None until the last output was put."""
        return self._finish_reason

    @property
    def text(self) -> str:
        """The whole text put so far."""
        return self._text + "".join(self._pieces)

    def put(self, text: str, num_tokens: int) -> None:
        """Add what is new.

        Args:
            text: the next characters.
            num_tokens: the next tokens, of the journal's entry.
        """
        self._pieces.append(text)
        self._num_tokens += num_tokens
        self._has_news = True

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """No more will be put. The first reason stays."""
        if self._finish_reason is None:
            self._finish_reason, self._stop_reason = reason, stop_reason
            self._has_news = True

    def has_output(self) -> bool:
        """Whether `take` has something."""
        if self.entry.request.params.output_kind is RequestOutputKind.FINAL_ONLY:
            return self._has_news and self._finish_reason is not None
        return self._has_news

    def take(self) -> RequestOutput:
        """Everything since the last `take`, as one output of the kind that was asked for."""
        request = self.entry.request
        new_text = "".join(self._pieces)
        first_token = self._num_taken
        self._text += new_text
        self._pieces.clear()
        self._num_taken = self._num_tokens
        self._has_news = False
        if request.params.output_kind is not RequestOutputKind.DELTA:
            new_text, first_token = self._text, 0
        return RequestOutput(
            request_id=request.parent_id or request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=(self._completion(new_text, first_token),),
            finished=self._finish_reason is not None,
            metrics=self.metrics(),
            num_cached_tokens=self.entry.num_cached_tokens,
        )

    def _completion(self, text: str, first_token: int) -> CompletionOutput:
        entry, wants_logprobs = self.entry, self.entry.request.params.logprobs is not None
        logprobs = entry.output_logprobs[first_token : self._num_tokens] if wants_logprobs else []
        return CompletionOutput(
            index=entry.request.index,
            text=text,
            token_ids=tuple(entry.output_token_ids[first_token : self._num_tokens]),
            cumulative_logprob=self._cumulative_logprob() if wants_logprobs else None,
            logprobs=tuple(map(self._described, logprobs)) if wants_logprobs else None,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
        )

    def _cumulative_logprob(self) -> float:
        return sum(position.logprobs[0] for position in self.entry.output_logprobs[: self._num_tokens])

    def _described(self, position: TokenLogprobs) -> dict[int, Logprob]:
        chosen, *likeliest = zip(position.token_ids, position.logprobs, strict=True)
        described = {chosen[0]: Logprob(chosen[1], position.rank, self.decode_token(chosen[0]))}
        for rank, (token_id, logprob) in enumerate(likeliest, start=1):
            described.setdefault(token_id, Logprob(logprob, rank, self.decode_token(token_id)))
        return described

    def metrics(self) -> RequestMetrics:
        """Where its time went so far."""
        entry = self.entry
        return RequestMetrics(
            num_generation_tokens=self._num_tokens,
            num_preemptions=entry.num_preemptions,
            arrival_time=self.arrival_time,
            queued_ts=entry.request.arrival_s,
            scheduled_ts=entry.scheduled_s or 0.0,
            first_token_ts=entry.first_token_s or 0.0,
            last_token_ts=entry.last_token_s or 0.0,
        )
