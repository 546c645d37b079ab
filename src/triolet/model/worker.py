"""Worker that callers of `collective_rpc` and `apply_model` reach: its methods are a table that is fixed at the start.

The methods are those of `Worker` and of the class that `EngineConfig.worker_extension` names, which is mixed into it.
They run between two steps, in the thread that computes the steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch

from triolet.errors import ConfigError, UnknownWorkerMethod
from triolet.model.profile import StepProfile

if TYPE_CHECKING:
    from triolet.core.worker_call import WorkerCall


class HoldsModel(Protocol):
    """What a worker needs of its model runner."""

    model: Any
    device: torch.device
    profile: StepProfile | None


class Worker:
    """Worker of a model runner: `self` of the methods of a worker extension.

    Args:
        model_runner: computes the steps; its `model` is the model's.
    """

    rank = 0
    local_rank = 0

    def __init__(self, model_runner: HoldsModel) -> None:
        # Weak, since the runner has its worker: in a circle the model would keep its memory until garbage is collected.
        self._runner = weakref.ref(model_runner)

    @property
    def model_runner(self) -> HoldsModel:
        """The runner, which lives as long as calls come."""
        runner = self._runner()
        assert runner is not None, "calls come through the runner"
        return runner

    @property
    def model(self) -> Any:
        """The loaded model: a decoder of ours, or the wrapper of one of transformers'."""
        return self.model_runner.model

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.model_runner.device

    def get_model(self) -> Any:
        """Return `model`."""
        return self.model

    def check_health(self) -> None:
        """Return, which shows that the worker answers."""

    def start_profile(self, path: str) -> None:
        """Record the steps from now on; a recording that was not written is dropped."""
        runner = self.model_runner
        if runner.profile is not None:
            runner.profile.discard()
            runner.profile = None
        runner.profile = StepProfile(path, self.device)

    def stop_profile(self) -> bool:
        """End the recording; return whether there is one: a worker that was restarted has none."""
        if self.model_runner.profile is None:
            return False
        self.model_runner.profile.stop()
        return True

    def write_profile(self, engine_spans: Sequence[Any]) -> None:
        """Write the recording that was ended, with the engine's spans."""
        profile, self.model_runner.profile = self.model_runner.profile, None
        if profile is not None:
            profile.write(engine_spans)


def worker_class(extension: str | None) -> type[Worker]:
    """Return the class of the worker, with the methods of an extension.

    Args:
        extension: `module:Class`; None for none.
    Raises:
        ConfigError: it cannot be imported, is no class, or has a name that the worker has.
    """
    if extension is None:
        return Worker
    try:
        mixin = imported(extension)
    except Exception as error:
        raise ConfigError(
            "worker_extension", f"importable ({type(error).__name__}: {error})", extension
        ) from error
    if not isinstance(mixin, type):
        raise ConfigError("worker_extension", "a class, as module:Class", extension)
    if taken := sorted({*_public(mixin)} & {*_public(Worker), "model_runner"}):
        raise ConfigError("worker_extension", f"without names of the worker ({', '.join(taken)})", extension)
    try:
        return type("ExtendedWorker", (Worker, mixin), {})
    except TypeError as error:  # such as a metaclass of its own
        raise ConfigError("worker_extension", f"a class that can be mixed in ({error})", extension) from error


def imported(name: str) -> Any:
    """Return the object that `module:name` names; raises what the import raises."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"must be module:name; got {name!r}")
    return getattr(import_module(module), attribute)


def call_worker(worker: Worker, call: WorkerCall) -> Any:
    """Make a call; see `core.worker_call.CallableRunner`."""
    # Not inference mode: a method may keep or return tensors, which could then not be changed outside.
    with torch.no_grad():
        if call.is_on_model:
            return _function(call.target)(worker.model, *call.args, **call.kwargs)
        if isinstance(call.target, str):
            return _method(worker, call.target)(*call.args, **call.kwargs)
        return call.target(worker, *call.args, **call.kwargs)


def _method(worker: Worker, name: str) -> Callable[..., Any]:
    table = [known for known in _public(type(worker)) if callable(getattr(type(worker), known))]
    if name not in table:
        raise UnknownWorkerMethod(name, f"one of {', '.join(sorted(table))}")
    method: Callable[..., Any] = getattr(worker, name)
    return method


def _function(target: str | Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(target, str):
        return target
    try:
        function = imported(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnknownWorkerMethod(target, f"module:function, importable by the worker ({error})") from error
    if not callable(function):
        raise UnknownWorkerMethod(target, "a function")
    called: Callable[..., Any] = function
    return called


def _public(kind: type) -> list[str]:
    return [name for name in dir(kind) if not name.startswith("_")]
