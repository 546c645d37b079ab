"""Scopes of engines for tests: over a scripted model, or over real weights that many tests share."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from typing import Self, Unpack, cast

import attrs
import trio

from triolet import aio, blocking
from triolet.actors.executors.contract import Executor
from triolet.actors.executors.registry import open_executor
from triolet.blocking import BlockingEngine
from triolet.bridge.engine_thread import EngineThread, OpenEngine
from triolet.config.engine import EngineConfig
from triolet.config.engine_fields import EngineFields
from triolet.engine.engine import Engine
from triolet.engine.open_engine import run_engine
from triolet.errors import ConfigError
from triolet.testing.scripted_model import Answers, ScriptedModel


@asynccontextmanager
async def open_fake_engine(
    answers: Answers | ScriptedModel = "Hello from triolet.", /, **fields: Unpack[EngineFields]
) -> AsyncGenerator[Engine]:
    """Open an engine whose model is scripted, and close it when the scope is left.

    Under Trio this gives a `triolet.Engine`, whose deadlines and waits follow the clock of the Trio run: a virtual one
    in a test that has pytest-trio's `autojump_clock`. Under asyncio it gives an `AsyncioEngine`, in real time.

    Args:
        answers: what the model says, or a `ScriptedModel`, to plant faults and to look at the prompts.
        **fields: fields of `EngineConfig`; those that say where and how a model runs change nothing.
    Raises:
        ConfigError: a wrong or unknown field.
    """
    async with _in_the_callers_loop(_fake(answers, fields)) as engine:
        yield engine


@contextmanager
def open_fake_blocking_engine(
    answers: Answers | ScriptedModel = "Hello from triolet.", /, **fields: Unpack[EngineFields]
) -> Generator[BlockingEngine]:
    """Open an engine whose model is scripted, for a program without an event loop; see `open_fake_engine`."""
    with blocking.engine_of_thread(EngineThread(_fake(answers, fields))) as engine:
        yield engine


def _fake(answers: Answers | ScriptedModel, fields: EngineFields) -> OpenEngine:
    model = answers if isinstance(answers, ScriptedModel) else ScriptedModel(answers)
    # Inline: everything happens in one thread, so that a virtual clock has nothing to wait for.
    config = attrs.evolve(EngineConfig.create(None, **fields), runner="inline")
    tokenizer = model.bind(config)
    return lambda: run_engine(config, model, lambda: tokenizer)


class SharedModel:
    """Real model that is loaded once, by the first engine, for the engines of many tests, one after the other.

    Each test has an engine of its own, which knows nothing of the ones before. It opens in milliseconds.

        with triolet.testing.SharedModel("folder") as model:
            async with model.open_engine() as engine: ...

    Args:
        config: configuration of the engines, or only the model's folder or hub id; by default triolet-nano.
        **fields: fields of `EngineConfig` that differ from `config`; `runner` cannot be `process`.
    Raises:
        ConfigError: a wrong or unknown field.
    """

    def __init__(self, config: EngineConfig | str | None = None, /, **fields: Unpack[EngineFields]) -> None:
        chosen = EngineConfig.of(config, **fields)
        if chosen.runner == "auto":
            chosen = attrs.evolve(chosen, runner="thread")
        if chosen.runner == "process":
            raise ConfigError(
                "runner", "'thread' or 'inline' for a model that several engines use", chosen.runner
            )
        self.config = chosen
        self._scope = ExitStack()
        self._executor: Executor | None = None
        self._is_in_use = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory of the model."""
        self._executor = None
        self._scope.close()

    @asynccontextmanager
    async def open_engine(self) -> AsyncGenerator[Engine]:
        """Open an engine, and close it when the scope is left; under asyncio it is an `AsyncioEngine`.

        Raises:
            RuntimeError: another engine of this model is open.
            ModelError: the model cannot be loaded.
        """
        with self._taken():
            async with _in_the_callers_loop(self._run) as engine:
                yield engine

    @contextmanager
    def open_blocking_engine(self) -> Generator[BlockingEngine]:
        """Open an engine for a program without an event loop; see `open_engine`."""
        with self._taken(), blocking.engine_of_thread(EngineThread(self._run)) as engine:
            yield engine

    @contextmanager
    def _taken(self) -> Generator[None]:
        if self._is_in_use:
            raise RuntimeError(
                "a SharedModel has one engine at a time; the engine before this one is still open"
            )
        self._is_in_use = True
        try:
            yield
        finally:
            self._is_in_use = False

    def _run(self) -> AbstractAsyncContextManager[Engine]:
        if self._executor is None:
            self._executor = self._scope.enter_context(open_executor(self.config))
        return run_engine(self.config, self._executor)


@asynccontextmanager
async def _in_the_callers_loop(open_engine: OpenEngine) -> AsyncGenerator[Engine]:
    if trio.lowlevel.in_trio_run():
        async with open_engine() as engine:
            yield engine
    else:
        async with aio.engine_of_thread(EngineThread(open_engine)) as remote:
            # It has the same methods, as `triolet.aio.open_engine` has it under Trio.
            yield cast("Engine", remote)
