"""A causal model without weights: its KV cache holds token ids and positions, and its logits are a hash of both.

The logits after a token depend on everything the block table leads to, up to that token. A wrong slot, block, position
or length gives other logits than `expected_logits`, which looks at no cache at all.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.model.interface import ForwardBatch, LayerCache, LayerCacheSpec, ModelSpec
from triolet.model.sampling.noise import uniform_noise

VOCAB_SIZE = 97


def expected_logits(token_ids: Sequence[int], positions: Sequence[int] | None = None) -> Tensor:
    """[VOCAB_SIZE] float32 after these tokens."""
    positions = range(len(token_ids)) if positions is None else positions
    digest = hashlib.blake2b(array("q", [*token_ids, *positions]).tobytes(), digest_size=8).digest()
    stream = torch.tensor([int.from_bytes(digest, "little", signed=True)])
    return 10 * uniform_noise(stream, torch.arange(VOCAB_SIZE))[0]


class FakeCausalModel:
    """A sequence that contains the token `poison` gets logits that are not numbers."""

    def __init__(self, poison: int = -1) -> None:
        self.poison = poison
        self.num_tokens_of_steps: list[int] = []
        self.spec = ModelSpec(
            architecture="FakeForCausalLM",
            backend="native",
            vocab_size=VOCAB_SIZE,
            max_position=1000,
            cache_layers=(
                LayerCacheSpec(num_kv_heads=1, head_dim=1),
                LayerCacheSpec(num_kv_heads=2, head_dim=3),
            ),
            dtype=torch.float32,
        )

    def forward(self, batch: ForwardBatch) -> Tensor:
        every = torch.arange(len(batch.token_ids))
        return self.forward_logits(
            attrs.evolve(batch, logits_indices=every)
        )  # this model's hidden states are its logits

    def compute_logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return hidden[rows]

    def forward_logits(self, batch: ForwardBatch) -> Tensor:
        attention, slots = batch.attention, batch.attention.slot_mapping
        self.num_tokens_of_steps.append(len(batch.token_ids))
        self._check_hosts_numbers(attention)
        for layer in batch.cache:
            layer.keys.flatten(0, 1)[slots] = batch.token_ids[:, None, None].float()
            layer.values.flatten(0, 1)[slots] = batch.positions[:, None, None].float()
        logits = [
            self._logits_after(int(index), batch.cache[-1], attention) for index in batch.logits_indices
        ]
        return torch.stack(logits) if logits else torch.empty(0, VOCAB_SIZE)

    def _check_hosts_numbers(self, attention: AttentionMetadata) -> None:
        assert (
            attention.cu_query_lens.dtype
            == attention.seq_lens.dtype
            == attention.block_tables.dtype
            == torch.int32
        )
        assert attention.cu_query_lens.diff().tolist() == list(attention.query_lens_host)
        assert attention.seq_lens.tolist() == list(attention.seq_lens_host)

    def _logits_after(self, index: int, layer: LayerCache, attention: AttentionMetadata) -> Tensor:
        ends = attention.cu_query_lens.tolist()
        sequence = next(i for i in range(len(ends)) if index < ends[i + 1])
        length = attention.seq_lens_host[sequence] - (ends[sequence + 1] - 1 - index)
        block_size = layer.keys.shape[1]
        blocks = attention.block_tables[sequence, : -(-length // block_size)].long()
        seen, places = (
            tensor[blocks].flatten(0, 1)[:length, -1, -1].long().tolist()
            for tensor in (layer.keys, layer.values)
        )
        if self.poison in seen:
            return torch.full((VOCAB_SIZE,), torch.nan)
        return expected_logits(seen, places)
