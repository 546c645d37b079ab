"""Loss of a model's weights by rounding: the logits of two models for the same tokens.

Measured for each position are the next token's distributions. Their Kullback-Leibler divergence says how far one model
is from the other whatever the text; perplexity says how well a model foretells the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.model.interface import CausalModel, ForwardBatch, LayerCache
from triolet.model.memory.kv_cache import allocate_kv_cache

_BLOCK_SIZE = 16


@attrs.frozen(kw_only=True)
class Losses:
    """Comparison of a model with the one that it was made from."""

    distance: float  # of the logits, relative to their size
    divergence: float  # mean Kullback-Leibler divergence of the next token's distribution, nats
    agreement: float  # share of positions with the same likeliest token
    perplexity: float  # of the text


def compare_logits(truth: Tensor, found: Tensor, told: Tensor) -> Losses:
    """Compare logits [positions, vocab_size] with the reference and with the tokens that followed, [positions]."""
    right, ours = truth.log_softmax(dim=1), found.log_softmax(dim=1)
    return Losses(
        distance=((found - truth).norm() / truth.norm()).item(),
        divergence=(right.exp() * (right - ours)).sum(dim=1).mean().item(),
        agreement=(found.argmax(dim=1) == truth.argmax(dim=1)).float().mean().item(),
        perplexity=(-ours.gather(1, told[:, None]).mean()).exp().item(),
    )


@attrs.define(eq=False)
class SingleSequence:
    """One sequence of up to `max_tokens` tokens on a model, without an engine."""

    _model: CausalModel
    _max_tokens: int
    _cache: tuple[LayerCache, ...] = attrs.field(init=False)
    _length: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._cache = allocate_kv_cache(
            self._model.spec,
            num_blocks=-(-self._max_tokens // _BLOCK_SIZE),
            block_size=_BLOCK_SIZE,
            device=torch.device("cpu"),
        )

    def append(self, ids: Sequence[int]) -> Tensor:
        """Compute some more tokens; return their logits, [len(ids), vocab_size] float32."""
        begin, end = self._length, self._length + len(ids)
        positions = torch.arange(begin, end)
        self._length = end
        attention = AttentionMetadata(
            cu_query_lens=torch.tensor([0, len(ids)], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            block_tables=torch.arange(-(-self._max_tokens // _BLOCK_SIZE), dtype=torch.int32)[None],
            slot_mapping=positions,
            query_lens_host=(len(ids),),
            seq_lens_host=(end,),
        )
        batch = ForwardBatch(
            token_ids=torch.tensor(ids),
            positions=positions,
            cache=self._cache,
            attention=attention,
            logits_indices=torch.arange(len(ids)),
        )
        return self._model.forward_logits(batch).float()


def logits_of(model: CausalModel, ids: Sequence[int]) -> Tensor:
    """Return the logits after each token of one sequence: float32, [len(ids), vocab_size]."""
    return SingleSequence(model, len(ids)).append(ids)


def greedy_answer(
    model: CausalModel, prompt: Sequence[int], num_tokens: int, eos_token_ids: Sequence[int]
) -> list[int]:
    """Return the likeliest continuation, up to a token that ends it, which is included, or `num_tokens` tokens."""
    sequence, answer = SingleSequence(model, len(prompt) + num_tokens), list[int]()
    logits = sequence.append(prompt)
    while len(answer) < num_tokens:
        answer.append(int(logits[-1].argmax()))
        if answer[-1] in eos_token_ids:
            break
        logits = sequence.append(answer[-1:])
    return answer
