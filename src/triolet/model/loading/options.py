"""Settings of a load, and what a loaded model consists of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch

from triolet.config.choices import FP8_ACTIVATIONS
from triolet.core.request.model_info import GenerationDefaults
from triolet.errors import ConfigError
from triolet.model.architectures.decoder_config import DTYPES
from triolet.model.architectures.kv_format import KV_DTYPES
from triolet.model.interface import CausalModel

if TYPE_CHECKING:
    from triolet.model.adapters import AdapterBank
    from triolet.model.pooling import Pooler

AUTO = "auto"


@attrs.frozen(kw_only=True)
class AdapterLimits:
    """Limits of the LoRA adapters of an engine, under the names of the fields of `EngineConfig`."""

    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int
    lora_dtype: str


@attrs.frozen(kw_only=True)
class LoadOptions:
    """Settings of a load, under the names of the fields of `EngineConfig`.

    Args:
        dtype: `float32`, `bfloat16` or `float16`; `auto` is that of the checkpoint.
        device: such as `cpu` or `cuda`.
        trust_remote_code: lets a model that brings its own Python code run it; a native architecture never does.
        revision: of a hub id.
        max_model_len: longest sequence that will be asked for, tokens. A LongRoPE model is good for its original
            length only, unless this asks for more.
        quantization: `int8` or `int4` rounds the weights while they are read, `int8-activations` the activations; the
            method of quantised files is checked.
        convert: what the model is made into, such as `embed`.
        classifier_from_token: the two tokens that stand for the classes: their logits are the scores.
        adapter_limits: of LoRA adapters; None for a model without them.
        weights_cache: folder of packed weights; None for none.
        calibration: whether the machine is measured.
        kv_cache_dtype: of keys and values; `auto` is the model's.
    """

    dtype: str = AUTO
    device: str = "cpu"
    trust_remote_code: bool = False
    revision: str | None = None
    max_model_len: int | None = None
    quantization: str | None = None
    convert: str = AUTO
    classifier_from_token: tuple[str, ...] = ()
    adapter_limits: AdapterLimits | None = None
    weights_cache: str | None = None
    calibration: str = AUTO
    kv_cache_dtype: str = AUTO

    @property
    def place(self) -> torch.device:
        """The device."""
        return torch.device(self.device)

    def check(self) -> None:
        """Check what does not depend on the model.

        Raises:
            ConfigError: `dtype` is unknown, or the device cannot have `kv_cache_dtype` or `quantization`.
        """
        if self.dtype not in (AUTO, *DTYPES):
            raise ConfigError("dtype", f"one of auto, {', '.join(DTYPES)}", self.dtype)
        if self.kv_cache_dtype != AUTO:
            self._check_kv_device()
        if self.quantization == FP8_ACTIVATIONS and not self._has_capability(8, 9):
            rule = f"another than {FP8_ACTIVATIONS}, which needs an NVIDIA GPU of compute capability 8.9 or above"
            raise ConfigError("quantization", rule, FP8_ACTIVATIONS)

    def _check_kv_device(self) -> None:
        if self.place.type != "cuda":
            rule = "auto on a CPU: a KV cache in float8 needs CUDA, an NVIDIA GPU"
            raise ConfigError("kv_cache_dtype", rule, self.kv_cache_dtype)
        if KV_DTYPES[self.kv_cache_dtype] == torch.float8_e4m3fn and not self._has_capability(8, 9):
            rule = "auto or fp8_e5m2 on a GPU of compute capability below 8.9, which cannot convert E4M3"
            raise ConfigError("kv_cache_dtype", rule, self.kv_cache_dtype)

    def _has_capability(self, *version: int) -> bool:
        return self.place.type == "cuda" and torch.cuda.get_device_capability(self.place) >= version

    def check_length(self, max_position: int) -> None:
        """Check the longest sequence that will be asked for.

        Args:
            max_position: length that the model is made for, tokens.

        Raises:
            ConfigError: `max_model_len` is above it.
        """
        if self.max_model_len is not None and self.max_model_len > max_position:
            rule = f"at most {max_position} tokens for this model"
            raise ConfigError("max_model_len", rule, self.max_model_len)


DEFAULT_OPTIONS: Final = LoadOptions()


def not_quantised(quantization: str) -> ConfigError:
    """Return the refusal of a `quantization`, which only the CPU decoder has."""
    rule = "none for this model: it is for dense ones like Llama, on a CPU, in float32 or bfloat16"
    return ConfigError("quantization", rule, quantization)


@attrs.frozen(eq=False, kw_only=True)
class LoadedFolder:
    """A model that is ready to run."""

    model: CausalModel
    folder: Path  # where its files, tokenizer included, lie on this machine; a GGUF file has all in one
    generation_defaults: GenerationDefaults  # how its makers want it to be sampled
    generates: bool = True  # whether it has an output head
    pooler: Pooler | None = None  # what it computes for pooled requests
    adapters: AdapterBank[Any] | None = None  # LoRA adapters of its layers
