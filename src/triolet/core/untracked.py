"""Long containers of numbers that Python's garbage collector does not look through.

The collector visits each item of what is young, twice: a quarter of a million token ids hold Python's lock for one or
two milliseconds each time. CPython itself leaves out tuples of numbers, once it has looked through them, but no list
and no subclass.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Any, Final

MIN_ITEMS: Final = 2048  # shorter ones are looked through in some microseconds

_untrack: Any = None
if hasattr(ctypes, "pythonapi"):  # CPython
    _untrack, _track = ctypes.pythonapi.PyObject_GC_UnTrack, ctypes.pythonapi.PyObject_GC_Track
    for _function in (_untrack, _track):
        _function.argtypes, _function.restype = (ctypes.py_object,), None


def hide_numbers(numbers: list[Any] | tuple[Any, ...]) -> None:
    """Hide a long container from the garbage collector; as long as it holds numbers only, which refer to nothing."""
    if _untrack is not None and len(numbers) > MIN_ITEMS:
        _untrack(numbers)


def show(items: list[Any]) -> None:
    """Show a list to the garbage collector again: it is about to hold something else than numbers."""
    if _untrack is not None and not gc.is_tracked(items):
        _track(items)
