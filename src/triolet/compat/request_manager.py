"""Requests by their ids, for programs that are written around a request manager."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from triolet.compat.async_facts import told
from triolet.compat.async_llm import AsyncLLM
from triolet.compat.generation import Generation
from triolet.compat.prompts import split_prompt
from triolet.compat.refusals import key_of, refuse
from triolet.core.request.lora import LoRARequest
from triolet.core.request.params import SamplingParams
from triolet.core.request.request import RequestStatus


@attrs.frozen
class StreamingRequest:
    """Request to be added to a `RequestManager`.

    Args:
        request_id: unique among live requests.
        prompt: of any form that `AsyncLLM.generate` takes.
        sampling_params: by default the model's own.
        arrival_time: not offered: a request arrives when it is added.
        lora_request: LoRA adapter that computes the answer.
        priority: lower goes first under the `priority` policy.
    """

    request_id: str
    prompt: Any
    sampling_params: SamplingParams | None = None
    arrival_time: float | None = None
    lora_request: LoRARequest | None = None
    priority: int = 0


LIVE = (RequestStatus.WAITING, RequestStatus.RUNNING)


class RequestManager:
    """Adds and aborts requests of an engine, and returns their status.

    Args:
        engine: engine inside of its scope. Without one, every call is refused.
    """

    def __init__(self, engine: AsyncLLM | None = None) -> None:
        self._given = engine
        self._kept: list[Generation] = []

    @property
    def _engine(self) -> AsyncLLM:
        if self._given is None:
            refuse("RequestManager()", "it needs the engine of its requests: RequestManager(engine)")
        return self._given

    async def add_request(
        self, request: StreamingRequest | str | int, prompt: Any = None, *others: Any, **arguments: Any
    ) -> Generation:
        """Queue a request; closing the returned `Generation` ends it.

        Args:
            request: the request, or its id; a request that is named by its id goes on also if the result is dropped.
            prompt: with an id, and then the further fields of `StreamingRequest`, and perhaps `prompt_token_ids`.
        """
        if not isinstance(request, StreamingRequest):
            if (token_ids := arguments.pop("prompt_token_ids", None)) is not None:
                prompt, _ = split_prompt(prompt, token_ids)
            generation = await self.add_request(
                StreamingRequest(key_of(request), prompt, *others, **arguments)
            )
            # ended ones are dropped here, so that no more are kept than live
            kept = (one for one in self._kept if self._engine.get_request_status(one.request_id) in LIVE)
            self._kept = [*kept, generation]
            return generation
        return await self._engine.add_request(
            request.request_id,
            request.prompt,
            request.sampling_params,
            request.arrival_time,
            request.lora_request,
            priority=request.priority,
        )

    async def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests; unknown ids are ignored."""
        await self._engine.abort(request_id)

    async def get_request_status(self, request_id: str) -> RequestStatus | None:
        """Return the status of a request; None for one that is unknown or already forgotten."""
        return await told(self._engine.get_request_status(request_id))

    add = add_request
    abort = abort_request
