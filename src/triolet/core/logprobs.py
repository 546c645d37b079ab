"""Log-probabilities as a reader gets them: a mapping per position, or the same as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import overload

import attrs

from triolet.core.plan import TokenLogprobs


@attrs.frozen
class Logprob:
    """One token's log-probability at one position.

    Args:
        logprob: natural logarithm; or what `logprobs_mode` says.
        rank: 1 for the likeliest; None where it was not computed.
        decoded_token: the token's text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Position = dict[int, Logprob]
"""By token id, the chosen token (or, in a prompt, the token that stands there) first."""

DecodeToken = Callable[[int], str]


def described(position: TokenLogprobs, decode_token: DecodeToken, *, has_ranks: bool = True) -> Position:
    """What a runner said of a position, with ranks and texts.

    Args:
        position: the token that is there, then others.
        decode_token: text of one token id.
        has_ranks: whether the others are the likeliest, in falling order.
    """
    (chosen_id, chosen), *others = zip(position.token_ids, position.logprobs, strict=True)
    entries = {chosen_id: Logprob(chosen, position.rank, decode_token(chosen_id))}
    for rank, (token_id, logprob) in enumerate(others, start=1):
        if token_id not in entries:
            entries[token_id] = Logprob(logprob, rank if has_ranks else None, decode_token(token_id))
    return entries


@attrs.frozen(eq=False)
class FlatLogprobs(Sequence[Position]):
    """Positions as columns: a few long tuples, where mappings are many small objects.

    Args:
        start_indices: where each position begins in the columns.
        end_indices: where it ends; where it begins, for the first token of a prompt, which has none.
        token_ids: of all positions, the chosen token of each first.
        logprobs: of these tokens.
        ranks: of these tokens.
        decoded_tokens: of these tokens.
    """

    start_indices: tuple[int, ...]
    end_indices: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int | None, ...]
    decoded_tokens: tuple[str | None, ...]

    @classmethod
    def of(cls, positions: Iterable[Mapping[int, Logprob] | None]) -> FlatLogprobs:
        """The columns of these positions."""
        entries: list[tuple[int, Logprob]] = []
        ends = []
        for position in positions:
            entries.extend((position or {}).items())
            ends.append(len(entries))
        return cls(
            start_indices=(0, *ends[:-1]) if ends else (),
            end_indices=tuple(ends),
            token_ids=tuple(token_id for token_id, _ in entries),
            logprobs=tuple(entry.logprob for _, entry in entries),
            ranks=tuple(entry.rank for _, entry in entries),
            decoded_tokens=tuple(entry.decoded_token for _, entry in entries),
        )

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> Position: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> Position | FlatLogprobs:
        if isinstance(index, slice):
            return FlatLogprobs.of(self[place] for place in range(*index.indices(len(self))))
        places = range(self.start_indices[index], self.end_indices[index])
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in places
        }

    def __iter__(self) -> Iterator[Position]:
        return (self[place] for place in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str | bytes) or not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == (b or {}) for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash((self.end_indices, self.token_ids, self.logprobs))
