"""One request's way from the journal to its reader: which tokens have become text, and which text waits to be read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

import attrs

from triolet.core.journal import JournalEntry
from triolet.core.metrics.iteration_stats import FinishedRequest
from triolet.core.output.detokenizer import Decode, OutputText, Piece, no_piece
from triolet.core.output.output_collector import OutputCollector
from triolet.core.output.stop_strings import HoldBack
from triolet.core.output.token_text import no_text, token_decoder
from triolet.core.request.status import FinishReason
from triolet.core.request.tokenizer_interface import ContextFreeTokenizer, TokenizerInterface


@attrs.define(eq=False)
class OutputProcessor:
    """Moves new tokens of the journal, as text, into the collector. Exactly once, also after a crash in between:
    how far it has come is what the collector has, and the half characters before it are computed again.

    Args:
        entry: the request and its answer so far.
        collector: what its reader takes from.
        tokenizer: turns ids into text; None where the model has no tokenizer, and every text is empty.
        hold_back: what text waits for a stop string; see `StopMatcher`.
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
        """The feed of a request that has just been admitted; `arrival_time` is wall clock, seconds."""
        has_text = tokenizer is not None and entry.request.params.detokenize
        decode_token = token_decoder(decoder(tokenizer, skip_special_tokens=False)) if has_text else no_text
        collector = OutputCollector(entry, decode_token, arrival_time)
        return cls(entry, collector, tokenizer, hold_back)

    def forget_text(self) -> None:
        """The detokenizer has crashed: trust nothing but the journal and what the reader has got."""
        self._text = None

    def advance(self) -> bool:
        """Deliver what is new.

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
        """What is counted of it when it ends."""
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
    """What turns the tokens of a request into text; see `SamplingParams` for its arguments."""
    if tokenizer is None:
        return lambda token_ids: ""

    def decode(token_ids: Sequence[int]) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    return decode if is_spaced or skip_special_tokens else _unspaced(tokenizer, decode)


def pieces(
    tokenizer: TokenizerInterface | None, *, skip_special_tokens: bool, is_spaced: bool = True
) -> Piece:
    """What is known of single tokens under the `decoder` with the same arguments."""
    if isinstance(tokenizer, ContextFreeTokenizer) and (is_spaced or skip_special_tokens):
        return tokenizer.pieces(skip_special_tokens=skip_special_tokens)
    return no_piece


def _unspaced(tokenizer: TokenizerInterface, decode: Decode) -> Decode:
    """A decoder that puts nothing between two special tokens: each of them begins a text of its own."""

    @cache
    def is_special(token_id: int) -> bool:
        return tokenizer.decode([token_id], skip_special_tokens=True) == "" != decode([token_id])

    def decode_unspaced(token_ids: Sequence[int]) -> str:
        pairs = enumerate(itertools.pairwise(token_ids), start=1)
        starts = [place for place, pair in pairs if all(map(is_special, pair))]
        return "".join(decode(token_ids[a:b]) for a, b in itertools.pairwise([0, *starts, len(token_ids)]))

    return decode_unspaced
