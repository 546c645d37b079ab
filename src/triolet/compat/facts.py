"""What can be asked of an engine about itself, in vLLM's words."""

from __future__ import annotations

from abc import ABC, abstractmethod

from triolet.compat.views import (
    ModelConfig,
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
