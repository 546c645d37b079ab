"""Detection of answers that repeat a pattern of tokens, with vLLM's parameters and messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from triolet.core.request.param_validation import int64, refuse
from triolet.errors import InvalidParams, shown

MAX_PATTERN_SIZE = 1_024  # every size up to the largest is checked after every token, some 30 ns each

REPETITION_DETECTED = "repetition_detected"
"""The `stop_reason` of an answer that was ended for repetition."""


@attrs.frozen
class RepetitionDetectionParams:
    """Rule by which an answer is ended: its last tokens are one pattern, several times in a row.

    Args:
        max_pattern_size: longest pattern, tokens; 0 is off.
        min_pattern_size: shortest pattern, tokens; 0 is 1.
        min_count: repetitions of the pattern that end the answer; at least 2.

    Raises:
        InvalidParams: a value of the wrong type or out of range.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __attrs_post_init__(self) -> None:
        for field in ("max_pattern_size", "min_pattern_size", "min_count"):
            int64(field, getattr(self, field))
        if not 0 <= self.min_pattern_size <= self.max_pattern_size:
            raise InvalidParams(
                "max_pattern_size, min_pattern_size must be >=0, with min_pattern_size <= max_pattern_size. "
                f"Set both to 0 to disable repetitive pattern detection. Got {self.max_pattern_size} and "
                f"{self.min_pattern_size}.",
                field="min_pattern_size",
                got=self.min_pattern_size,
            )
        if self.max_pattern_size > MAX_PATTERN_SIZE:
            raise refuse("max_pattern_size", f"must be at most {MAX_PATTERN_SIZE}", self.max_pattern_size)
        if self.max_pattern_size and self.min_count < 2:
            raise InvalidParams(
                "min_count must be >= 2 to detect repetitive patterns in engine output. If you do not wish to detect "
                "repetitive patterns, set max_pattern_size to 0.",
                field="min_count",
                got=self.min_count,
            )


def repetition_detection(
    value: RepetitionDetectionParams | Mapping[str, int],
) -> RepetitionDetectionParams:
    """Convert the field of `SamplingParams`, which is a mapping in a request over the wire."""
    if isinstance(value, RepetitionDetectionParams):
        return value
    if not isinstance(value, Mapping):
        raise refuse("repetition_detection", "must be a RepetitionDetectionParams or a mapping", value)
    if unknown := value.keys() - {field.name for field in attrs.fields(RepetitionDetectionParams)}:
        raise InvalidParams(
            f"repetition_detection has no field {shown(next(iter(unknown)))}.",
            field="repetition_detection",
            got=value,
        )
    return RepetitionDetectionParams(**value)


def is_repeating(token_ids: Sequence[int], params: RepetitionDetectionParams) -> bool:
    """Return True if the tokens end in a pattern of an allowed size, `min_count` times.

    Args:
        token_ids: the answer so far.
        params: sizes of the pattern and number of repetitions.
    """
    if not params.max_pattern_size:
        return False
    # A longer pattern does not fit `min_count` times.
    longest = min(params.max_pattern_size, len(token_ids) // params.min_count)
    return any(
        token_ids[-1] == token_ids[-1 - size] and _ends_in_repeats(token_ids, size, params.min_count)
        for size in range(max(params.min_pattern_size, 1), longest + 1)
    )


def _ends_in_repeats(token_ids: Sequence[int], size: int, count: int) -> bool:
    first = len(token_ids) - size * count
    # Each token equals the one `size` places later; from the end, where a difference is found soonest.
    return all(
        token_ids[at] == token_ids[at + size] for at in range(len(token_ids) - size - 1, first - 1, -1)
    )
