"""Models of transformers whose attention cannot be exchanged for ours: their own attention over keys from our blocks.

Some families do not use transformers' attention interface (Falcon, Bloom, MPT, GPT-J), others hand something to it that
paged attention does not compute (sinks, biases on scores, chunks). They have one thing in common: what they keep of
earlier tokens goes through a `transformers.Cache`. So they get a cache whose `update` writes the new keys and values
into our blocks, and returns those of the sequence gathered in their order. All else, masks and positions among it, is
the model's own code.

That costs a copy of the sequence's keys and values in each layer and step, and one call of the model for each chunk of
a prompt. Decode steps of sequences of similar length are computed together, padded on the left, if a measurement at
load says that the model takes that right at every position.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from triolet.kernels.kv_write import kv_write
from triolet.model.backends.transformers_head import compute_logits, decoder_of
from triolet.model.interface import ForwardBatch, LayerCache, LayerCacheSpec, ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_PADDING: Final = 2.0  # so that no more than half of what is gathered is padding
_SHORT: Final = 64  # tokens; sequences up to this length are decoded together whatever the padding


@attrs.frozen(eq=False)
class _Rows:
    """Sequences that are computed in one call, with as many new tokens each."""

    places: Tensor  # [num_seqs, length] int64, slots of all tokens of the sequences, padded on the left
    mask: Tensor | None  # [num_seqs, length] int64, 0 where `places` are padding; None if none is
    slots: Tensor  # [num_seqs * num_new] int64, slots of the new tokens
    num_past: int  # tokens before the new ones, padding included
    offset: int  # position of the first of `places`; 0 but where a sequence's beginning is left out


class GatheredLayer(DynamicLayer):
    """One layer's cache in transformers' terms, whose tokens lie in our blocks.

    Args:
        cache: the blocks.
        rows: sequences of the call.
    """

    def __init__(self, cache: LayerCache, rows: _Rows) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache, self.rows = cache, rows

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        cache = self.cache
        return self._update(cache.keys, key_states), self._update(cache.values, value_states)

    def _update(self, blocks: Tensor, states: Tensor) -> Tensor:
        # [num_seqs, num_kv_heads, num_new, width] in, [num_seqs, num_kv_heads, length, width] out
        width = states.shape[-1]
        rows = states.transpose(1, 2).flatten(0, 1).to(blocks.dtype)
        padded = torch.nn.functional.pad(rows, (0, blocks.shape[-1] - width)).contiguous()
        kv_write(padded, blocks, self.rows.slots)
        gathered = blocks.flatten(0, 1)[self.rows.places]  # [num_seqs, length, num_kv_heads, head_dim]
        return gathered[..., :width].transpose(1, 2).to(states.dtype)

    def get_seq_length(self) -> int:
        return self.rows.num_past + self.rows.offset

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.rows.num_past + query_length, self.rows.offset


class _MeasuredLayer(DynamicLayer):
    """One layer's cache that remembers the shapes of what it is asked to keep."""

    shapes: tuple[torch.Size, torch.Size] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.shapes = (key_states.shape, value_states.shape)
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys, values


def cache_layers_of(model: PreTrainedModel) -> Mapping[int, LayerCacheSpec]:
    """Return what the model keeps of two tokens: the layout of each layer that keeps something, by its index."""
    cache = Cache(layer_class_to_replicate=_MeasuredLayer)
    tokens = torch.arange(2, device=model.device)[None]
    with torch.inference_mode():
        model(input_ids=tokens, past_key_values=cache, use_cache=True)
    found = {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, _MeasuredLayer) and layer.shapes is not None:
            keys, values = layer.shapes
            if len(keys) != 4 or keys[:3] != values[:3] or keys[2] != 2:
                raise ValueError(f"layer {index} keeps {tuple(keys)} and {tuple(values)} of 2 tokens")
            found[index] = LayerCacheSpec(num_kv_heads=keys[1], head_dim=max(keys[-1], values[-1]))
    if not found:
        raise ValueError("no layer keeps anything in the cache that it is given")
    return found


@attrs.define(eq=False)
class OwnAttentionModel:
    """A model of transformers with its own attention, behind the runner's interface (`CausalModel`)."""

    spec: ModelSpec  # what the engine needs to know of it
    model: PreTrainedModel  # in evaluation mode
    layers: Sequence[int]  # the model's index of each layer in the paged cache
    # Decode steps share a call with others that are up to so many times as long; 0: they are alone.
    max_padding: float = 0.0

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        hidden: Tensor | None = None
        for indices, rows in self._calls(batch):
            output = decoder_of(self.model)(**self._arguments(batch, indices, rows))
            states: Tensor = output[0]
            if hidden is None:
                hidden = states.new_zeros(len(batch.token_ids), states.shape[-1])
            hidden[indices.flatten()] = states.flatten(0, 1)
        assert hidden is not None, "a step has at least one sequence"
        return hidden.to(self.spec.dtype)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return compute_logits(self.model, hidden, rows).to(self.spec.dtype)

    def forward_logits(self, batch: ForwardBatch) -> Tensor:
        return self.compute_logits(self.forward(batch), batch.logits_indices)

    def _arguments(self, batch: ForwardBatch, indices: Tensor, rows: _Rows) -> dict[str, Any]:
        layers: list[Any] = [DynamicLayer() for _ in range(self.layers[-1] + 1)]
        for index, cache in zip(self.layers, batch.cache, strict=True):
            layers[index] = GatheredLayer(cache, rows)
        arguments: dict[str, Any] = {
            "input_ids": batch.token_ids[indices],
            "past_key_values": Cache(layers=layers),
            "use_cache": True,
        }
        if rows.mask is not None:
            arguments["attention_mask"] = rows.mask
        if "position_ids" in inspect.signature(decoder_of(self.model).forward).parameters:
            arguments["position_ids"] = batch.positions[indices]
        return arguments

    def _calls(self, batch: ForwardBatch) -> Iterator[tuple[Tensor, _Rows]]:
        """Yield the step's tokens call by call: their indices in the step, [num_seqs, num_new], and their places."""
        metadata = batch.attention
        block_size, device = batch.cache[0].keys.shape[1], batch.token_ids.device
        for group in groups(metadata.query_lens_host, metadata.seq_lens_host, self.max_padding):
            num_new = metadata.query_lens_host[group[0]]
            longest = max(metadata.seq_lens_host[row] for row in group)
            rows = torch.tensor(group, device=device)
            indices = metadata.cu_query_lens[rows].long()[:, None] + torch.arange(num_new, device=device)
            shift = longest - metadata.seq_lens[rows].long()
            place = torch.arange(longest, device=device) - shift[:, None]  # negative: padding
            # Padding shows the sequence's first token, because what was never written may be NaN, which no mask hides.
            token = place.clamp_min(0)
            blocks = metadata.block_tables[rows].long().gather(1, token // block_size)
            is_alone = len(group) == 1
            yield (
                indices,
                _Rows(
                    places=blocks * block_size + token % block_size,
                    mask=None if is_alone else (place >= 0).long(),
                    slots=metadata.slot_mapping[indices.flatten()],
                    num_past=longest - num_new,
                    offset=int(batch.positions[indices[0, 0]]) - longest + num_new if is_alone else 0,
                ),
            )


def groups(query_lens: Sequence[int], seq_lens: Sequence[int], max_padding: float) -> list[list[int]]:
    """Return the rows of a step that are computed in one call each.

    Chunks of more than one token are alone. Decode steps are together with others of similar length.

    Args:
        query_lens: tokens of each sequence in the step.
        seq_lens: tokens of each sequence in the cache, those of the step included.
        max_padding: how many times as long as the shortest one of a call the longest may be; 0 if all are alone.
    """
    decodes = [row for row, num_new in enumerate(query_lens) if num_new == 1]
    found = [[row] for row, num_new in enumerate(query_lens) if num_new != 1]
    if not max_padding:
        return found + [[row] for row in decodes]
    limit = 0.0
    for row in sorted(decodes, key=lambda row: seq_lens[row]):
        if seq_lens[row] > limit:
            found.append([])
            limit = max(_SHORT, max_padding * seq_lens[row])
        found[-1].append(row)
    return found
