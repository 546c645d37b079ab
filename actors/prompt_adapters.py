"""Prompt adapters of one engine: the soft prompts that are loaded, and their loading away from the steps.

A soft prompt is read and checked in a worker thread when it is added, or when the first request names it; a bad one
fails that call alone. The runner reads it again when a row first needs it: every start of a row names path and digest,
so that a runner that was restarted needs to be told nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Final

import trio

from triolet.actors.executors.threads import run_in_thread
from triolet.config.engine import EngineConfig
from triolet.core.request.model_info import LoadedModel
from triolet.core.request.prompt_adapter import PromptAdapterRequest, SoftPrompt
from triolet.errors import AdapterError, InvalidRequest, shown

MAX_LOADED: Final = 1024  # soft prompts; the engine keeps their names and digests only


class PromptAdapterRegistry:
    """Loaded soft prompts, the one that was used last at the end.

    Args:
        config: says whether files are read in a thread.
        model: says which shapes fit, once it is loaded.
    """

    def __init__(self, config: EngineConfig, model: LoadedModel) -> None:
        self._config, self._model = config, model
        self._loaded: OrderedDict[str, SoftPrompt] = OrderedDict()  # by name
        self._loading = trio.Lock()  # one at a time: two calls for one soft prompt read it once

    @property
    def soft_prompts(self) -> tuple[SoftPrompt, ...]:
        """Loaded soft prompts."""
        return tuple(self._loaded.values())

    def named(self, name: str) -> SoftPrompt | None:
        """Return the loaded soft prompt of a name."""
        return self._loaded.get(name)

    async def resolve(self, request: PromptAdapterRequest, *, digest: str | None = None) -> SoftPrompt:
        """Return the soft prompt of a request, loaded now if it is not yet. A checkpoint.

        Args:
            digest: of the contents that have begun the answer, of a request that is resumed. Such a request gets what
                its folder has also where its name or number belongs to other contents by now, and changes nothing.
        Raises:
            InvalidRequest: name, number and folder disagree with those of a loaded one, or it cannot be loaded
                (`AdapterError`).
        """
        async with self._loading:
            name = request.prompt_adapter_name
            if digest is not None and self._has_others(request, digest):
                return await self._read_in_thread(request)
            loaded = self._loaded.get(name)
            if loaded is None:
                loaded = await self._load(request)
                self._loaded[name] = loaded
                if len(self._loaded) > MAX_LOADED:
                    self._loaded.popitem(last=False)
            elif (loaded.int_id, loaded.path) != (request.prompt_adapter_id, str(_folder_of(request))):
                raise InvalidRequest(
                    f"prompt_adapter_name must belong to one prompt adapter; {shown(name)} has number {loaded.int_id} "
                    f"and folder {loaded.path}",
                    field="prompt_adapter_name",
                    got=name,
                )
            _check_length(request, loaded.num_virtual_tokens)
            self._loaded.move_to_end(name)
            return loaded

    async def _load(self, request: PromptAdapterRequest) -> SoftPrompt:
        int_id = request.prompt_adapter_id
        if (other := next((one for one in self.soft_prompts if one.int_id == int_id), None)) is not None:
            raise InvalidRequest(
                f"prompt_adapter_id must belong to one prompt adapter; {int_id} is {shown(other.name)}",
                field="prompt_adapter_id",
                got=int_id,
            )
        return await self._read_in_thread(request)

    def _has_others(self, request: PromptAdapterRequest, digest: str) -> bool:
        """Return True if the name or the number of a request belongs to another soft prompt, or to other contents."""
        wanted = (request.prompt_adapter_id, request.prompt_adapter_name, str(_folder_of(request)), digest)
        return any(
            wanted[0] == one.int_id or wanted[1] == one.name
            for one in self.soft_prompts
            if (one.int_id, one.name, one.path, one.digest) != wanted
        )

    async def _read_in_thread(self, request: PromptAdapterRequest) -> SoftPrompt:
        is_inline = self._config.runner == "inline"
        return await run_in_thread(
            partial(self._read, request), "reading a prompt adapter", is_inline=is_inline
        )

    def _read(self, request: PromptAdapterRequest) -> SoftPrompt:
        # Imported here because most engines have no soft prompts.
        from triolet.model.folder.soft_prompt_files import read_soft_prompt

        folder = _folder_of(request)
        assert self._model.info is not None, "the runner starts before requests are taken"
        if self._model.info.soft_prompts is None:
            raise AdapterError(
                folder, "cannot be used: this model takes no prompt adapters", "prompt_adapter"
            )
        if not folder.is_dir():
            problem = "is no folder with a prompt adapter (hub ids are not supported: fetch it first)"
            raise AdapterError(folder, problem, "prompt_adapter")
        files = read_soft_prompt(folder, self._model.info.soft_prompts)
        return SoftPrompt(
            name=request.prompt_adapter_name,
            int_id=request.prompt_adapter_id,
            path=str(folder),
            digest=files.digest,
            num_virtual_tokens=files.num_virtual_tokens,
        )

    def remove(self, int_id: int) -> bool:
        """Forget a soft prompt; requests that were admitted with it go on. False if it is not loaded."""
        name = next((one.name for one in self.soft_prompts if one.int_id == int_id), None)
        return name is not None and self._loaded.pop(name, None) is not None


def _check_length(request: PromptAdapterRequest, num_virtual_tokens: int) -> None:
    wanted = request.prompt_adapter_num_virtual_tokens
    if wanted not in (None, num_virtual_tokens):
        raise InvalidRequest(
            f"prompt_adapter_num_virtual_tokens must be that of the folder, {num_virtual_tokens}; got {wanted}",
            field="prompt_adapter_num_virtual_tokens",
            got=wanted,
        )


def _folder_of(request: PromptAdapterRequest) -> Path:
    # The folder may be read again by a process with another working directory.
    return Path(request.prompt_adapter_local_path).expanduser().absolute()
