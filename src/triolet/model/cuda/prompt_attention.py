"""Choice of what attends to prompts on a GPU: the Triton kernel, or a flash attention of torch's that was measured."""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections.abc import Callable
from typing import Final, Protocol

import attrs
import torch
from torch import Tensor

from triolet.errors import ConfigError
from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.kernels.flash_attention import IMPLEMENTATIONS, FlashAttention
from triolet.kernels.paged_attention import paged_attention
from triolet.model.backends.torch_decoder import Attention, Decoder, with_prompt_attention
from triolet.model.interface import ModelSpec

PROMPT_TOKENS: Final = 2048
"""Length of the prompt that the choice is measured with, unless the model's longest is shorter."""
NUM_ROUNDS: Final = 5
MAX_DIFFERENCE: Final = 0.02
"""Greatest distance from the Triton kernel's result, relative to its norm; rounding to bfloat16 makes some 0.003."""

logger = logging.getLogger(__name__)


class Timer(Protocol):
    """Measures work on a device."""

    def __call__(self, work: Callable[[], object]) -> float:
        """Return the seconds that the device takes for it."""
        ...


def time_on_gpu(work: Callable[[], object]) -> float:
    """Return the seconds that the current GPU takes for some work."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1000


def choose_prompt_attention(
    name: str, decoder: Decoder, *, device: torch.device, block_size: int, timer: Timer = time_on_gpu
) -> Decoder:
    """Return the decoder with what is to attend to its prompts.

    Args:
        name: `attention_backend` of `EngineConfig`.
        decoder: on a GPU.
        device: the GPU.
        block_size: tokens in a block of the KV cache.
        timer: measures the trials.
    Raises:
        ConfigError: an implementation is asked for that cannot compute this model here.
    """
    if name == "triton":
        return decoder
    attentions = (layer.attention for layer in decoder.layers if isinstance(layer.attention, Attention))
    layer = next((attention for attention in attentions if attention.is_softmax_alone), None)
    if layer is None:
        if name == "auto":
            return decoder
        rule = "triton or auto for a model without a layer that has neither sinks nor a soft cap"
        raise ConfigError("attention_backend", rule, name)
    trial = _Trial.of(layer, decoder.spec, device, block_size)
    times: dict[str, float] = {}
    problems: dict[str, str] = {}
    for each in IMPLEMENTATIONS if name == "auto" else (name,):
        try:
            times[each] = trial.measure(FlashAttention(each), timer)
        except Exception as error:  # packages that plug into torch raise errors of all kinds
            problems[each] = str(error) or type(error).__name__
            logger.info("%s is not for the prompts of this model: %s", each, problems[each])
    if name in problems:
        raise ConfigError("attention_backend", f"one for this model and GPU ({problems[name]})", name)
    if times:
        times["triton"] = trial.measure(None, timer)
        shown = ", ".join(f"{each} {1000 * seconds:.3f} ms" for each, seconds in times.items())
        logger.info("attention of a prompt of %d tokens: %s", trial.num_tokens, shown)
    best = min(times, key=times.__getitem__, default="triton") if name == "auto" else name
    if best == "triton":
        with contextlib.suppress(ImportError):
            FlashAttention("fa2").activate()  # torch's own: what was tried is not left for other models
        return decoder
    chosen = FlashAttention(best)
    chosen.activate()  # the last one that was tried may be another one
    return with_prompt_attention(decoder, chosen)


@attrs.frozen(eq=False)
class _Trial:
    """A layer's attention to one prompt, over random numbers."""

    layer: Attention
    query: Tensor
    keys: Tensor
    values: Tensor
    metadata: AttentionMetadata
    num_tokens: int

    @classmethod
    def of(cls, layer: Attention, spec: ModelSpec, device: torch.device, block_size: int) -> _Trial:
        num_tokens = min(PROMPT_TOKENS, spec.max_position)
        num_blocks = -(-num_tokens // block_size)

        def randn(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(*shape, dtype=spec.dtype, device=device).to(dtype)

        def ints(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        cache_shape = num_blocks, block_size, layer.num_kv_heads, layer.head_dim
        keys, values = (randn(*cache_shape, dtype=spec.cache_dtype) for _ in range(2))
        metadata = AttentionMetadata(
            cu_query_lens=ints(0, num_tokens),
            seq_lens=ints(num_tokens),
            block_tables=torch.randperm(num_blocks, device=device).int()[None],
            slot_mapping=torch.empty(0, dtype=torch.int64, device=device),
            query_lens_host=(num_tokens,),
            seq_lens_host=(num_tokens,),
        )
        query = randn(num_tokens, layer.num_heads, layer.head_dim, dtype=spec.dtype)
        return cls(layer, query, keys, values, metadata, num_tokens)

    def measure(self, prompts: FlashAttention | None, timer: Timer) -> float:
        """Return the median of the seconds that an attention takes; None is the Triton kernel.

        Raises:
            RuntimeError: it does not compute this model, or computes something else.
        """
        if prompts is not None:
            problem = prompts.problem_with(
                self.query.dtype, self.keys.dtype, self.layer.head_dim, self.keys.shape[1]
            )
            if problem is not None:
                raise RuntimeError(problem)
            prompts.activate()
            expected = self._attend(None).float()
            difference = (self._attend(prompts).float() - expected).norm() / expected.norm()
            if not difference <= MAX_DIFFERENCE:  # NaN as well
                raise RuntimeError(f"its result is {difference:.3g} away from that of the Triton kernel")
        self._attend(prompts)
        return statistics.median(timer(lambda: self._attend(prompts)) for _ in range(NUM_ROUNDS))

    def _attend(self, prompts: FlashAttention | None) -> Tensor:
        return paged_attention(
            self.query,
            self.keys,
            self.values,
            self.metadata,
            scale=self.layer.scale,
            sliding_window=self.layer.sliding_window,
            prompts=prompts,
        )
