"""Facts about an `AsyncLLM`: configuration, model and state, from methods that are awaited in vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any, TypeVar

import trio

from triolet.compat.facts import Facts
from triolet.compat.views import (
    ConfigView,
    DecodingConfig,
    LoRAView,
    ModelConfig,
    ParallelConfig,
    SchedulerView,
)
from triolet.config.engine import EngineConfig
from triolet.core.request.prompt import Prompt

T = TypeVar("T")


class AsyncFacts(Facts):
    """Facts about an `AsyncLLM`, under vLLM's names."""

    async def get_vllm_config(self) -> ConfigView:
        """Return the configuration that the engine was started with."""
        return await told(self.vllm_config)

    async def get_model_config(self) -> ModelConfig:
        """Return the configuration of the model."""
        return await told(self.model_config)

    async def get_parallel_config(self) -> ParallelConfig:
        """Return the number of workers of each kind."""
        return await told(self.vllm_config.parallel_config)

    async def get_scheduler_config(self) -> SchedulerView:
        """Return the limits of a step."""
        return await told(self.vllm_config.scheduler_config)

    async def get_decoding_config(self) -> DecodingConfig:
        """Return the backend of structured outputs."""
        return await told(DecodingConfig())

    async def get_lora_config(self) -> LoRAView | None:
        """Return the limits of LoRA adapters; None if they are not enabled."""
        return await told(self.vllm_config.lora_config)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Return the tasks that the engine serves."""
        return await told(self._info.tasks)

    async def is_tracing_enabled(self) -> bool:
        """Return True if spans are exported: `otlp_traces_endpoint` is set."""
        return await told(self.vllm_config.otlp_traces_endpoint is not None)


class Done:
    """Result of a method that is done already, and is awaited in some versions of vLLM; false, like None."""

    def __await__(self) -> Generator[Any, Any, None]:
        return checkpoint().__await__()

    def __bool__(self) -> bool:
        return False


class Count(int):
    """Number that may be awaited, too: the method is asynchronous in some versions of vLLM."""

    def __await__(self) -> Generator[Any, Any, int]:
        return told(int(self)).__await__()


async def checkpoint() -> None:
    """Let other tasks run once, under Trio or asyncio."""
    if trio.lowlevel.in_trio_run():
        await trio.lowlevel.checkpoint()
    else:
        await asyncio.sleep(0)


async def told(answer: T) -> T:
    """Return a known answer after a checkpoint, as Trio expects of every async function."""
    await checkpoint()
    return answer


# Names that programs for vLLM import: they can be built, and what is not offered is refused where it is given.

EngineClient = AsyncFacts
VllmConfig = EngineConfig
PromptType = Prompt
