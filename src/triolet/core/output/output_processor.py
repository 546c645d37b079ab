"""Output processor: it converts a request's new tokens in the journal to text for its reader."""

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
