"""Positions at which a model may begin to compute something else, read from its config.

Every whole number in a config whose name speaks of a length or a position is taken for a threshold: windows, chunks,
original context lengths, scaling floors. A name that means something else costs a few tokens of the load check and does
no harm; a threshold that is overlooked may cost every answer beyond it. Plain Python: the check itself is
`transformers_positions`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs

SPAN_TOKENS: Final = 8  # computed around a threshold
TOKENS_BEFORE: Final = 2  # of those, the ones before it
MAX_PREFIX: Final = 32_768  # earlier tokens that a span may attend to; bounds memory and time of the check
_SHORT_PREFIX: Final = 8  # of a span that lies further on

_NAMES: Final = re.compile(r"window|position|chunk|scale|length|context|ctx|seq|floor|span|local|block")
# How many earlier tokens there are decides here, and not the position alone. Other names may mean either.
_WINDOW_NAMES: Final = re.compile(r"window|chunk|local|span|block")
_POSITION_NAMES: Final = re.compile(r"position|scale|floor")


@attrs.frozen
class Threshold:
    """Number of tokens at which the model may begin to compute something else.

    Args:
        field: its name in the config, with the sections around it: `rope_parameters.original_max_position_embeddings`.
        tokens: the field's value.
    """

    field: str
    tokens: int

    def __str__(self) -> str:
        return f"{self.field}={self.tokens}"

    @property
    def is_window(self) -> bool:
        """True if its name is that of a window or chunk, which only as many earlier tokens can show."""
        return _WINDOW_NAMES.search(self._name) is not None

    @property
    def is_position(self) -> bool:
        """True if its name is that of a position, whatever number of earlier tokens is attended to."""
        return not self.is_window and _POSITION_NAMES.search(self._name) is not None

    @property
    def _name(self) -> str:
        return self.field.rpartition(".")[2]


@attrs.frozen
class PositionSpan:
    """Tokens of one sequence that are computed to see what a threshold changes.

    Args:
        start: position of the first of `SPAN_TOKENS` tokens.
        num_prefix: earlier tokens that they attend to; all of them if the thresholds may be windows within reach.
        thresholds: what lies among the tokens.
    """

    start: int
    num_prefix: int
    thresholds: tuple[Threshold, ...] = ()

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + SPAN_TOKENS

    def __str__(self) -> str:
        where = f"positions {self.start} to {self.end - 1}"
        return f"{where} ({', '.join(map(str, self.thresholds))})" if self.thresholds else where


def position_thresholds(config: Mapping[str, object], max_position: int) -> tuple[Threshold, ...]:
    """Collect the thresholds that a sequence can reach.

    Args:
        config: fields, with sections and lists inside.
        max_position: longest sequence, tokens.

    Returns:
        One for each field and value, in the order of the values.
    """
    found = {Threshold(field, tokens) for field, tokens in _whole_numbers(config, "")}
    return tuple(
        sorted(
            # A window as long as the longest sequence hides nothing.
            (each for each in found if 2 <= each.tokens <= max_position - each.is_window),
            key=lambda threshold: (threshold.tokens, threshold.field),
        )
    )


def _whole_numbers(section: Mapping[str, object], path: str) -> Iterator[tuple[str, int]]:
    for name, value in section.items():
        # Lists hold one value per layer, or one per pair of dimensions.
        for entry in value if isinstance(value, Sequence) and not isinstance(value, str) else (value,):
            if isinstance(entry, Mapping):
                yield from _whole_numbers(entry, f"{path}{name}.")
            elif isinstance(entry, bool) or not isinstance(entry, int | float) or not _NAMES.search(name):
                continue
            elif entry == entry // 1:
                yield f"{path}{name}", int(entry)


def spans_of(thresholds: Sequence[Threshold], max_position: int) -> tuple[PositionSpan, ...]:
    """Choose what to compute: a sequence's beginning, its end, and the tokens around each threshold.

    Args:
        thresholds: each at most `max_position`.
        max_position: longest sequence, tokens.
    """
    last = max(0, max_position - SPAN_TOKENS)
    crossing: dict[int, list[Threshold]] = {0: [], last: []}
    for threshold in thresholds:
        start = min(max(0, threshold.tokens - TOKENS_BEFORE), last)
        crossing.setdefault(start, []).append(threshold)
    return tuple(
        PositionSpan(start, _num_prefix(start, found), tuple(found))
        for start, found in sorted(crossing.items())
    )


def _num_prefix(start: int, thresholds: Sequence[Threshold]) -> int:
    # Each counts for more among few earlier tokens, and so all of them stand there only for what may be a window.
    needs_all = any(not threshold.is_position for threshold in thresholds) and start <= MAX_PREFIX
    return start if needs_all else min(start, _SHORT_PREFIX)


def uncovered(spans: Sequence[PositionSpan], windows: frozenset[int]) -> tuple[Threshold, ...]:
    """Find windows that no span shows, because they lie beyond the longest prefix.

    Args:
        spans: what is computed.
        windows: sizes that layers hand to the attention function. Those are honoured there, and their masks were
            compared at such positions.
    """
    return tuple(
        threshold
        for span in spans
        for threshold in span.thresholds
        if threshold.is_window and span.num_prefix < span.start and threshold.tokens not in windows
    )
