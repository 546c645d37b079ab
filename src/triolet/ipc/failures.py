"""An exception as a value: its kind, its message, and the arguments it can be made from again.

Only exceptions of triolet's own, and only those named here, are made again; of anything else the text is enough.
Nothing that comes over a pipe names code to run.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from triolet import errors
from triolet.errors import (
    ConfigError,
    InvariantViolated,
    ModelError,
    ModelFileError,
    ResourceShortage,
    TrioletError,
    WeightsMismatch,
    shown,
)

MAX_MESSAGE_CHARS = 4_000  # some libraries put whole tensors into their messages

Argument = str | int | float | bool | tuple[str, ...] | None

# Exceptions that are made from one message, and those that are made from named arguments, kept under the same names.
_FROM_MESSAGE: tuple[type[TrioletError], ...] = (
    ModelError,
    errors.ModelNotFound,
    errors.HubUnreachable,
    errors.UnsupportedModel,
    errors.RemoteCodeRefused,
    InvariantViolated,
)
_FROM_ARGUMENTS: dict[type[TrioletError], tuple[str, ...]] = {
    ConfigError: ("field", "rule", "got"),
    ModelFileError: ("path", "problem"),
    ResourceShortage: ("resource", "purpose"),
    errors.UnknownWorkerMethod: ("method", "rule"),
    WeightsMismatch: ("missing", "unused", "misshapen"),
}
# Classes of exceptions that a call into a worker raises at its caller unchanged; they take one text.
_CALL_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(
            ArithmeticError,
            AssertionError,
            AttributeError,
            BufferError,
            EOFError,
            FileNotFoundError,
            IndexError,
        ),
        *(KeyError, LookupError, MemoryError, NotImplementedError, OSError, OverflowError, PermissionError),
        *(RuntimeError, TimeoutError, TypeError, ValueError, ZeroDivisionError),
    )
}
_KINDS = {kind.__name__: kind for kind in (*_FROM_MESSAGE, *_FROM_ARGUMENTS)}


@attrs.frozen
class Failure:
    """An exception of the runner's process, as a value."""

    kind: str  # name of the exception's class
    message: str  # its text
    # The named arguments to rebuild it from.
    arguments: Mapping[str, Argument] = attrs.field(factory=dict, hash=False)


def describe(error: BaseException) -> Failure:
    """Return an exception as a value."""
    names = _FROM_ARGUMENTS.get(type(error), ()) if isinstance(error, TrioletError) else ()
    return Failure(
        type(error).__name__,
        str(error)[:MAX_MESSAGE_CHARS],
        {name: _as_argument(getattr(error, name)) for name in names},
    )


def _as_argument(value: object) -> Argument:
    # Plain values are kept, so that the rebuilt message is the same; others are sent as text.
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, tuple):
        return tuple(map(str, value))
    return shown(value)


def rebuild(failure: Failure, otherwise: type[TrioletError]) -> TrioletError:
    """Return the exception that a failure describes.

    Args:
        otherwise: made, with kind and message as its text, for an exception that is not triolet's own.
    """
    kind = _KINDS.get(failure.kind)
    if kind in _FROM_MESSAGE:
        return kind(failure.message)
    if kind is not None and failure.arguments.keys() == set(_FROM_ARGUMENTS[kind]):
        return kind(**failure.arguments)
    return otherwise(f"{failure.kind}: {failure.message}")


def rebuild_call_error(failure: Failure) -> Exception:
    """Return the exception that a call into a worker raised: of the same class if that is built in or triolet's."""
    if (kind := _CALL_ERRORS.get(failure.kind)) is not None:
        return kind(failure.message)
    return rebuild(failure, otherwise=errors.WorkerCallError)
