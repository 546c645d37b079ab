"""Token ids of a prompt that is encoded in parts: of one that is too long only their number is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs


@attrs.frozen
class EstimatedIds(Sequence[int]):
    """Numbers in place of the ids of a text, about as many as it has tokens."""

    _numbers: range

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        found = self._numbers[index]
        return EstimatedIds(found) if isinstance(found, range) else found


@attrs.define(eq=False)
class PromptIds:
    """Ids of a prompt, put together of its parts.

    A text of special tokens that must not become any has a part for each of them, hundreds of thousands: a list of the
    parts would be joined, counted and freed in one C call each, which hold the GIL.
    """

    max_tokens: int | None  # longest prompt whose ids are kept; None for no limit
    num_tokens: int = attrs.field(default=0, init=False)  # about, if it is an estimate
    is_estimate: bool = attrs.field(default=False, init=False)
    ids: list[int] = attrs.field(factory=list, init=False)  # none of a longer prompt

    @property
    def is_too_long(self) -> bool:
        """True if the prompt is longer than `max_tokens`."""
        return self.max_tokens is not None and self.num_tokens > self.max_tokens

    def add(self, parts: Iterable[Sequence[int]]) -> None:
        """Append parts, one by one as they are encoded."""
        for part in parts:
            self.num_tokens += len(part)
            self.is_estimate |= isinstance(part, EstimatedIds)
            if not self.is_too_long:
                self.ids += part
            elif self.ids:
                self.ids = []
