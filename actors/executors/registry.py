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
from triolet.errors import ConfigError
from triolet.model.loading.imports import no_full_collections

REMOTE: Final = ("remote", "ray")  # kinds whose model is on other machines

ExecutorFactory = Callable[[EngineConfig], AbstractContextManager[Executor]]


@contextmanager
def _in_process(kind: type[InlineExecutor | ThreadExecutor], config: EngineConfig) -> Iterator[Executor]:
    config = next_config = _with_model(config)

    def load_from(on_progress: OnProgress, folder: str | None) -> tuple[StepRunner, ModelInfo]:
        # torch takes a second to import: a program that only names an engine does not wait for it.
        with no_full_collections():
            from triolet.model.loading.runner import load_runner

        nonlocal next_config
        # Unless this load succeeds, the next one measures memory anew.
        chosen, next_config = next_config, config
        if folder is not None:
            chosen = with_weights(chosen, folder)
        runner, info = load_runner(chosen, on_progress)
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

    yield ProcessExecutor(_with_model(config))


@contextmanager
def open_remote_executors(
    config: EngineConfig, num_executors: int, num_first: int
) -> Iterator[tuple[Executor, ...]]:
    """Open executors that take workers from one port; see `open_executor`.

    Args:
        config: of one replica.
        num_executors: the most that there are.
        num_first: those that the engine begins with.
    """
    from triolet.actors.executors.remote.executor import RemoteExecutor, RemoteGroup
    from triolet.actors.executors.remote.port import WorkerPort

    # A worker finds the model that ships with the package in its own.
    source = model_source(config)
    folder = source if Path(source).exists() else None
    kind = RemoteExecutor if config.tensor_parallel_size == 1 else RemoteGroup
    workers = None
    if config.runner == "ray":
        from triolet.actors.executors.remote.ray_workers import port_for_ray

        port, workers = port_for_ray(config, num_first, may_change=num_executors > num_first)
    else:
        port = WorkerPort.of(config)
    try:
        yield tuple(
            kind(config, port, folder, is_further=number >= num_first) for number in range(num_executors)
        )
    finally:
        try:
            if workers is not None:
                workers.close()
        finally:
            port.close()


@contextmanager
def _remote(config: EngineConfig) -> Iterator[Executor]:
    with open_remote_executors(config, 1, 1) as [executor]:
        yield executor


EXECUTORS: Final[Mapping[str, ExecutorFactory]] = MappingProxyType(
    {
        "inline": partial(_in_process, InlineExecutor),
        "thread": partial(_in_process, ThreadExecutor),
        "process": _in_a_process,
        "remote": _remote,
        "ray": _remote,
    }
)


@contextmanager
def _in_a_group(config: EngineConfig) -> Iterator[Executor]:
    from triolet.actors.executors.group import LocalGroup

    executor = LocalGroup(_with_model(config))
    try:
        yield executor
    finally:
        executor.close()


def executor_class_of(config: EngineConfig) -> type[Executor]:
    """Return the class of the executor that the configuration names."""
    kind = runner_of(config)
    if kind in REMOTE:
        from triolet.actors.executors.remote.executor import RemoteExecutor, RemoteGroup

        return RemoteExecutor if config.tensor_parallel_size == 1 else RemoteGroup
    if config.tensor_parallel_size > 1:
        from triolet.actors.executors.group import LocalGroup

        return LocalGroup
    if kind == "process":
        from triolet.actors.executors.process import ProcessExecutor

        return ProcessExecutor
    return InlineExecutor if kind == "inline" else ThreadExecutor


def runner_of(config: EngineConfig) -> str:
    """Return where the model runs, a key of `EXECUTORS`."""
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
    """Open the executor that the configuration names; its model is dropped when the scope is left.

    Raises:
        ConfigError: fields that do not fit together.
    """
    runner = runner_of(config)
    if runner not in REMOTE:
        for field in ("worker_listen", "worker_certfile"):
            if (value := getattr(config, field)) is not None:
                raise ConfigError(
                    field, f"given together with runner 'remote' or 'ray', and not {runner!r}", value
                )
    is_group = config.tensor_parallel_size > 1 and runner not in REMOTE
    kind = _in_a_group if is_group else EXECUTORS[runner]
    with kind(config) as executor:
        yield executor


def _with_model(config: EngineConfig) -> EngineConfig:
    return attrs.evolve(config, model=model_source(config))


def model_source(config: EngineConfig) -> str:
    """Return the folder or hub id to load: that of the shipped triolet-nano if none is named."""
    if config.model is not None:
        return config.model
    from triolet.nano import PATH

    return str(PATH)
