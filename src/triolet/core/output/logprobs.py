"""Log-probabilities in the form of outputs: a mapping per position, or the same as columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar, overload

import attrs

from triolet.core.output.detokenizer import DecodeToken
from triolet.core.step_plan import TokenLogprobs

T = TypeVar("T")


# `ListPrefix` is a read-only view of the first items of a list that only grows. A CUMULATIVE stream of n
# tokens yields n outputs, each with all tokens so far. Copies would make that n * n work, and the list itself
# would change after it was handed out; its first `length` items never change.
@attrs.frozen(eq=False, repr=False)
class ListPrefix(Sequence[T]):
    """First `length` items of an append-only list; equal to any sequence of the same items."""

    _items: list[T]  # the list; its items must not change
    _length: int

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        return islice(self._items, self._length)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...

    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if isinstance(index, slice):
            return tuple(self._items[place] for place in range(*index.indices(self._length)))
        # The list behind it may be longer already.
        if not -self._length <= index < self._length:
            raise IndexError(f"index must be in [-{self._length}, {self._length}); got {index}")
        return self._items[index if index >= 0 else index + self._length]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str | bytes) or not isinstance(other, Sequence):
            return NotImplemented
        return len(other) == self._length and all(a == b for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@attrs.frozen
class Logprob:
    """Log-probability of one token at one position.

    Args:
        logprob: natural logarithm; or what `logprobs_mode` says.
        rank: 1 for the likeliest; of tokens that were named (`logprob_token_ids`) the place among them.
        decoded_token: the token's text (see `core.output.detokenizer`); None with `detokenize=False`.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Position = dict[int, Logprob]
"""By token id, the chosen token (or, in a prompt, the token that stands there) first."""


Entries = Sequence[tuple[int, Logprob]]
"""One position: the token that is there, then the others, in which it may be a second time."""


def entries_of(position: TokenLogprobs, decode_token: DecodeToken, before: Sequence[int] = ()) -> Entries:
    """Add ranks and texts to the log-probabilities of one position.

    Args:
        position: the token that is there, then others: the likeliest, in falling order, or those that were named.
        decode_token: text of one token.
        before: tokens that stand before the position; the last few are enough.
    Returns:
        Each with the rank that vLLM gives: of the token that is there its own, of the others their place.
    """
    ranks = (position.rank, *range(1, len(position.token_ids)))
    return [
        (token_id, Logprob(logprob, rank, decode_token(token_id, before)))
        for token_id, logprob, rank in zip(position.token_ids, position.logprobs, ranks, strict=True)
    ]


@attrs.frozen(eq=False)
class FlatLogprobs(Sequence[Position]):
    """Positions as columns: a few long lists instead of many small mappings.

    Args:
        start_indices: where each position begins in the columns.
        end_indices: where it ends; where it begins, for the first token of a prompt, which has none.
        token_ids: of all positions, the chosen token of each first, and again where it is among the others.
        logprobs: of these tokens.
        ranks: of these tokens.
        decoded_tokens: of these tokens.
    """

    start_indices: Sequence[int]
    end_indices: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    ranks: Sequence[int | None]
    decoded_tokens: Sequence[str | None]

    @classmethod
    def of(cls, positions: Iterable[Mapping[int, Logprob] | None]) -> FlatLogprobs:
        """Return the columns of these positions."""
        columns = FlatColumns()
        for position in positions:
            columns.append(tuple((position or {}).items()))
        return columns.flat()

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> Position: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> Position | FlatLogprobs:
        if isinstance(index, slice):
            columns = FlatColumns()
            for place in range(*index.indices(len(self))):
                columns.append(self._entries(place))
            return columns.flat()
        return dict(self._entries(index))

    def _entries(self, place: int) -> Entries:
        places = range(self.start_indices[place], self.end_indices[place])
        return [
            (self.token_ids[i], Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i]))
            for i in places
        ]

    def __iter__(self) -> Iterator[Position]:
        return (self[place] for place in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str | bytes) or not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == (b or {}) for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash((tuple(self.end_indices), tuple(self.token_ids), tuple(self.logprobs)))


@attrs.define(eq=False)
class FlatColumns:
    """Growing columns, of which snapshots can be taken without a copy."""

    _starts: list[int] = attrs.field(factory=list)
    _ends: list[int] = attrs.field(factory=list)
    _token_ids: list[int] = attrs.field(factory=list)
    _logprobs: list[float] = attrs.field(factory=list)
    _ranks: list[int | None] = attrs.field(factory=list)
    _decoded_tokens: list[str | None] = attrs.field(factory=list)

    def __len__(self) -> int:
        return len(self._ends)

    def append(self, position: Entries) -> None:
        """Append a position."""
        self._starts.append(len(self._token_ids))
        for token_id, entry in position:
            self._token_ids.append(token_id)
            self._logprobs.append(entry.logprob)
            self._ranks.append(entry.rank)
            self._decoded_tokens.append(entry.decoded_token)
        self._ends.append(len(self._token_ids))

    def flat(self) -> FlatLogprobs:
        """Return all positions so far."""
        num_positions, num_entries = len(self._ends), len(self._token_ids)
        return FlatLogprobs(
            start_indices=ListPrefix(self._starts, num_positions),
            end_indices=ListPrefix(self._ends, num_positions),
            token_ids=ListPrefix(self._token_ids, num_entries),
            logprobs=ListPrefix(self._logprobs, num_entries),
            ranks=ListPrefix(self._ranks, num_entries),
            decoded_tokens=ListPrefix(self._decoded_tokens, num_entries),
        )
