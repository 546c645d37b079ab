"""What can be asked of an engine about itself by methods that vLLM's users await."""

from __future__ import annotations

from typing import TypeVar

import trio

from triolet.compat.facts import Facts
from triolet.compat.views import DecodingConfig, ModelConfig, ParallelConfig, SchedulerView
from triolet.config.engine import EngineConfig

T = TypeVar("T")


class AsyncFacts(Facts):
    """Of `AsyncLLM`."""

    async def get_vllm_config(self) -> EngineConfig:
        """What the engine was started with."""
        return await told(self.vllm_config)

    async def get_model_config(self) -> ModelConfig:
        """Of the model that runs."""
        return await told(self.model_config)

    async def get_parallel_config(self) -> ParallelConfig:
        """One of everything."""
        return await told(ParallelConfig())

    async def get_scheduler_config(self) -> SchedulerView:
        """Limits of a step."""
        return await told(SchedulerView.of(self.vllm_config, self._info))

    async def get_decoding_config(self) -> DecodingConfig:
        """Who compiles grammars."""
        return await told(DecodingConfig())

    async def get_lora_config(self) -> None:
        """None: LoRA is not enabled."""
        return await told(None)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """What this engine can be asked for."""
        return await told(("generate",))

    async def is_tracing_enabled(self) -> bool:
        """Whether spans are exported: `otlp_traces_endpoint` is set."""
        return await told(self.vllm_config.otlp_traces_endpoint is not None)

    async def is_sleeping(self) -> bool:
        """False: it can not be put to sleep."""
        return await told(False)

    async def is_paused(self) -> bool:
        """False: it can not be paused."""
        return await told(False)


async def told(answer: T) -> T:
    """An answer that is known, from a method that vLLM's users await."""
    await trio.lowlevel.checkpoint()
    return answer
