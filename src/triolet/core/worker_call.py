"""Calls into the workers that compute the model, as values.

A string names a method of the worker (`collective_rpc`) or, as `module:function`, a function of the model
(`apply_model`). A callable is an object of the caller's process, so only a worker in that process can call it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import attrs

from triolet.core.step_plan import StepRunner
from triolet.errors import UnknownWorkerMethod


@attrs.frozen
class WorkerCall:
    """Call of a method of every worker, or of a function with every worker's model.

    Args:
        target: name of a method, `module:function`, or a callable that gets the worker, or the model, first.
        is_on_model: whether the target gets the model and not the worker.
        args: positional arguments.
        kwargs: keyword arguments.
        invalidates: whether it may change what the model computes; the runner then leaves the prefix store.
    """

    target: str | Callable[..., Any]
    is_on_model: bool = False
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict, hash=False)
    invalidates: bool = False

    @property
    def name(self) -> str:
        """Name of the target, for messages."""
        if isinstance(self.target, str):
            return self.target
        return getattr(self.target, "__qualname__", type(self.target).__name__)


@attrs.frozen
class WorkerOutcome:
    """Value that a call returned, or the exception that it raised.

    Args:
        value: of the worker, or of the first one.
        error: None if it returned.
        others: values of further workers, in the order of their ranks.
    """

    value: Any = None
    error: BaseException | None = None
    others: tuple[Any, ...] = ()


@runtime_checkable
class CallableRunner(StepRunner, Protocol):
    """A runner whose worker can be called between two steps."""

    def call(self, call: WorkerCall) -> Any:
        """Call a method of the worker, or a function with the model; return what it returns, raise what it raises.

        Raises:
            UnknownWorkerMethod: the worker has no method of that name, or there is no such function.
        """
        ...


def outcome_of(runner: object, call: WorkerCall) -> WorkerOutcome:
    """Make a call; its exceptions, also `SystemExit`, are its outcome and leave the runner as it is."""
    try:
        if not isinstance(runner, CallableRunner):
            raise UnknownWorkerMethod(
                call.name, f"called on a real model; a {type(runner).__name__} has no worker"
            )
        return WorkerOutcome(runner.call(call))
    except KeyboardInterrupt:  # of the operator, not of the call
        raise
    except BaseException as error:
        return WorkerOutcome(error=error)
