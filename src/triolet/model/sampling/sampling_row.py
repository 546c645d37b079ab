"""Sampler's state of one request: its parameters, and as much of its history as they need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy

import numpy as np
import numpy.typing as npt

from triolet.core.request.params import SamplingParams


class TokenCounts:
    """Distinct tokens of prompt and answer and their counts in the answer, for the penalties.

    Args:
        prompt_token_ids: the prompt; its tokens are listed with a count of 0.
        output_token_ids: the answer so far.
    """

    # A sparse list: a request has a few thousand distinct tokens, a vocabulary up to a quarter of a million.
    __slots__ = ("_counts", "_places", "_token_ids")

    def __init__(self, prompt_token_ids: Iterable[int], output_token_ids: Iterable[int]) -> None:
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt_token_ids))}
        self._token_ids = np.fromiter(self._places, dtype=np.int64, count=len(self._places))
        self._counts = np.zeros(len(self._places), dtype=np.float32)
        for token_id in output_token_ids:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """Count one more token of the answer."""
        place = self._places.get(token_id)
        if place is None:
            place = self._new_place(token_id)
        self._counts[place] += 1

    def after(self, token_ids: Iterable[int]) -> TokenCounts:
        """Return a copy with some more tokens of the answer."""
        later = copy(self)
        # Deep enough that the copy may grow; `copy` shares them.
        later._places, later._token_ids = dict(self._places), self._token_ids.copy()
        later._counts = self._counts.copy()
        for token_id in token_ids:
            later.add(token_id)
        return later

    def _new_place(self, token_id: int) -> int:
        place = len(self._places)
        if place == len(self._token_ids):
            grown = 2 * place + 16  # doubling, so that a long answer is not copied over and over
            self._token_ids, counts = np.resize(self._token_ids, grown), np.zeros(grown, dtype=np.float32)
            counts[:place] = self._counts
            self._counts = counts
        self._places[token_id] = place
        self._token_ids[place] = token_id
        return place

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """[num_distinct] token ids, each once."""
        return self._token_ids[: len(self._places)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """[num_distinct], of each of `token_ids` in the answer."""
        return self._counts[: len(self._places)]


class SamplingRow:
    """Sampling parameters and token history of one request.

    Args:
        params: sampling parameters.
        seed: of the noise.
        vocab_size: token ids from here on are left out of `ending_token_ids` and `bad_words_token_ids`: a tokenizer or
            a generation config may know more tokens than the model has scores for, and those cannot be drawn.
        prompt_token_ids: the prompt.
        output_token_ids: the answer so far.
        ending_token_ids: masked while the answer is shorter than `params.min_tokens`.
        bad_words_token_ids: sequences whose last token is banned when the answer ends in the others.
    """

    __slots__ = ("bad_words", "counts", "ending_token_ids", "output_token_ids", "params", "seed")

    def __init__(
        self,
        *,
        params: SamplingParams,
        seed: int,
        vocab_size: int,
        prompt_token_ids: Sequence[int] = (),
        output_token_ids: Sequence[int] = (),
        ending_token_ids: Iterable[int] = (),
        bad_words_token_ids: Iterable[tuple[int, ...]] = (),
    ) -> None:
        self.params = params
        self.seed = seed
        self.output_token_ids = list(output_token_ids)
        self.ending_token_ids = tuple(
            sorted(token_id for token_id in ending_token_ids if token_id < vocab_size)
        )
        self.bad_words = tuple(
            (word[:-1], word[-1]) for word in bad_words_token_ids if word and word[-1] < vocab_size
        )
        self.counts = TokenCounts(prompt_token_ids, output_token_ids) if self.has_penalties else None

    @property
    def has_penalties(self) -> bool:
        """True if the request's own tokens change its logits."""
        params = self.params
        return (
            params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        )

    @property
    def has_edits(self) -> bool:
        """True if logits are changed before the argmax is taken."""
        params = self.params
        return (
            self.has_penalties
            or params.allowed_token_ids is not None
            or bool(params.logit_bias)
            or bool(self.bad_words)
            or (params.min_tokens > 0 and bool(self.ending_token_ids))
        )

    def append(self, token_id: int) -> None:
        """Append a token that was chosen."""
        self.output_token_ids.append(token_id)
        if self.counts is not None:
            self.counts.add(token_id)

    def after(self, token_ids: Sequence[int]) -> SamplingRow:
        """Return a copy as it will be after these tokens."""
        later = copy(self)
        later.output_token_ids = [*self.output_token_ids, *token_ids]
        if self.counts is not None:
            later.counts = self.counts.after(token_ids)
        return later

    def banned_token_ids(self) -> list[int]:
        """Return the tokens that may not come next: they would complete a bad word, or end the answer too early."""
        banned = [last for before, last in self.bad_words if self._answer_ends_in(before)]
        if len(self.output_token_ids) < self.params.min_tokens:
            banned.extend(self.ending_token_ids)
        return banned

    def _answer_ends_in(self, token_ids: tuple[int, ...]) -> bool:
        return not token_ids or tuple(self.output_token_ids[-len(token_ids) :]) == token_ids
