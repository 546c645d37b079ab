"""What greedy steps of the C++ decoder have found, while they run and after."""

from __future__ import annotations

import ctypes

import attrs

from triolet.kernels.cpu.decoder import RunStruct, StepStruct
from triolet.model.interface import GreedyStep


@attrs.frozen(eq=False)
class Found:
    """Where steps write down their likeliest tokens, and how long they took.

    Args:
        count: tokens of a step.
        peaks: [steps, count], the largest logits.
        best: [steps, count], the tokens that have them.
        elapsed_s: [steps], seconds.
    """

    count: int
    peaks: ctypes.Array[ctypes.c_float]
    best: ctypes.Array[ctypes.c_int64]
    elapsed_s: ctypes.Array[ctypes.c_float]

    @classmethod
    def of(cls, count: int, num_steps: int = 1) -> Found:
        """Room for that many tokens of that many steps."""
        size = count * num_steps
        return cls(
            count, (ctypes.c_float * size)(), (ctypes.c_int64 * size)(), (ctypes.c_float * num_steps)()
        )

    def addresses(self) -> dict[str, int]:
        """For the fields of `StepStruct`."""
        return {"peaks": ctypes.addressof(self.peaks), "best": ctypes.addressof(self.best)}

    def step(self, index: int) -> GreedyStep:
        """What one step has found; it must be over."""
        place = slice(index * self.count, (index + 1) * self.count)
        return GreedyStep(self.peaks[place], self.best[place], self.elapsed_s[index])


@attrs.define(eq=False)
class CpuRun:
    """See `GreedyRun`.

    Args:
        step: with all it points at; read and written to its end.
        run: likewise.
        found: what the two write to.
    """

    _step: StepStruct
    _run: RunStruct
    _found: Found
    _num_told: int = attrs.field(default=0, init=False)

    def steps(self, count: int) -> list[GreedyStep]:
        """See `GreedyRun`."""
        first, self._num_told = self._num_told, self._num_told + count
        return [self._found.step(index) for index in range(first, self._num_told)]

    @property
    def is_over(self) -> bool:
        """See `GreedyRun`."""
        return bool(self._run.num_done == -self._num_told)

    def halt(self) -> None:
        """See `GreedyRun`."""
        self._run.is_halted = 1
