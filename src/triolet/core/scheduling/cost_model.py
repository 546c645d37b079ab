"""Cost model of a step: its time, predicted from the times of the steps before it.

A step has a part that is the same whatever is in it (weights are read once), a part for each row, and a part for each
token of a prompt beyond a row's first:

    fixed_s + rows * row_s + further_tokens * token_s

The three are fitted to what was measured. Steps of the same kind, by powers of two of rows and of further tokens, are
one point, so that a thousand equal steps do not drown the one other that says how cost grows. A point goes down
quickly and up slowly, since what makes a step longer than it must be (a busy machine, a first time) passes; one that
was not seen for long is forgotten. First the line through the decodes, relative errors least squares, then what
prompts add to it. No clock is read here: what a step took comes with its result.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

QUICKLY, SLOWLY = 0.5, 0.1  # part of a difference that a point moves by
MOST_GROWTH = 2.0  # a measurement counts as at most that many times what was known
MEMORY_STEPS = 1024  # a few seconds to minutes of steps
FIT_INTERVAL_STEPS = 8  # one fit takes some 20 microseconds


@attrs.define
class _Point:
    num_rows: float
    num_further: float
    elapsed_s: float
    step: int

    def move(self, num_rows: int, num_further: int, elapsed_s: float, step: int) -> None:
        elapsed_s = min(elapsed_s, MOST_GROWTH * self.elapsed_s)
        rate = QUICKLY if elapsed_s < self.elapsed_s else SLOWLY
        self.elapsed_s += rate * (elapsed_s - self.elapsed_s)
        self.num_rows += rate * (num_rows - self.num_rows)
        self.num_further += rate * (num_further - self.num_further)
        self.step = step


@attrs.define
class CostModel:
    """Fitted costs of a step; all are 0 until a step was measured.

    Args:
        fixed_s: cost of any step, seconds.
        row_s: cost of a row and one token of it, seconds.
        token_s: cost of each further token, seconds.
    """

    fixed_s: float = 0.0
    row_s: float = 0.0
    token_s: float = 0.0
    _points: dict[tuple[int, int], _Point] = attrs.field(factory=dict, init=False)
    _num_steps: int = attrs.field(default=0, init=False)

    def observe(self, num_rows: int, num_tokens: int, elapsed_s: float) -> None:
        """Add the measured time of a step.

        Args:
            num_rows: rows of the step.
            num_tokens: tokens of all rows.
            elapsed_s: time of the step, seconds; 0 if it is not known.
        """
        if elapsed_s <= 0 or not num_rows:
            return
        self._num_steps += 1
        num_further = num_tokens - num_rows
        kind = (num_rows.bit_length(), num_further.bit_length())
        if (point := self._points.get(kind)) is not None:
            point.move(num_rows, num_further, elapsed_s, self._num_steps)
        else:
            self._points[kind] = _Point(num_rows, num_further, elapsed_s, self._num_steps)
        if point is None or self._num_steps % FIT_INTERVAL_STEPS == 0:
            self._fit()

    def _fit(self) -> None:
        self._points = {
            kind: point for kind, point in self._points.items() if point.step > self._num_steps - MEMORY_STEPS
        }
        decodes = [point for (_, further), point in self._points.items() if not further]
        self.fixed_s, self.row_s = _line(decodes) if decodes else (0.0, 0.0)
        self.token_s = self._further_s(point for (_, further), point in self._points.items() if further)

    def _further_s(self, prompts: Iterable[_Point]) -> float:
        above, below = 0.0, 0.0
        for point in prompts:
            share = point.num_further / point.elapsed_s
            above += share * (1 - (self.fixed_s + point.num_rows * self.row_s) / point.elapsed_s)
            below += share * share
        return max(0.0, above / below) if below else 0.0


def _line(points: list[_Point]) -> tuple[float, float]:
    """Return start and slope, both at least 0, of the least-squares line (relative errors) of seconds over rows."""
    one = rows = squares = times = products = 0.0
    for point in points:
        weight = 1 / point.elapsed_s**2
        one += weight
        rows += weight * point.num_rows
        squares += weight * point.num_rows**2
        times += weight * point.elapsed_s
        products += weight * point.num_rows * point.elapsed_s
    determinant = one * squares - rows**2
    if determinant <= 1e-9 * one * squares:  # all points have the same number of rows
        return 0.0, products / squares
    slope = (one * products - rows * times) / determinant
    start = (times - slope * rows) / one
    if slope < 0:
        return times / one, 0.0
    return (start, slope) if start >= 0 else (0.0, products / squares)
