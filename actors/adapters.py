"""LoRA adapters of one engine: the registry of those that are loaded, and their loading away from the steps.

An adapter is read and checked in a worker thread when it is added, or when the first request names it; a bad one fails
that call alone. The runner is then told to read it as well, so that the step that needs it does not wait. What the
runner holds can be lost: every plan names path and digest of the adapters that it needs (`AdapterStart`), and after a
restart the runner is told about all of them again.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from functools import partial
from pathlib import Path

import trio

from triolet.actors.executors.contract import Executor
from triolet.config.engine import EngineConfig
from triolet.core.request.lora import Adapter, LoRARequest
from triolet.core.request.model_info import LoadedModel
from triolet.errors import AdapterError, AdaptersPinned, InvalidRequest, shown

logger = logging.getLogger("triolet.runner")


class AdapterRegistry:
    """Loaded adapters, the one that was used last at the end.

    Args:
        config: limits.
        model: says which modules can be adapted, once it is loaded.
        executor: runner of the model.
    """

    def __init__(self, config: EngineConfig, model: LoadedModel, executor: Executor) -> None:
        self._config, self._model, self._executor = config, model, executor
        self._most = config.max_cpu_loras or config.max_loras
        self._adapters: OrderedDict[int, Adapter] = OrderedDict()
        self._pinned: set[int] = set()
        self._loading = trio.Lock()  # one at a time: two calls for one adapter read it once

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """Loaded adapters."""
        return tuple(self._adapters.values())

    def named(self, name: str) -> Adapter | None:
        """Return the loaded adapter of a name."""
        return next((adapter for adapter in self._adapters.values() if adapter.name == name), None)

    def free_id(self) -> int:
        """Return a number that no loaded adapter has."""
        return max(self._adapters, default=0) + 1

    async def resolve(self, request: LoRARequest) -> Adapter:
        """Return the adapter of a request, loaded now if it is not yet. A checkpoint.

        Raises:
            InvalidRequest: adapters are not enabled, name and number disagree with those of a loaded adapter, or the
                adapter cannot be loaded (`AdapterError`).
            AdaptersPinned: there is no room for another adapter, because all are pinned.
        """
        if not self._config.enable_lora:
            raise InvalidRequest(
                f"Got lora_request {shown(request)} but LoRA is not enabled!", field="lora", got=request
            )
        async with self._loading:
            adapter = self._loaded(request)
            if adapter is None or request.load_inplace:
                adapter = await self._load(request)
                # No checkpoint from here on: it is there, or it is not.
                self._make_room(adapter.int_id)
                self._adapters[adapter.int_id] = adapter
            self._adapters.move_to_end(adapter.int_id)
            return adapter

    def _loaded(self, request: LoRARequest) -> Adapter | None:
        adapter, same_name = self._adapters.get(request.lora_int_id), self.named(request.lora_name)
        if adapter is not None and adapter.name != request.lora_name:
            raise InvalidRequest(
                f"lora_int_id must belong to one adapter; {request.lora_int_id} is {shown(adapter.name)}, "
                f"got {shown(request.lora_name)}",
                field="lora_int_id",
                got=request.lora_int_id,
            )
        if same_name is not None and same_name.int_id != request.lora_int_id:
            raise InvalidRequest(
                f"lora_name must belong to one adapter; {shown(request.lora_name)} has lora_int_id {same_name.int_id}, "
                f"got {request.lora_int_id}",
                field="lora_name",
                got=request.lora_name,
            )
        return adapter

    async def _load(self, request: LoRARequest) -> Adapter:
        folder = _folder_of(request)
        digest = await self._run(partial(self._read, folder))
        adapter = Adapter(
            name=request.lora_name,
            int_id=request.lora_int_id,
            path=str(folder),
            digest=digest,
            base_model_name=request.base_model_name,
        )
        await self._executor.prepare_adapter(adapter, is_pinned=adapter.int_id in self._pinned)
        return adapter

    async def _run(self, function: partial[str]) -> str:
        if self._config.runner == "inline":  # one thread, one order of events
            await trio.lowlevel.checkpoint()
            return function()
        return await trio.to_thread.run_sync(function)

    def _read(self, folder: Path) -> str:
        # Imported here because most engines have no adapters.
        from triolet.model.folder.adapter_files import read_adapter

        assert self._model.info is not None, "the runner starts before requests are taken"
        if self._model.info.adapters is None:
            raise AdapterError(folder, "cannot be used: this model takes no adapters")
        if not folder.is_dir():
            raise AdapterError(
                folder, "is no folder with an adapter (hub ids are not supported: fetch it first)"
            )
        return read_adapter(folder, self._model.info.adapters).digest

    def _make_room(self, int_id: int) -> None:
        """Forget the adapter that was not used for longest, if a new one has no room; requests with it go on."""
        if int_id in self._adapters or len(self._adapters) < self._most:
            return
        unpinned = [known for known in self._adapters if known not in self._pinned]
        if not unpinned:
            raise AdaptersPinned(self._most)
        del self._adapters[unpinned[0]]

    def remove(self, int_id: int) -> bool:
        """Forget an adapter; requests that were admitted with it go on. False if it is not loaded."""
        self._pinned.discard(int_id)
        return self._adapters.pop(int_id, None) is not None

    async def pin(self, int_id: int) -> bool:
        """Keep an adapter loaded until it is removed. A checkpoint.

        Raises:
            InvalidRequest: it is not loaded.
        """
        if (adapter := self._adapters.get(int_id)) is None:
            raise InvalidRequest(
                f"Pinning failed. LoRA {int_id} is not registered.", field="lora_int_id", got=int_id
            )
        self._pinned.add(int_id)
        await self._executor.prepare_adapter(adapter, is_pinned=True)
        return True

    async def replay(self) -> None:
        """Tell a runner that has started about all adapters, so that it reads them before the steps that need them."""
        for adapter in self.adapters:
            try:
                await self._executor.prepare_adapter(adapter, is_pinned=adapter.int_id in self._pinned)
            except AdapterError as error:
                # Its files are gone, or have changed. The step that needs it fails its requests with the reason; the
                # runner must start all the same, for all others.
                logger.warning("an adapter cannot be read again: %s", error)


def _folder_of(request: LoRARequest) -> Path:
    # The folder may be read again by a process with another working directory.
    return Path(request.lora_path).expanduser().absolute()
