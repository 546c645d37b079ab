"""What the rest of the engine knows of the model that the runner has loaded."""

from __future__ import annotations

import attrs

from triolet.core.request.params import SamplingParams
from triolet.core.request.tokenizer_interface import TokenizerInterface


@attrs.frozen(kw_only=True)
class GenerationDefaults:
    """The model's own wishes, from its generation_config.json; None where it has none.

    Args:
        eos_token_ids: ids that end an answer; the tokenizer's own one first.
        max_new_tokens: longest answer, tokens.
    """

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    def sampling_params(self) -> SamplingParams:
        """What a request without parameters gets: these wishes, and without a longest answer the whole context.

        Raises:
            InvalidParams: a wish is out of its range.
        """
        wishes = attrs.asdict(self)
        del wishes["eos_token_ids"]
        max_tokens = wishes.pop("max_new_tokens")
        return SamplingParams(max_tokens=max_tokens, **{k: v for k, v in wishes.items() if v is not None})


@attrs.frozen(kw_only=True)
class ModelInfo:
    """What a runner reports once it is ready.

    Args:
        folder: where the model's files are; the tokenizer is read from here, too.
        architecture: from config.json.
        backend: `native` or `transformers`.
        vocab_size: token ids are below it.
        max_position: longest sequence that the model can place, tokens.
        max_model_len: longest sequence of this engine, tokens: the operator's wish, or what model and KV cache allow.
        num_kv_blocks: blocks that the KV tensors have.
        block_size: tokens in a block.
        dtype: of weights and KV.
        device: where they are.
        cpu_kernels: the kind of CPU that the C++ kernels are compiled for, such as `avx2`; None = torch works instead.
        generation: the model's defaults.
        process_id: of the process that the model lives in, if it is not the engine's own.
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
    generation: GenerationDefaults = GenerationDefaults()
    process_id: int | None = None

    def cache_config(self, *, enable_prefix_caching: bool) -> dict[str, object]:
        """How the KV cache is laid out, in vLLM's words."""
        return {
            "block_size": self.block_size,
            "num_gpu_blocks": self.num_kv_blocks,  # whatever the device
            "cache_dtype": self.dtype,
            "enable_prefix_caching": enable_prefix_caching,
        }


@attrs.define(eq=False)
class LoadedModel:
    """The model and the tokenizer of a running engine.

    Args:
        info: None until the runner has loaded the model.
        tokenizer: None until it is loaded, or if the model has none.
    """

    info: ModelInfo | None = None
    tokenizer: TokenizerInterface | None = None
