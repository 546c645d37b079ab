"""Beam search without a model: selection of the beams to continue, and comparison of finished answers.

As in vLLM, each beam asks for its 2 * beam_width likeliest next tokens, so that enough are left when half of them end
the answer. An end of sequence completes a beam at once; the best `beam_width` of the others continue. Beams are
compared by the sum of their log-probabilities divided by length ** length_penalty, prompt included.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs

from triolet.core.output.logprobs import Logprob, Position
from triolet.core.request.param_validation import refuse, strict_plain_fields
from triolet.core.request.request import FinishReason

MAX_BEAM_WIDTH = 1_024  # that many requests at a time
MAX_LENGTH_PENALTY = 16.0  # a length to that power is still a number


def _no_grammar(value: object) -> None:
    if value is not None:
        raise refuse("structured_outputs", "must be None: beams follow no grammar", value)


def _no_watermark(value: object) -> None:
    if value is not None:
        raise refuse("watermarking", "must be None: there are no watermarks", value)


@attrs.frozen(field_transformer=strict_plain_fields)
class BeamSearchParams:
    """Parameters of a beam search.

    Args:
        beam_width: answers that are followed at a time, and given at the end.
        max_tokens: longest answer, tokens.
        ignore_eos: go on past the model's end-of-sequence tokens.
        temperature: of the requests; the log-probabilities are the model's own, so it changes nothing as long as
            `logprobs_mode` is raw.
        length_penalty: above 0 longer answers are preferred, the more the larger it is; at 0 the sum counts as it is.
        include_stop_str_in_output: keep the end-of-sequence token in `tokens`.
        structured_outputs: None; anything else is refused.
        skip_special_tokens: leave special tokens out of the text.
        watermarking: None; anything else is refused.

    Raises:
        InvalidParams: a value of the wrong type or out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: None = attrs.field(default=None, converter=_no_grammar)
    skip_special_tokens: bool = True
    watermarking: None = attrs.field(default=None, converter=_no_watermark)

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise refuse("beam_width", f"must be in [1, {MAX_BEAM_WIDTH}]", self.beam_width)
        if self.max_tokens < 1:
            raise refuse("max_tokens", "must be at least 1", self.max_tokens)
        if not 0.0 <= self.temperature <= 2.0:
            raise refuse("temperature", "must be in [0, 2]", self.temperature)
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:
            limit = MAX_LENGTH_PENALTY
            raise refuse("length_penalty", f"must be in [-{limit}, {limit}]", self.length_penalty)


@attrs.frozen(kw_only=True)
class BeamSearchSequence:
    """One answer, finished or not.

    Args:
        tokens: prompt and answer.
        num_prompt_tokens: how many of these are the prompt.
        cum_logprob: sum over the answer.
        logprobs: per token of the answer, what its beam could choose from.
        finish_reason: `stop` or `length`; None while it goes on.
        stop_reason: the end-of-sequence token.
        text: of all tokens; None without a tokenizer.
    """

    tokens: tuple[int, ...]
    num_prompt_tokens: int
    cum_logprob: float = 0.0
    logprobs: tuple[Position, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    text: str | None = None

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        """Token ids of the answer."""
        return self.tokens[self.num_prompt_tokens :]

    def score(self, length_penalty: float) -> float:
        """Return the score for comparisons; the end-of-sequence token does not count as length."""
        # Each choice has its log-probabilities, so an end that is shown is one where tokens and choices are as many.
        shows_end = self.stop_reason is not None and len(self.output_token_ids) == len(self.logprobs)
        # As in vLLM, the prompt counts as length, too.
        length: float = float(len(self.tokens) - shows_end) ** length_penalty
        return self.cum_logprob / length


@attrs.frozen
class BeamSearchOutput:
    """Best answers, best first."""

    sequences: tuple[BeamSearchSequence, ...]


@attrs.frozen(eq=False)
class _Way:
    """Continuation of a beam by one of its next tokens."""

    beam: BeamSearchSequence
    position: Mapping[int, Logprob]  # what the beam could choose from
    token_id: int
    cum_logprob: float  # with that of the token
    is_end: bool  # True for an end of sequence

    def sequence(self, *, shows_end: bool) -> BeamSearchSequence:
        """Return the beam with the token, which is left out if it is an end that is not shown."""
        tokens, is_end = self.beam.tokens, self.is_end
        return attrs.evolve(
            self.beam,
            tokens=tokens if is_end and not shows_end else (*tokens, self.token_id),
            # Also in vLLM its log-probability counts, whether it is shown or not.
            cum_logprob=self.cum_logprob,
            logprobs=(*self.beam.logprobs, dict(self.position)),
            finish_reason=FinishReason.STOP if is_end else None,
            stop_reason=self.token_id if is_end else None,
        )


class BeamSearch:
    """State of one beam search.

    Args:
        eos_token_ids: that complete a beam.
    """

    def __init__(
        self, params: BeamSearchParams, eos_token_ids: Iterable[int], prompt_token_ids: Sequence[int]
    ) -> None:
        self._params = params
        self._eos: Collection[int] = () if params.ignore_eos else frozenset(eos_token_ids)
        root = BeamSearchSequence(tokens=tuple(prompt_token_ids), num_prompt_tokens=len(prompt_token_ids))
        self.live = [root]
        self._completed: list[BeamSearchSequence] = []

    def advance(self, choices: Sequence[Mapping[int, Logprob]]) -> None:
        """Continue every live beam with each of its next tokens, and keep the best.

        Args:
            choices: for each live beam, its next tokens.
        """
        ways = [
            _Way(beam, position, token_id, beam.cum_logprob + logprob.logprob, token_id in self._eos)
            for beam, position in zip(self.live, choices, strict=True)
            for token_id, logprob in position.items()
        ]
        # A beam is as long as the prompt and the answer, so only those that stay are built.
        self.live = self._taken(way for way in ways if not way.is_end)
        self._completed = self._best([*self._completed, *self._taken(way for way in ways if way.is_end)])

    def _taken(self, ways: Iterable[_Way]) -> list[BeamSearchSequence]:
        """Return the best of some continuations, all of which are ends or none: they have the same length."""
        best = sorted(ways, key=lambda way: way.cum_logprob, reverse=True)[: self._params.beam_width]
        return [way.sequence(shows_end=self._params.include_stop_str_in_output) for way in best]

    def _best(self, beams: Iterable[BeamSearchSequence]) -> list[BeamSearchSequence]:
        ranked = sorted(beams, key=lambda beam: beam.score(self._params.length_penalty), reverse=True)
        return ranked[: self._params.beam_width]

    def end(self) -> list[BeamSearchSequence]:
        """Return the best answers, best first; those that have not ended are cut off at their maximum length."""
        cut = [attrs.evolve(beam, finish_reason=FinishReason.LENGTH) for beam in self.live]
        return self._best([*self._completed, *cut])
