"""Executor whose model runs in a process on another machine: a worker that has connected to the engine.

Every life takes a worker of its own from the port. The process of the former life ends with its connection, and the
worker's machine starts the next one; one that waits there already takes over at once.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import trio

from triolet.actors.executors.connection import RunnerConnection
from triolet.actors.executors.contract import WorkerSupply, with_kv_cache
from triolet.actors.executors.group import GroupExecutor, check_group
from triolet.actors.executors.process import ProcessExecutor
from triolet.actors.executors.remote.port import WorkerPort
from triolet.config.engine import EngineConfig
from triolet.core.load_progress import OnProgress
from triolet.core.request.model_info import ModelInfo
from triolet.errors import ModelError


class RemoteExecutor(ProcessExecutor):
    """Executor with a worker.

    Args:
        config: sent to the worker without secrets; without a `model` it loads the one in its own package.
        port: where workers connect.
        folder: of the model on this machine, for its tokenizer, if it is known before the load.
        is_further: whether it joins an engine that has admitted requests: its KV cache is as large as the first one's.
    """

    def __init__(
        self, config: EngineConfig, port: WorkerPort, folder: str | None = None, *, is_further: bool = False
    ) -> None:
        super().__init__(config)
        self._port, self._folder_here, self._is_further = port, folder, is_further

    async def _next_process(self) -> RunnerConnection:
        self._port.start()
        [link] = await self._port.take()
        return link

    def supply(self) -> WorkerSupply:
        return self._port

    def _suspect(self) -> None:
        """Do nothing: a worker that waits at the port is the next one."""

    def _trust(self) -> None:
        """Do nothing, likewise."""

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        """Load the model on the worker; see `ProcessExecutor.start`.

        Raises:
            ModelError: the worker has no memory for the KV cache of the others, or this machine has no such folder to
                read the tokenizer from.
        """
        if self._is_further and self._port.kv_cache is not None:
            self._next_config = with_kv_cache(self._config, self._port.kv_cache)
        info = await super().start(on_progress)
        self._port.kv_cache = self._port.kv_cache or info
        folder = self._folder_here or info.folder
        if self._config.tokenizer is None:
            _check_folder(folder)
        # A process of another machine has no number here.
        return attrs.evolve(info, folder=folder, process_id=None)


class RemoteRank(RemoteExecutor):
    """Executor with one rank of a worker; `RemoteGroup` gives it the connection for its next life."""

    link: RunnerConnection | None = None

    async def _next_process(self) -> RunnerConnection:
        await trio.lowlevel.checkpoint()
        assert self.link is not None, "a group takes a worker before its ranks start"
        return self.link


class RemoteGroup(GroupExecutor):
    """Executor with all ranks of a worker; see `RemoteExecutor` and `GroupExecutor`."""

    def __init__(
        self, config: EngineConfig, port: WorkerPort, folder: str | None = None, *, is_further: bool = False
    ) -> None:
        check_group(config)
        self._port = port
        self._remote = [
            RemoteRank(config, port, folder, is_further=is_further)
            for _ in range(config.tensor_parallel_size)
        ]
        super().__init__(self._remote, self._take)

    def supply(self) -> WorkerSupply:
        return self._port

    async def _take(self) -> None:
        self._port.start()
        for rank, link in zip(self._remote, await self._port.take(), strict=True):
            rank.link = link


def _check_folder(folder: str) -> None:
    if not Path(folder).exists():
        raise ModelError(
            f"the engine must find the model's tokenizer where the worker finds the model; got {folder}, which is not "
            "on this machine (give it as tokenizer)"
        )
