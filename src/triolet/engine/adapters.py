"""Methods of `Engine` about LoRA adapters, with the names and the return values of vLLM."""

from __future__ import annotations

from collections.abc import Iterable

from triolet.actors.adapters import AdapterRegistry
from triolet.config.engine import EngineConfig
from triolet.core.output.output_processor import LiveRequest
from triolet.core.request.lora import AdapterUsage, LoRARequest
from triolet.core.request.param_validation import check_type
from triolet.core.request.request import RequestStatus
from triolet.engine.submission import TrioRunGuard
from triolet.errors import ConfigError


class AdapterMethods:
    """Base class of `Engine`: loads, lists, pins and removes adapters."""

    config: EngineConfig
    _run: TrioRunGuard
    _adapters: AdapterRegistry

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter, unless one with its number is loaded and `load_inplace` is False; return True.

        Raises:
            AdapterError: it cannot be loaded; nothing has changed.
            InvalidRequest: adapters are not enabled, or name and number do not belong to one adapter.
            AdaptersPinned: all loaded adapters are pinned, and there is no room for another.
        """
        self._run.check()
        check_type("lora_request", lora_request, LoRARequest, "a LoRARequest")
        await self._adapters.resolve(lora_request)
        return True

    def remove_lora(self, lora_int_id: int) -> bool:
        """Forget a LoRA adapter; requests with it go on. Return False if it is not loaded."""
        self._run.check()
        return self._adapters.remove(lora_int_id)

    def list_loras(self) -> set[int]:
        """Return the numbers of the loaded LoRA adapters."""
        self._run.check()
        return {adapter.int_id for adapter in self._adapters.adapters}

    def loras(self) -> tuple[LoRARequest, ...]:
        """Return the loaded LoRA adapters."""
        self._run.check()
        return tuple(adapter.lora_request for adapter in self._adapters.adapters)

    async def pin_lora(self, lora_int_id: int) -> bool:
        """Keep a LoRA adapter loaded until it is removed; return True.

        Raises:
            InvalidRequest: it is not loaded.
            AdaptersPinned: as many are pinned as there is room for.
        """
        self._run.check()
        return await self._adapters.pin(lora_int_id)


def adapter_usage(live: Iterable[LiveRequest], max_loras: int) -> AdapterUsage:
    """Return the LoRA adapters of live requests."""
    names: dict[RequestStatus, dict[str, None]] = {RequestStatus.RUNNING: {}, RequestStatus.WAITING: {}}
    for request in live:
        if request.lora_name is not None and request.status in names:
            names[request.status][request.lora_name] = None
    running, waiting = map(tuple, names.values())
    return AdapterUsage(max_loras, running, waiting)


def configured_adapters(config: EngineConfig) -> tuple[tuple[str, str, str], ...]:
    """Return name, field and entry of each adapter that an engine loads at its start."""
    fields = ("lora_modules", config.lora_modules), ("prompt_adapters", config.prompt_adapters)
    return tuple((entry.partition("=")[0], field, entry) for field, entries in fields for entry in entries)


async def register_lora(engine: AdapterMethods, lora_request: LoRARequest) -> None:
    """Load a LoRA adapter as `add_lora` does, and know its name until it is removed.

    Where requests bring only a name, an adapter whose name is forgotten could not be read again.
    """
    engine._run.check()
    await engine._adapters.resolve(lora_request, is_registered=True)


async def add_lora_modules(engine: AdapterMethods) -> None:
    """Load the adapters of an engine's configuration, in their order, numbered from 1.

    Raises:
        ConfigError: an entry of `lora_modules` is not NAME=FOLDER, or its name is taken.
        InvalidRequest: adapters are not enabled, or one cannot be loaded (`AdapterError`).
    """
    config = engine.config
    for number, entry in enumerate(config.lora_modules, start=1):
        name, _, folder = entry.partition("=")
        if not name or not folder:
            raise ConfigError("lora_modules", "NAME=FOLDER for each adapter", entry)
        if name in config.model_names:
            raise ConfigError("lora_modules", "names that are not the model's", entry)
        await register_lora(engine, LoRARequest(name, number, folder))
