"""What can be asked of an engine about itself, in vLLM's words."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

import trio

from triolet.compat.views import (
    DecodingConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerView,
    Tokenizer,
    tokenizer_of,
)
from triolet.config.engine import EngineConfig
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.params import SamplingParams
from triolet.core.request.tokenizer_interface import TokenizerInterface


class Facts(ABC):
    """Of both kinds of engine."""

    _config: EngineConfig

    @property
    def vllm_config(self) -> EngineConfig:
        """What the engine was started with."""
        return self._config

    @property
    @abstractmethod
    def _info(self) -> ModelInfo:
        """What is known of the model."""

    @property
    @abstractmethod
    def _tokenizer(self) -> TokenizerInterface | None:
        """Its tokenizer."""

    @property
    def model_config(self) -> ModelConfig:
        """Of the model that runs."""
        return ModelConfig.of(self.vllm_config, self._info)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return tokenizer_of(self._tokenizer)

    def get_tokenizer(self) -> Tokenizer:
        """The model's."""
        return self.tokenizer


class EngineFacts(Facts):
    """Of `LLMEngine`."""

    @property
    def model_name(self) -> str:
        """The name under which the model is shown."""
        return self.vllm_config.model_name

    @property
    def max_model_len(self) -> int:
        """Longest sequence, tokens."""
        return self._info.max_model_len

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """That end an answer."""
        return self._info.generation.eos_token_ids

    @property
    def dp_group(self) -> None:
        """None: there is one engine."""
        return None

    @property
    def external_launcher_dp(self) -> bool:
        """False: there is one engine."""
        return False

    def default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets."""
        return self._info.generation.sampling_params()

    def get_model_config(self) -> ModelConfig:
        """Of the model that runs."""
        return self.model_config

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What this engine can be asked for."""
        return ("generate",)

    def is_sleeping(self) -> bool:
        """False: it can not be put to sleep."""
        return False


# --------------------
# What can be asked of an engine about itself by methods that vLLM's users await.


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
