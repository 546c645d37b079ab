"""LoRA adapters of one engine: the registry of those that are loaded, and their loading away from the steps.

An adapter is read and checked in a worker thread when it is added, or when the first request names it; a bad one fails
that call alone. The runner is then told to read it as well, so that the step that needs it does not wait. What the
runner holds can be lost: every plan names path and digest of the adapters that it needs (`AdapterStart`), and after a
restart the runner is told about all of them again.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import trio

from triolet.actors.executors.contract import Executor
from triolet.actors.executors.threads import run_in_thread
from triolet.config.engine import EngineConfig
from triolet.core.request.lora import Adapter, AdapterTable, LoRARequest
from triolet.core.request.model_info import LoadedModel
from triolet.errors import AdapterError

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
        self._table = AdapterTable(config.enable_lora, config.num_kept_loras)
        self._loading = trio.Lock()  # one at a time: two calls for one adapter read it once

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """Loaded adapters."""
        return self._table.adapters

    async def resolve(
        self, request: LoRARequest, *, is_registered: bool = False, digest: str | None = None
    ) -> Adapter:
        """Return the adapter of a request, loaded now if it is not yet. A checkpoint.

        Args:
            is_registered: know it until it is removed.
            digest: of the contents that have begun the answer, of a request that is resumed. Such a request gets what
                its folder has also where its name or number belongs to other contents by now, and changes nothing.
        Raises:
            InvalidRequest: adapters are not enabled, name and number disagree with those of a loaded adapter, or the
                adapter cannot be loaded (`AdapterError`).
            AdaptersPinned: there is no room for another adapter, because all are pinned.
        """
        self._table.check_enabled(request)
        async with self._loading:
            if digest is not None and self._table.has_others(request, digest):
                return await self._load(request, is_resumed=True)
            resident = self._table.resident
            adapter = self._table.find(request)
            if adapter is None:
                adapter = await self._load(request)
                # No checkpoint from here on: it is there, or it is not.
                self._table.add(adapter)
            elif adapter not in resident:
                await self._executor.prepare_adapter(adapter, is_pinned=False)
            if is_registered:
                self._table.register(adapter.int_id)
            return adapter

    async def _load(self, request: LoRARequest, *, is_resumed: bool = False) -> Adapter:
        folder = request.folder
        adapter = Adapter.of(request, await self._digest(folder))
        # The one that is pinned under its number has other contents than that of a resumed request.
        is_pinned = not is_resumed and self._table.is_pinned(adapter)
        await self._executor.prepare_adapter(adapter, is_pinned=is_pinned)
        return adapter

    async def _digest(self, folder: Path) -> str:
        is_inline = self._config.runner == "inline"
        return await run_in_thread(partial(self._read, folder), "reading an adapter", is_inline=is_inline)

    def _read(self, folder: Path) -> str:
        # Imported here because most engines have no adapters.
        from triolet.model.folder.adapter_files import digest_of_folder

        assert self._model.info is not None, "the runner starts before requests are taken"
        return digest_of_folder(folder, self._model.info.adapters)

    def remove(self, int_id: int) -> bool:
        """Forget an adapter; requests that were admitted with it go on. False if it is not loaded."""
        return self._table.remove(int_id)

    async def pin(self, int_id: int) -> bool:
        """Keep an adapter loaded until it is removed. A checkpoint.

        Raises:
            InvalidRequest: it is not loaded.
            AdaptersPinned: as many are pinned as there is room for.
        """
        await self._executor.prepare_adapter(self._table.pin(int_id), is_pinned=True)
        return True

    async def replay(self) -> None:
        """Tell a runner that has started about the adapters in use, so that it reads them before steps need them."""
        for adapter in self._table.resident:
            try:
                await self._executor.prepare_adapter(adapter, is_pinned=self._table.is_pinned(adapter))
            except AdapterError as error:
                # Its files are gone, or have changed. The step that needs it fails its requests with the reason; the
                # runner must start all the same, for all others.
                logger.warning("an adapter cannot be read again: %s", error)
