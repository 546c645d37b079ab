"""Facts about the loaded model that the model runner reports to the rest of the engine."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from triolet.core.request.lora import AdapterSupport
from triolet.core.request.params import SamplingParams
from triolet.core.request.pooling_params import GENERATE, PoolingInfo
from triolet.core.request.prompt_adapter import SoftPromptSupport
from triolet.core.request.tokenizer_interface import TokenizerInterface


@attrs.frozen(kw_only=True)
class GenerationDefaults:
    """Default sampling parameters of a model, from its generation_config.json; None where it gives none.

    Args:
        eos_token_ids: ids that end an answer; the one of the tokenizer first.
        max_new_tokens: longest answer, tokens.
    """

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    def chosen_by(self, generation_config: str) -> GenerationDefaults:
        """Return the defaults that `EngineConfig.generation_config` leaves: with `vllm` what ends an answer alone."""
        return GenerationDefaults(eos_token_ids=self.eos_token_ids) if generation_config == "vllm" else self

    def sampling_params(self) -> SamplingParams:
        """Return the parameters of a request that gives none.

        Raises:
            InvalidParams: a default is out of its range.
        """
        defaults = attrs.asdict(self)
        del defaults["eos_token_ids"]
        # None stays None, which lets an answer fill the context, in place of the short default of SamplingParams.
        max_tokens = defaults.pop("max_new_tokens")
        return SamplingParams(max_tokens=max_tokens, **{k: v for k, v in defaults.items() if v is not None})


@attrs.frozen(kw_only=True)
class ModelInfo:
    """Report of a model runner that is ready.

    Args:
        folder: of the model's files, or its GGUF file; the tokenizer is read from it, too.
        architecture: from config.json.
        backend: `native` or `transformers`.
        vocab_size: token ids are below it.
        max_position: longest sequence that the model can place, tokens.
        max_model_len: longest sequence of this engine, tokens: as configured, or what model and KV cache allow.
        num_kv_blocks: blocks that the KV tensors have, together for all cache groups.
        block_size: tokens in a block.
        dtype: of weights and KV.
        device: of weights and KV.
        cpu_kernels: kind of CPU that the C++ kernels are compiled for, such as `avx2`; None if torch is used instead.
        calibration: choices of the C++ kernels that were measured for this model and machine, by name, see
            `EngineConfig.calibration`; empty without them.
        generation: default sampling parameters of the model.
        process_id: of the model's process, if it is not the engine's own.
        generates: whether it generates text.
        pooling: what it computes for pooled requests; None if it only generates.
        adapters: what LoRA adapters may change; None if the engine takes none.
        soft_prompts: shapes that soft prompts must fit; None if the model takes none.
        cache_windows: window of each cache group, tokens, None for full attention; see `core.kv_cache.cache_groups`.
    """

    folder: str
    architecture: str
    backend: str
    vocab_size: int
    max_position: int
    max_model_len: int
    num_kv_blocks: int
    block_size: int
    dtype: str
    device: str
    cpu_kernels: str | None = None
    calibration: Mapping[str, int] = attrs.field(factory=dict)
    generation: GenerationDefaults = GenerationDefaults()
    process_id: int | None = None
    generates: bool = True
    pooling: PoolingInfo | None = None
    adapters: AdapterSupport | None = None
    soft_prompts: SoftPromptSupport | None = None
    cache_windows: tuple[int | None, ...] = (None,)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks that the model does: `generate`, and those of pooled requests."""
        generating = (GENERATE,) if self.generates else ()
        return generating if self.pooling is None else (*generating, *self.pooling.tasks)

    def cache_config(self, *, enable_prefix_caching: bool) -> dict[str, object]:
        """Return the layout of the KV cache under vLLM's names."""
        return {
            "block_size": self.block_size,
            "num_gpu_blocks": self.num_kv_blocks,  # vLLM's name for it on any device
            "cache_dtype": self.dtype,
            "enable_prefix_caching": enable_prefix_caching,
        }


@attrs.define(eq=False)
class LoadedModel:
    """The model and the tokenizer of a running engine."""

    info: ModelInfo | None = None  # None until the runner has loaded the model
    tokenizer: TokenizerInterface | None = None  # None until it is loaded, or if the model has none
