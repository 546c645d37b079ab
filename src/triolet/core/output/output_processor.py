"""Output processor: converts a request's new tokens in the journal to text, and collects the outputs for its reader."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from typing import TypeVar

import attrs

from triolet.core.journal import JournalEntry
from triolet.core.metrics.iteration_stats import FinishedRequest
from triolet.core.output.detokenizer import (
    MAX_BEFORE,
    Decode,
    DecodeToken,
    HoldBack,
    OutputText,
    Piece,
    no_piece,
    no_text,
    token_decoder,
)
from triolet.core.output.logprobs import Entries, FlatColumns, ListPrefix, Position, entries_of
from triolet.core.output.outputs import CompletionOutput, PromptLogprobs, RequestOutput
from triolet.core.request.lora import LoRARequest
from triolet.core.request.params import RequestOutputKind
from triolet.core.request.request import FinishReason, RequestMetrics, RequestStatus
from triolet.core.request.tokenizer_interface import ContextFreeTokenizer, TokenizerInterface

T = TypeVar("T")


# Collector: the buffer between the detokenizer and the reader of one stream. The detokenizer puts, the reader
# takes, and neither waits for the other: what is put before the reader has taken is joined. So a slow reader
# loses nothing, and the buffer is bounded by the length of one answer.
@attrs.define(eq=False)
class OutputCollector:
    """Collector of the outputs of one answer."""

    entry: JournalEntry  # the request in the journal; its tokens are read from here
    decode_token: DecodeToken  # text of one token, for logprobs
    arrival_time: float = 0.0  # seconds since the epoch
    _kind: RequestOutputKind = attrs.field(init=False)
    _wants_logprobs: bool = attrs.field(init=False)
    # The same in every output: an output is made for each token, so nothing is looked up in the request again.
    _request_id: str = attrs.field(init=False)
    _prompt_token_ids: tuple[int, ...] = attrs.field(init=False)  # without virtual tokens
    _num_virtual: int = attrs.field(init=False)
    _lora_request: LoRARequest | None = attrs.field(init=False)
    _pieces: list[str] = attrs.field(factory=list, init=False)
    _text: str = attrs.field(default="", init=False)
    _num_tokens: int = attrs.field(default=0, init=False)
    _num_taken: int = attrs.field(default=0, init=False)
    _logprobs: list[Position] = attrs.field(factory=list, init=False)
    _columns: FlatColumns = attrs.field(factory=FlatColumns, init=False)
    _cumulative_logprob: float = attrs.field(default=0.0, init=False)
    _prompt_logprobs: PromptLogprobs | None = attrs.field(default=None, init=False)
    _finish_reason: FinishReason | None = attrs.field(default=None, init=False)
    _stop_reason: int | str | None = attrs.field(default=None, init=False)
    _has_news: bool = attrs.field(default=False, init=False)
    _was_taken: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        request, params = self.entry.request, self.entry.request.params
        self._kind, self._wants_logprobs = params.output_kind, params.wants_logprobs
        self._request_id = request.parent_id or request.request_id
        self._num_virtual = request.num_virtual_tokens
        self._prompt_token_ids = request.prompt_token_ids[self._num_virtual :]
        self._lora_request = None if request.adapter is None else request.adapter.lora_request

    @property
    def num_tokens(self) -> int:
        """Number of answer tokens put so far."""
        return self._num_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer ended; None until the last output was put."""
        return self._finish_reason

    @property
    def failed(self) -> JournalEntry | None:
        """The answer, if it could not be finished."""
        return self.entry if self._finish_reason is FinishReason.ERROR else None

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
        """Mark the answer as ended; the first reason stays."""
        if self._finish_reason is None:
            self._finish_reason, self._stop_reason = reason, stop_reason
            self._has_news = True

    def has_output(self) -> bool:
        """Return True if `take` has an output: with the first token, every `stream_interval` tokens, and at the end."""
        if not self._has_news or self._finish_reason is not None:
            return self._has_news
        if self._kind is RequestOutputKind.FINAL_ONLY:
            return False
        num_new = self._num_tokens - self._num_taken
        return self._num_taken == 0 or num_new >= self.entry.request.stream_interval

    def take(self) -> RequestOutput:
        """Return everything since the last `take`, as one output of the requested kind."""
        entry, request = self.entry, self.entry.request
        if self._wants_logprobs:
            self._describe_logprobs()
        new_text = "".join(self._pieces)
        self._text += new_text
        self._pieces.clear()
        num_cached, num_created = entry.num_cached_tokens, entry.num_cache_creation_tokens
        if self._num_virtual:
            num_kept = max(0, num_cached + num_created - self._num_virtual)
            num_cached = max(0, num_cached - self._num_virtual)
            num_created = num_kept - num_cached
        output = RequestOutput(
            request_id=self._request_id,
            prompt=request.prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=(self._completion(new_text),),
            finished=self._finish_reason is not None,
            metrics=self.metrics(),
            num_cached_tokens=num_cached,
            num_cache_creation_tokens=num_created,
            prompt_logprobs=None if request.params.prompt_logprobs is None else self._described_prompt(),
            lora_request=self._lora_request,
        )
        self._num_taken = self._num_tokens
        self._has_news, self._was_taken = False, True
        return output

    def _completion(self, new_text: str) -> CompletionOutput:
        is_delta, entry = self._kind is RequestOutputKind.DELTA, self.entry
        return CompletionOutput(
            index=entry.request.index,
            text=new_text if is_delta else self._text,
            token_ids=self._part(entry.output_token_ids),
            cumulative_logprob=self._cumulative_logprob if self._wants_logprobs else None,
            logprobs=self._answer_logprobs() if self._wants_logprobs else None,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            lora_request=self._lora_request,
            weight_version=entry.weight_version,
        )

    def _part(self, items: list[T]) -> Sequence[T]:
        """Return this output's part of a list with one item per token; only the last output copies all of it."""
        if self._kind is RequestOutputKind.DELTA:
            return tuple(items[self._num_taken : self._num_tokens])
        if self._finish_reason is None:
            return ListPrefix(items, self._num_tokens)
        return tuple(items[: self._num_tokens])

    def _answer_logprobs(self) -> Sequence[Position]:
        if not self.entry.request.params.flat_logprobs:
            return self._part(self._logprobs)
        flat = self._columns.flat()
        return flat[self._num_taken : self._num_tokens] if self._kind is RequestOutputKind.DELTA else flat

    def _describe_logprobs(self) -> None:
        """Describe the log-probabilities of the new tokens."""
        entry, params = self.entry, self.entry.request.params
        num_described = len(self._columns if params.flat_logprobs else self._logprobs)
        new = entry.output_logprobs[num_described : self._num_tokens]
        for place, position in enumerate(new, start=num_described):
            before = entry.output_token_ids[max(0, place - MAX_BEFORE) : place]
            entries = entries_of(position, self.decode_token, before)
            if params.flat_logprobs:
                self._columns.append(entries)
            else:
                self._logprobs.append(dict(entries))
            self._cumulative_logprob += position.logprobs[0]

    def _described_prompt(self) -> PromptLogprobs | None:
        """Return the requested log-probabilities of the prompt once all are known; with DELTA only in one output."""
        prompt_logprobs = self.prompt_logprobs()
        has_news = self._kind is not RequestOutputKind.DELTA or not self._was_taken
        return prompt_logprobs if prompt_logprobs is None or has_news else []

    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Return the log-probabilities of the prompt; None if not requested, or not all known yet."""
        entry, params = self.entry, self.entry.request.params
        if params.prompt_logprobs is None or entry.wants_prompt_logprobs:
            return None
        # Described once, since CUMULATIVE streams show them in every output.
        if self._prompt_logprobs is None:
            self._prompt_logprobs = self._described_positions()
        return self._prompt_logprobs

    def _described_positions(self) -> PromptLogprobs:
        prompt, decode_token = self.entry.request.prompt_token_ids, self.decode_token
        described: list[Entries] = [
            entries_of(position, decode_token, prompt[max(1, place - MAX_BEFORE) : place])
            for place, position in enumerate(self.entry.prompt_logprobs, start=1)
        ]
        if not self.entry.request.params.flat_logprobs:
            return (None, *map(dict, described))
        columns = FlatColumns()
        for entries in ((), *described):
            columns.append(entries)
        return columns.flat()

    def metrics(self) -> RequestMetrics:
        """Return the times and counts of the request so far."""
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


def collector_of(collectors: Sequence[OutputCollector]) -> ParallelCollector | OutputCollector:
    """Return the object from which a reader of these answers takes; the collectors are in the order of the index."""
    return collectors[0] if len(collectors) == 1 else ParallelCollector(collectors)


# Parallel sampling: the outputs of several answers to one prompt (`n`), for one reader. Each answer has a
# collector. With n = 1 it is used alone. Otherwise a streamed output carries one answer, in turns, and only
# the last output is `finished`; a FINAL_ONLY reader gets all answers in one output, in the order of their
# index.
class ParallelCollector:
    """Collector of several answers, with the methods of an `OutputCollector`.

    Args:
        collectors: one per answer, by index; all of the same kind of output.
    """

    def __init__(self, collectors: Sequence[OutputCollector]) -> None:
        self._collectors = tuple(collectors)
        self._kind = collectors[0].entry.request.params.output_kind
        self._comes_at_once = self._kind is RequestOutputKind.FINAL_ONLY
        self._turn = 0
        self._prompt_told: set[int] = set()  # to which answers' readers

    @property
    def failed(self) -> JournalEntry | None:
        """An answer that could not be finished, if there is one."""
        for collector in self._collectors:
            if collector.failed is not None:
                return collector.failed
        return None

    @property
    def text(self) -> str:
        """Text of the first answer so far."""
        return self._collectors[0].text

    def has_output(self) -> bool:
        """Return True if `take` has an output."""
        # FINAL_ONLY readers get all answers in one output.
        whether = all if self._comes_at_once else any
        return whether(collector.has_output() for collector in self._collectors)

    def take(self) -> RequestOutput:
        """Return the next output; there must be one."""
        if not self._comes_at_once:
            return self._take_next()
        outputs = [collector.take() for collector in self._collectors]
        return attrs.evolve(outputs[0], outputs=tuple(output.outputs[0] for output in outputs))

    def _with_prompt(self, output: RequestOutput) -> RequestOutput:
        """Add the prompt's log-probabilities, which are computed once, to the outputs of each answer."""
        # The first answer's own collector has them already.
        index = output.outputs[0].index
        prompt_logprobs = self._collectors[0].prompt_logprobs() if index else None
        if prompt_logprobs is None:
            return output
        is_told = self._kind is RequestOutputKind.DELTA and index in self._prompt_told
        self._prompt_told.add(index)
        return attrs.evolve(output, prompt_logprobs=[] if is_told else prompt_logprobs)

    def _take_next(self) -> RequestOutput:
        """Take from the next collector in turn that has an output."""
        turns = [*self._collectors[self._turn :], *self._collectors[: self._turn]]
        place = next(place for place, collector in enumerate(turns) if collector.has_output())
        # In turns, so that one fast answer does not keep back the others.
        self._turn = (self._turn + place + 1) % len(turns)
        output = self._with_prompt(turns[place].take())
        is_last = all(c.finish_reason is not None and not c.has_output() for c in self._collectors)
        return output if output.finished == is_last else attrs.evolve(output, finished=is_last)


@attrs.define(eq=False)
class OutputProcessor:
    """Processor of one answer: moves new tokens of the journal, as text, into the collector, each exactly once.

    That also holds after a crash of the detokenizer: the collector knows how many tokens were delivered, and the state
    of the text before them is computed again.
    """

    entry: JournalEntry  # the request and its answer so far
    collector: OutputCollector  # from which the reader takes outputs
    # Converts ids to text; None if the model has no tokenizer: all text is empty then.
    tokenizer: TokenizerInterface | None
    hold_back: HoldBack = "exact"  # how much text is held back for stop strings; see `StopMatcher`
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
            # The end of the answer: what was held back for a stop string is text after all.
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
        lora_name: of its LoRA adapter; None if it has none.
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
    lora_name: str | None = None


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
    """Statuses of the requests that ended last, by request id: late queries get an answer, and memory is bounded."""

    max_endings: int = MAX_ENDINGS  # most statuses stored
    max_age_s: float = MAX_AGE_S  # time after which one is dropped, seconds
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
