"""Methods of `Engine` about prompt adapters (soft prompts), with the names of vLLM."""

from __future__ import annotations

from triolet.actors.prompt_adapters import PromptAdapterRegistry
from triolet.config.engine import EngineConfig
from triolet.core.request.param_validation import check_type
from triolet.core.request.prompt_adapter import PromptAdapterRequest
from triolet.engine.submission import TrioRunGuard
from triolet.errors import ConfigError


class PromptAdapterMethods:
    """Base class of `Engine`: loads, lists and removes prompt adapters."""

    config: EngineConfig
    _run: TrioRunGuard
    _prompt_adapters: PromptAdapterRegistry

    async def add_prompt_adapter(self, prompt_adapter_request: PromptAdapterRequest) -> bool:
        """Load a prompt adapter, unless it is loaded; return True.

        Raises:
            AdapterError: it cannot be loaded; nothing has changed.
            InvalidRequest: name, number and folder do not belong to one prompt adapter.
        """
        self._run.check()
        check_type(
            "prompt_adapter_request", prompt_adapter_request, PromptAdapterRequest, "a PromptAdapterRequest"
        )
        await self._prompt_adapters.resolve(prompt_adapter_request)
        return True

    def remove_prompt_adapter(self, prompt_adapter_id: int) -> bool:
        """Forget a prompt adapter; requests with it go on. Return False if it is not loaded."""
        self._run.check()
        return self._prompt_adapters.remove(prompt_adapter_id)

    def list_prompt_adapters(self) -> set[int]:
        """Return the numbers of the loaded prompt adapters."""
        self._run.check()
        return {one.int_id for one in self._prompt_adapters.soft_prompts}

    def prompt_adapters(self) -> tuple[PromptAdapterRequest, ...]:
        """Return the loaded prompt adapters."""
        self._run.check()
        return tuple(one.prompt_adapter_request for one in self._prompt_adapters.soft_prompts)


async def add_configured_prompt_adapters(engine: PromptAdapterMethods) -> None:
    """Load the prompt adapters of an engine's configuration, in their order, numbered from 1.

    Raises:
        ConfigError: an entry of `prompt_adapters` is not NAME=FOLDER, or its name is taken.
        InvalidRequest: one cannot be loaded (`AdapterError`).
    """
    config = engine.config
    loras = {entry.partition("=")[0] for entry in config.lora_modules}
    for number, entry in enumerate(config.prompt_adapters, start=1):
        name, _, folder = entry.partition("=")
        if not name or not folder:
            raise ConfigError("prompt_adapters", "NAME=FOLDER for each prompt adapter", entry)
        if name in config.model_names or name in loras:
            raise ConfigError("prompt_adapters", "names that no model and no LoRA adapter has", entry)
        await engine.add_prompt_adapter(PromptAdapterRequest(name, number, folder))
