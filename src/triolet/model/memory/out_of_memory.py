"""Recognise errors that mean that memory ran out, and free what can be freed: a smaller step may fit."""

from __future__ import annotations

import ctypes

import torch

# torch says so on CPUs, and C++ wherever it cannot say it better; neither has a class of its own in Python.
SIGNS = ("can't allocate memory", "not enough memory", "std::bad_alloc", "out of memory")


def lack_of_memory(error: Exception) -> str | None:
    """Return the text of an error of running out of memory, on the device or the host; None for other errors."""
    is_lack = isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
    )
    return f"{type(error).__name__}: {error}" if is_lack else None


def give_back(device: torch.device) -> None:
    """Free the memory that the allocator keeps for later; in small pieces it may be what was missing."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def trim_heap() -> None:
    """Give the system what the C library keeps of freed tensors, where it can be asked to.

    Reading a model frees a copy of each weight; kept for later, these would be more than the model.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
