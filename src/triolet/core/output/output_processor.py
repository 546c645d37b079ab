"""Output processor: it converts a request's new tokens in the journal to text for its reader.

Status of requests for callers: the table of live requests, progress to the first token, and endings.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache

import attrs

from triolet.core.journal import JournalEntry
from triolet.core.metrics.iteration_stats import FinishedRequest
from triolet.core.output.detokenizer import (
    Decode,
    HoldBack,
    OutputText,
    Piece,
    no_piece,
    no_text,
    token_decoder,
)
from triolet.core.output.output_collector import OutputCollector
from triolet.core.request.request import FinishReason, RequestStatus
from triolet.core.request.tokenizer_interface import ContextFreeTokenizer, TokenizerInterface


@attrs.define(eq=False)
class OutputProcessor:
    """Processor of one answer: moves new tokens of the journal, as text, into the collector, each exactly once.

    That also holds after a crash of the detokenizer: the collector knows how many tokens were delivered, and the state
    of the text before them is computed again.

    Args:
        entry: the request and its answer so far.
        collector: from which the reader takes outputs.
        tokenizer: converts ids to text; None if the model has no tokenizer: all text is empty then.
        hold_back: how much text is held back for stop strings; see `StopMatcher`.
    """

    entry: JournalEntry
    collector: OutputCollector
    tokenizer: TokenizerInterface | None
    hold_back: HoldBack = "exact"
    _text: OutputText | None = attrs.field(default=None, init=False)

    @classmethod
    def open(
        cls,
        entry: JournalEntry,
        tokenizer: TokenizerInterface | None,
        *,
        arrival_time: float,
        hold_back: HoldBack = "exact",
    ) -> OutputProcessor:
        """Return the processor of a request that was just admitted; `arrival_time` is wall clock, seconds."""
        has_text = tokenizer is not None and entry.request.params.detokenize
        decode_token = token_decoder(decoder(tokenizer, skip_special_tokens=False)) if has_text else no_text
        collector = OutputCollector(entry, decode_token, arrival_time)
        return cls(entry, collector, tokenizer, hold_back)

    def forget_text(self) -> None:
        """Drop the state of the text after a crash of the detokenizer; it is computed again from the journal."""
        self._text = None

    def advance(self) -> bool:
        """Deliver the new tokens.

        Returns:
            Whether a stop string has ended the answer: nothing more of it is wanted.
        """
        if self.collector.finish_reason is not None:
            return False
        text = self._text or self._rebuilt()
        entry, collector = self.entry, self.collector
        delta = text.add(entry.output_token_ids[text.num_tokens :], hide_last=entry.ended_by_token)
        if delta.num_tokens:
            collector.put(delta.text, delta.num_tokens)
        if delta.stop_reason is not None:
            collector.finish(FinishReason.STOP, delta.stop_reason)
            return True
        if entry.finish_reason is not None:
            collector.put(text.flush(), 0)
            collector.finish(entry.finish_reason, entry.stop_reason)
        return False

    def finished_request(self, reason: FinishReason, now_s: float) -> FinishedRequest:
        """Return the statistics of the request at its end."""
        request = self.entry.request
        return FinishedRequest(
            finish_reason=reason,
            metrics=self.collector.metrics(),
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=self.entry.num_cached_tokens,
            max_tokens=request.max_tokens,
            n=request.num_answers,
            e2e_latency=now_s - request.arrival_s,
            request_id=request.parent_id or request.request_id,
            temperature=request.params.temperature,
            top_p=request.params.top_p,
            trace_headers=request.trace_headers,
        )

    def _rebuilt(self) -> OutputText:
        request = self.entry.request
        params = request.params
        tokenizer = self.tokenizer if params.detokenize else None
        text = OutputText(
            decoder(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                is_spaced=params.spaces_between_special_tokens,
            ),
            request.prompt_token_ids,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            hold_back=self.hold_back,
            piece=pieces(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                is_spaced=params.spaces_between_special_tokens,
            ),
        )
        text.add(self.entry.output_token_ids[: self.collector.num_tokens])
        self._text = text
        return text


def decoder(
    tokenizer: TokenizerInterface | None, *, skip_special_tokens: bool, is_spaced: bool = True
) -> Decode:
    """Return the decoder of a request's tokens; for its arguments see `SamplingParams`."""
    if tokenizer is None:
        return lambda token_ids: ""

    def decode(token_ids: Sequence[int]) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    return decode if is_spaced or skip_special_tokens else _unspaced(tokenizer, decode)


def pieces(
    tokenizer: TokenizerInterface | None, *, skip_special_tokens: bool, is_spaced: bool = True
) -> Piece:
    """Return the known texts of single tokens under the `decoder` with the same arguments."""
    if isinstance(tokenizer, ContextFreeTokenizer) and (is_spaced or skip_special_tokens):
        return tokenizer.pieces(skip_special_tokens=skip_special_tokens)
    return no_piece


def _unspaced(tokenizer: TokenizerInterface, decode: Decode) -> Decode:
    """Return a decoder that puts no space between two special tokens: each begins a text of its own."""

    @cache
    def is_special(token_id: int) -> bool:
        return tokenizer.decode([token_id], skip_special_tokens=True) == "" != decode([token_id])

    def decode_unspaced(token_ids: Sequence[int]) -> str:
        pairs = enumerate(itertools.pairwise(token_ids), start=1)
        starts = [place for place, pair in pairs if all(map(is_special, pair))]
        return "".join(decode(token_ids[a:b]) for a, b in itertools.pairwise([0, *starts, len(token_ids)]))

    return decode_unspaced


@attrs.frozen(kw_only=True)
class LiveRequest:
    """Request that waits or runs, at the moment of the query. All n answers to a prompt are one request.

    Args:
        request_id: the caller's, or the engine's.
        client: to which its tokens are counted.
        priority: lower goes first under the `priority` policy.
        status: `waiting` or `running`; `waiting` also before it is admitted.
        queue_position: how many requests go before it; 0 once it has been scheduled.
        n: answers that were asked for.
        num_prompt_tokens: length of the prompt; 0 while it is not known.
        num_cached_tokens: of these, the tokens whose KV was found in the prefix cache.
        num_computed_tokens: tokens of the prompt that have been computed, or were found.
        num_output_tokens: of all its answers so far.
        num_kv_blocks: blocks that it holds; several answers may hold the same one.
        num_preemptions: times that blocks were taken back.
        age_s: since it arrived, seconds.
        time_left_s: until its deadline, seconds; None if it has none.
    """

    request_id: str
    client: str | None
    priority: int
    status: RequestStatus
    queue_position: int = 0
    n: int = 1
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_kv_blocks: int = 0
    num_preemptions: int = 0
    age_s: float = 0.0
    time_left_s: float | None = None


@attrs.frozen(kw_only=True)
class RequestProgress:
    """Progress of a request to its first token. Successive looks at one request never show it going back.

    Args:
        status: `waiting` or `running`.
        queue_position: how many requests go before it; 0 once it has been scheduled.
        num_prompt_tokens: length of the prompt.
        num_computed_tokens: tokens of the prompt that have been computed, or were found in the prefix cache.
    """

    status: RequestStatus
    queue_position: int
    num_prompt_tokens: int
    num_computed_tokens: int

    def after(self, earlier: RequestProgress | None) -> RequestProgress:
        """Return the later of both: a request that is overtaken or preempted keeps its last place."""
        if earlier is None or self._is_ahead_of(earlier):
            return self
        return attrs.evolve(
            self,
            queue_position=min(self.queue_position, earlier.queue_position),
            num_computed_tokens=max(self.num_computed_tokens, earlier.num_computed_tokens),
        )

    def _is_ahead_of(self, earlier: RequestProgress) -> bool:
        is_nearer = self.queue_position <= earlier.queue_position
        return is_nearer and self.num_computed_tokens >= earlier.num_computed_tokens


MAX_ENDINGS = 1024
MAX_AGE_S = 600.0


@attrs.define
class EndedRequests:
    """Statuses of the requests that ended last, by request id: late queries get an answer, and memory is bounded.

    Args:
        max_endings: most statuses stored.
        max_age_s: time after which one is dropped, seconds.
    """

    max_endings: int = MAX_ENDINGS
    max_age_s: float = MAX_AGE_S
    _endings: OrderedDict[str, tuple[RequestStatus, float]] = attrs.field(factory=OrderedDict, init=False)

    def remember(self, request_id: str, status: RequestStatus, now_s: float) -> None:
        """Store the status of an ended request; it replaces an earlier one of the same id."""
        self._endings.pop(request_id, None)
        self._endings[request_id] = (status, now_s)
        self._forget_old(now_s)

    def get(self, request_id: str, now_s: float) -> RequestStatus | None:
        """Return the status with which the request ended, if it is still stored."""
        self._forget_old(now_s)
        status, _ = self._endings.get(request_id, (None, 0.0))
        return status

    def __len__(self) -> int:
        return len(self._endings)

    def _forget_old(self, now_s: float) -> None:
        while self._endings:
            oldest, (_, ended_s) = next(iter(self._endings.items()))
            if len(self._endings) <= self.max_endings and now_s - ended_s <= self.max_age_s:
                return
            del self._endings[oldest]
