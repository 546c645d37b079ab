"""Soft prompts in a step: embeddings, or keys and values, of virtual tokens in the place of those of placeholders.

The first tokens of such a prompt are placeholders, so that positions, blocks and the prefix cache treat virtual tokens
like others. Where a soft prompt has embeddings, the step computes with those instead of the placeholders'. Where it has
keys and values, they are written into the row's blocks before the step, and what the step computes for the placeholders
is not written. Weights are read when a row first needs them: they are small, and kept by digest.

Source: prompt tuning, arXiv 2104.08691; P-tuning, arXiv 2103.10385; prefix tuning, arXiv 2101.00190.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch
from torch import Tensor

from triolet.core.request.prompt_adapter import SoftPrompt, SoftPromptSupport
from triolet.core.step_plan import RowFailure, RowResult
from triolet.errors import AdapterError
from triolet.model.adapters import stored_tensor
from triolet.model.folder.soft_prompt_files import read_soft_prompt
from triolet.model.input_batch import SoftPromptShare
from triolet.model.interface import ForwardBatch, InputEmbeddings, ModelSpec

MAX_KEPT = 64  # soft prompts; one of 100 tokens of a large model takes 1 to 100 MB


def soft_prompt_support(spec: ModelSpec) -> SoftPromptSupport | None:
    """Return the shapes that soft prompts must fit; None for a model that takes none."""
    # The others embed their tokens themselves; and a state cannot be set from keys and values.
    if spec.backend != "native" or spec.is_recurrent or not spec.takes_embeddings:
        return None
    return SoftPromptSupport(
        spec.hidden_size, tuple((layer.num_kv_heads, layer.head_dim) for layer in spec.cache_layers)
    )


def with_failures(rows: tuple[RowResult, ...], failures: Sequence[RowFailure]) -> tuple[RowResult, ...]:
    """Put failures in the place of the results of the same rows."""
    failed = {failure.epoch for failure in failures}
    return (*[row for row in rows if row.epoch not in failed], *failures) if failed else rows


@attrs.frozen(eq=False)
class _Weights:
    embeddings: Tensor | None  # [num_virtual_tokens, hidden_size]
    layers: tuple[
        tuple[Tensor, Tensor], ...
    ]  # keys and values, [num_virtual_tokens, num_kv_heads, head_dim] each


def _write(to: Tensor, slots: Tensor, numbers: Tensor) -> None:
    """Write keys or values of tokens into a layer's cache; slots below 0 are of blocks that a window has passed."""
    is_kept = slots >= 0
    to.flatten(0, 1)[slots[is_kept]] = numbers[is_kept]


class SoftPromptBank:
    """Soft prompts of one model.

    Args:
        spec: the model.
        device: of the model.
    """

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._support, self._dtype, self._device = soft_prompt_support(spec), spec.dtype, device
        self._embedding_scale = spec.given_embedding_scale
        self._failures: list[RowFailure] = []  # of the step that is being computed
        self._kept: OrderedDict[str, _Weights] = OrderedDict()  # by digest, the latest last

    def applied(self, shares: tuple[SoftPromptShare, ...], batch: ForwardBatch) -> ForwardBatch:
        """Return a step's batch with the soft prompts of its rows."""
        self._failures = []
        tokens: list[Tensor] = []
        values: list[Tensor] = []
        groups = (batch.attention, *batch.further_attention)
        slots = [group.slot_mapping.clone() for group in groups]
        for share in shares:
            try:
                weights = self._weights(share.soft_prompt)
            except AdapterError as error:
                problem = f"prompt adapter {share.soft_prompt.name!r} could not be loaded: {error}"
                self._failures.append(RowFailure(share.row.request_id, share.row.epoch, problem))
                continue
            place, part = (
                slice(share.first, share.first + share.num_tokens),
                slice(share.start, share.start + share.num_tokens),
            )
            if weights.embeddings is not None:
                tokens.append(torch.arange(place.start, place.stop, device=self._device))
                values.append(weights.embeddings[part])
                continue
            for (keys, layer_values), cache in zip(weights.layers, batch.cache, strict=True):
                _write(cache.keys, slots[cache.group][place], keys[part])
                _write(cache.values, slots[cache.group][place], layer_values[part])
            for of_group in slots:
                of_group[place] = -1
        first, *further = (
            attrs.evolve(group, slot_mapping=of_group) for group, of_group in zip(groups, slots, strict=True)
        )
        return attrs.evolve(
            batch,
            attention=first,
            further_attention=tuple(further),
            embeddings=InputEmbeddings(torch.cat(tokens), torch.cat(values)) if tokens else None,
        )

    def with_failures(self, rows: tuple[RowResult, ...]) -> tuple[RowResult, ...]:
        """Fail the rows of the step whose soft prompt could not be read."""
        return with_failures(rows, self._failures)

    def _weights(self, soft_prompt: SoftPrompt) -> _Weights:
        digest = soft_prompt.digest
        if digest not in self._kept:
            assert self._support is not None, "a soft prompt is not admitted where the model takes none"
            files = read_soft_prompt(Path(soft_prompt.path), self._support)
            if files.digest != digest:
                raise AdapterError(soft_prompt.path, "has changed since it was loaded", "prompt_adapter")
            numbers = stored_tensor(files.data, files.tensor).to(self._device, self._dtype)
            self._kept[digest] = (
                self._layered(numbers) if files.is_prefix else _Weights(numbers * self._embedding_scale, ())
            )
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(digest)
        return self._kept[digest]

    def _layered(self, numbers: Tensor) -> _Weights:
        # Of each token: keys of the first layer, its values, keys of the second layer, and so on.
        assert self._support is not None
        shapes = self._support.kv_shapes
        parts = numbers.split([heads * size for heads, size in shapes for _ in range(2)], dim=1)
        layers = [
            (keys.unflatten(1, shape), values.unflatten(1, shape))
            for keys, values, shape in zip(parts[::2], parts[1::2], shapes, strict=True)
        ]
        return _Weights(None, tuple(layers))
