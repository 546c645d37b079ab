"""Registry of the executors by the name that `EngineConfig.runner` takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

import attrs

from triolet.actors.executors.contract import Executor, with_kv_cache, with_weights
from triolet.actors.executors.in_process import InlineExecutor, ThreadExecutor
from triolet.config.engine import EngineConfig
from triolet.core.load_progress import OnProgress
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import StepRunner

ExecutorFactory = Callable[[EngineConfig], AbstractContextManager[Executor]]


@contextmanager
def _in_process(kind: type[InlineExecutor | ThreadExecutor], config: EngineConfig) -> Iterator[Executor]:
    next_config = config

    def load_from(on_progress: OnProgress, folder: str | None) -> tuple[StepRunner, ModelInfo]:
        # torch takes a second to import: a program that only names an engine does not wait for it.
        from triolet.model.runner_loading import load_configured_runner

        nonlocal next_config
        # Unless this load succeeds, the next one measures memory anew.
        chosen, next_config = next_config, config
        if folder is not None:
            chosen = with_weights(chosen, folder)
        runner, info = load_configured_runner(chosen, on_progress)
        next_config = with_kv_cache(config, info)
        return runner, info

    executor = kind(partial(load_from, folder=None), load_from)
    try:
        yield executor
    finally:
        executor.forget_model()


@contextmanager
def _in_a_process(config: EngineConfig) -> Iterator[Executor]:
    # The message converters of `ipc` take time to build: only an engine with a process needs them.
    from triolet.actors.executors.process import ProcessExecutor

    yield ProcessExecutor(config)


EXECUTORS: Final[Mapping[str, ExecutorFactory]] = MappingProxyType(
    {
        "inline": partial(_in_process, InlineExecutor),
        "thread": partial(_in_process, ThreadExecutor),
        "process": _in_a_process,
    }
)


@contextmanager
def _in_a_group(config: EngineConfig) -> Iterator[Executor]:
    from triolet.actors.executors.group import GroupExecutor

    executor = GroupExecutor(config)
    try:
        yield executor
    finally:
        executor.close()


def executor_class_of(config: EngineConfig) -> type[Executor]:
    """Return the class of the executor that the configuration names."""
    if config.tensor_parallel_size > 1:
        from triolet.actors.executors.group import GroupExecutor

        return GroupExecutor
    kind = runner_of(config)
    if kind == "process":
        from triolet.actors.executors.process import ProcessExecutor

        return ProcessExecutor
    return InlineExecutor if kind == "inline" else ThreadExecutor


def runner_of(config: EngineConfig) -> str:
    """Return where the model runs: `thread`, `process` or `inline`."""
    if config.runner != "auto":
        return config.runner
    # torch knows more, but takes a second to import; where it finds no GPU after all, a process is no worse.
    has_gpu = config.device.startswith("cuda") or (config.device == "auto" and has_gpu_driver())
    return "process" if has_gpu else "thread"


def has_gpu_driver() -> bool:
    """Return whether this machine has a driver of NVIDIA's, or Windows' below it."""
    return any(Path(path).exists() for path in ("/proc/driver/nvidia/version", "/dev/dxg"))


@contextmanager
def open_executor(config: EngineConfig) -> Iterator[Executor]:
    """Open the executor that the configuration names; its model is dropped when the scope is left."""
    kind = EXECUTORS[runner_of(config)] if config.tensor_parallel_size == 1 else _in_a_group
    with kind(attrs.evolve(config, model=model_source(config))) as executor:
        yield executor


def model_source(config: EngineConfig) -> str:
    """Return the folder or hub id to load: that of the shipped triolet-nano if none is named."""
    if config.model is not None:
        return config.model
    from triolet.nano import PATH

    return str(PATH)
