"""gguf-py, the library of the format, which only writing needs."""

from __future__ import annotations

from types import ModuleType

from triolet.errors import UnsupportedModel


def gguf_library() -> ModuleType:
    """Import gguf-py.

    Raises:
        UnsupportedModel: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise UnsupportedModel(
            "writing GGUF files needs the package gguf: pip install 'triolet[gguf]'"
        ) from error
    return gguf
