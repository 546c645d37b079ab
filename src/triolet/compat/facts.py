"""Facts about an engine under vLLM's names: configuration, model and tokenizer."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod

from triolet.compat.views import (
    ConfigView,
    ModelConfig,
    ObservabilityView,
    Tokenizer,
    tokenizer_of,
)
from triolet.config.engine import EngineConfig
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.params import SamplingParams
from triolet.core.request.tokenizer_interface import TokenizerInterface
from triolet.errors import EngineClosed


class Facts(ABC):
    """Facts that `LLMEngine` and `AsyncLLM` have in common."""

    _config: EngineConfig
    _view: Tokenizer | None = None  # of the tokenizer
    _config_view: ConfigView | None = None

    @property
    def vllm_config(self) -> ConfigView:
        """Configuration that the engine was started with, with `model_config` and other parts."""
        if self._config_view is None:
            # Not a cycle: an engine that is dropped ends at once.
            engine = weakref.ref(self)

            def info() -> ModelInfo:
                if (present := engine()) is None:
                    raise EngineClosed("the engine of this configuration is gone")
                return present._info

            self._config_view = ConfigView.over(self._config, info)
        return self._config_view

    @property
    @abstractmethod
    def _info(self) -> ModelInfo: ...

    @property
    @abstractmethod
    def _tokenizer(self) -> TokenizerInterface | None: ...

    @property
    def model_config(self) -> ModelConfig:
        """Configuration of the model."""
        return self.vllm_config.model_config

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model.

        Raises:
            UnsupportedFeature: the model has none.
        """
        if self._view is None:  # made once: it keeps what transformers has read
            config, info = self.vllm_config, self._info
            self._view = tokenizer_of(
                self._tokenizer, config.tokenizer or info.folder, trust_remote_code=config.trust_remote_code
            )
        return self._view

    def get_tokenizer(self, lora_request: object = None) -> Tokenizer:
        """Return `tokenizer`, which may be awaited; an adapter has none of its own."""
        return self.tokenizer


class EngineFacts(Facts):
    """Facts about an `LLMEngine`."""

    @property
    def model_name(self) -> str:
        """Name under which the model is shown."""
        return self.vllm_config.model_name

    @property
    def max_model_len(self) -> int:
        """Longest sequence, tokens."""
        return self._info.max_model_len

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end an answer."""
        return self._info.generation.eos_token_ids

    @property
    def dp_group(self) -> None:
        """None: there is one engine."""
        return None

    @property
    def external_launcher_dp(self) -> bool:
        """False: there is one engine."""
        return False

    @property
    def should_execute_dummy_batch(self) -> bool:
        """False: there are no other engines to keep in step with."""
        return False

    @property
    def observability_config(self) -> ObservabilityView:
        """Settings of traces."""
        return self.vllm_config.observability_config

    @staticmethod
    def _cleanup_instance_caches(model_ref: object = None) -> None:
        """Do nothing: no cache is kept beside an engine."""

    def default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a request that gives none."""
        return self._info.generation.sampling_params()

    def get_model_config(self) -> ModelConfig:
        """Return `model_config`."""
        return self.model_config

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Return the tasks that the engine serves."""
        return self._info.tasks
