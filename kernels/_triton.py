"""Triton kernels that cost nothing until one is launched.

Triton is optional, and importing it takes longer than loading a small model: on a machine that computes on
the CPU it is never touched. A function under `@kernel` is handed to `triton.jit` at its first launch, and the
names `triton` and `tl` that its body uses are bound in its module then. With TRITON_INTERPRET=1 in the
environment before that moment the kernels run on CPU tensors: so they are tested without a GPU.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Kernels run in Python on CPU tensors. `tl.dot` on bfloat16 is wrong there: they compute in float32."""


class Kernel:
    """A function that Triton compiles when it is first launched: `kernel[grid](*arguments)`.

    Raises:
        ImportError: at the launch, on a machine without triton.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.__doc__ = function.__doc__
        self._function = function
        self._jitted: Any = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        if self._jitted is None:
            self._jitted = self._jit()
        # Said aloud, because Triton's own default differs between versions, and the results with it.
        return functools.partial(self._jitted[grid], enable_fp_fusion=True)

    def _jit(self) -> Any:
        import triton
        import triton.language as tl

        self._function.__globals__.update(triton=triton, tl=tl)
        return triton.jit(self._function)


kernel = Kernel


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is not below `n`; Triton's tiles need such sides."""
    return 1 << max(n - 1, 0).bit_length()
