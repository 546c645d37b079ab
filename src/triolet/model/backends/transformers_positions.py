"""Checks that a model of transformers computes the same at every position, and as many rows as a step may hold.

What a model computes may change at a position that its config names: a window closes, a scale begins to grow, other
rotary frequencies are used. Nothing of that is seen in the first tokens of a sequence, and to compute all tokens up to
such a place would take minutes. So a sequence's past is invented: random keys and values stand for the earlier tokens,
the same ones in the model's own cache and in ours, and only a few tokens on both sides of the threshold are computed.

* `compare_attention_arguments`: without any past. Attention returns zeros, so that all layers compute the same hidden
  states bit by bit, and the arguments that reach each attention function are compared: after as many tokens by the
  model's own count, and at explicit positions as a step gives them. That is sharp in every dtype.
* `compare_over_prefixes`: with the past. The model's own eager attention computes each span alone; ours computes all of
  them in one batch, a chunk and then a decode step. The first earlier tokens, which a window hides first, weigh so much
  that one of them more or less is seen.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from triolet.errors import UnsupportedModel
from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.model.backends.position_thresholds import SPAN_TOKENS, TOKENS_BEFORE, PositionSpan
from triolet.model.backends.transformers_attention import (
    INSPECTED_ATTENTION,
    PAGED_ATTENTION,
    Inspection,
    TransformersAttentionCall,
)
from triolet.model.interface import CausalModel, ForwardBatch, LayerCache, LayerCacheSpec, ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BLOCK_SIZE: Final = 16
_PARTS: Final = (slice(0, SPAN_TOKENS - 1), slice(SPAN_TOKENS - 1, SPAN_TOKENS))  # a chunk, and a decode step
_NUM_MORE: Final = (
    1009  # tokens that a model is told of and that are not there; no multiple of any usual threshold
)
_NUM_FILLERS: Final = 3  # blocks that all prefixes repeat between their first block and their last
_MAX_WEIGHT: Final = 4096  # of the first tokens' values, so that float16 holds them

# Mean difference of what attention is called with, in units of its standard deviation. Both are computed with the same
# shapes, and came out equal bit by bit; a temperature that grows by 7 % comes to 0.04.
_ARGUMENT_TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 1e-2}


def mean_difference(got: Tensor, wanted: Tensor) -> float:
    """Return the mean difference of two tensors, in units of the second one's standard deviation."""
    got, wanted = got.float(), wanted.float()
    return float((got - wanted).abs().mean() / wanted.std().clamp_min(torch.finfo(torch.float32).tiny))


class _PastLayer(DynamicLayer):
    """One layer's cache in transformers' terms, in which earlier tokens stand already.

    The earlier tokens are random, of the shape that the layer's own come with first: what a model keeps in its cache
    may be something else than the keys and values that attention gets, such as a latent vector.

    Args:
        num_tokens: earlier tokens, as the model counts them.
        prefix: slots of `weights` in the order in which they stand before the new tokens; they are the last of the
            earlier tokens.
        weights: [num_slots], what the values of each slot are multiplied with.
    """

    def __init__(self, num_tokens: int, prefix: Sequence[int] = (), weights: Tensor | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_tokens, self.prefix, self.weights = num_tokens, prefix, weights
        self.slots: tuple[Tensor, Tensor] | None = None  # each [1, num_kv_heads, num_slots, width]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self.weights is None:
            return key_states, value_states
        if self.slots is None:
            # Latent vectors have no values apart from keys, and so nothing is weighed.
            weights = (
                self.weights if key_states.shape == value_states.shape else torch.ones_like(self.weights)
            )
            self.slots = (_like(key_states, torch.ones_like(weights)), _like(value_states, weights))
        index = torch.tensor(self.prefix, dtype=torch.int64, device=key_states.device)
        keys, values = (
            torch.cat((slots[..., index, :], new), dim=-2)
            for slots, new in zip(self.slots, (key_states, value_states), strict=True)
        )
        return keys, values

    def get_seq_length(self) -> int:
        return self.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return len(self.prefix) + query_length, self.num_tokens - len(self.prefix)


def _like(states: Tensor, weights: Tensor) -> Tensor:
    """Draw random states of the usual size for every slot, [1, num_kv_heads, num_slots, width]."""
    generator = torch.Generator().manual_seed(0)
    shape = (*states.shape[:-2], len(weights), states.shape[-1])
    drawn = torch.randn(shape, generator=generator) * weights[:, None] * states.float().std().cpu()
    return drawn.to(states.device, states.dtype)


@attrs.frozen
class _Layout:
    """Block tables of several sequences whose prefixes share most of their blocks.

    Args:
        tables: each sequence's; the first and the last blocks are its own.
        num_blocks: in all.
        weights: a sequence's first block, and what the values of its first tokens are multiplied with. A window
            hides these, one by one, and among thousands of equal ones they would not be missed.
    """

    tables: tuple[tuple[int, ...], ...]
    num_blocks: int
    weights: Mapping[int, int]

    @classmethod
    def of(cls, spans: Sequence[PositionSpan]) -> _Layout:
        tables, weights, num_blocks = list[tuple[int, ...]](), dict[int, int](), _NUM_FILLERS
        for span in spans:
            num_own = -(-(span.num_prefix + SPAN_TOKENS) // _BLOCK_SIZE) - span.num_prefix // _BLOCK_SIZE
            num_shared = max(0, span.num_prefix // _BLOCK_SIZE - 1)
            has_first = (
                span.num_prefix >= _BLOCK_SIZE
            )  # else the first block is where its tokens are written, too
            own = range(num_blocks, num_blocks + has_first + num_own)
            shared = [index % _NUM_FILLERS for index in range(num_shared)]
            tables.append((*own[:has_first], *shared, *own[has_first:]))
            weights[own[0]] = min(max(1, span.num_prefix), _MAX_WEIGHT)
            num_blocks = own.stop
        return cls(tuple(tables), num_blocks, weights)

    def prefix(self, row: int, num_tokens: int) -> list[int]:
        """Return the slots of a sequence's first tokens."""
        return [
            self.tables[row][place // _BLOCK_SIZE] * _BLOCK_SIZE + place % _BLOCK_SIZE
            for place in range(num_tokens)
        ]

    def slot_weights(self) -> Tensor:
        """Return what the values of each slot are multiplied with, [num_slots]."""
        weights = torch.ones(self.num_blocks, _BLOCK_SIZE)
        for block, weight in self.weights.items():
            weights[block, : SPAN_TOKENS - TOKENS_BEFORE] = weight
        return weights.flatten()

    def batch(
        self, spans: Sequence[PositionSpan], tokens: Tensor, part: slice, cache: tuple[LayerCache, ...]
    ) -> ForwardBatch:
        """Return the step that computes the same part of every span."""
        device = tokens.device
        offsets = range(SPAN_TOKENS)[part]
        places = [
            (table, span.num_prefix + offset)
            for span, table in zip(spans, self.tables, strict=True)
            for offset in offsets
        ]
        slots = [table[place // _BLOCK_SIZE] * _BLOCK_SIZE + place % _BLOCK_SIZE for table, place in places]
        longest = max(map(len, self.tables))
        seq_lens = tuple(span.num_prefix + offsets.stop for span in spans)

        def ints(values: object, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return ForwardBatch(
            token_ids=tokens[:, part].flatten(),
            positions=ints([span.start + offset for span in spans for offset in offsets], torch.int64),
            cache=cache,
            attention=AttentionMetadata(
                cu_query_lens=ints([len(offsets) * row for row in range(len(spans) + 1)]),
                seq_lens=ints(seq_lens),
                block_tables=ints([(*table, *[-1] * (longest - len(table))) for table in self.tables]),
                slot_mapping=ints(slots, torch.int64),
                query_lens_host=(len(offsets),) * len(spans),
                seq_lens_host=seq_lens,
            ),
            logits_indices=torch.arange(len(places), device=device),
        )


def compare_attention_arguments(
    model: PreTrainedModel, vocab_size: int, spans: Sequence[PositionSpan]
) -> None:
    """Compare what reaches the attention functions with and without explicit positions; leaves them inspected.

    Args:
        model: with its weights, in evaluation mode.
        vocab_size: of the tokens to draw.
        spans: positions to compute.

    Raises:
        UnsupportedModel: an argument depends on the position in a way that a paged step does not provide.
    """
    allowed = _ARGUMENT_TOLERANCE[model.dtype]
    model.set_attn_implementation(INSPECTED_ATTENTION)
    for span, tokens in zip(spans, _tokens(model, vocab_size, len(spans)), strict=True):
        own, ours = Inspection(), Inspection()
        past = [_PastLayer(span.start) for _ in range(_num_layers(model))]
        wanted = _after(past, model, tokens, inspection=own)
        positions = torch.arange(span.start, span.end, device=model.device)[None]
        with torch.inference_mode():
            got: Tensor = model(
                input_ids=tokens[None], position_ids=positions, use_cache=False, inspection=ours
            ).logits[0]
        for module, call in own.calls.items():
            problem = _changed_argument(call, ours.calls[module], allowed)
            if problem is not None:
                raise UnsupportedModel(
                    f"{type(module).__name__} of {type(model).__name__} does not take its positions from "
                    f"position_ids, which paged attention needs: {problem} at {span}"
                )
        if not mean_difference(got, wanted) <= allowed:
            raise UnsupportedModel(
                f"{type(model).__name__} computes other logits at explicit positions than by itself at {span}"
            )


def _changed_argument(
    wanted: TransformersAttentionCall, got: TransformersAttentionCall, allowed: float
) -> str | None:
    for name in ("query", "key", "value"):
        by = mean_difference(getattr(got, name), getattr(wanted, name))
        if not by <= allowed:  # and not `>`: NaN must not pass
            return f"its {name} differs by {by:.2g} standard deviations in the mean"
    for name in ("scaling", "sliding_window", "softcap"):
        option, other = wanted.options.get(name), got.options.get(name)
        if option is not other and not bool(torch.all(torch.as_tensor(option == other))):
            return f"its {name} is {other} instead of {option}"
    return None


def compare_over_prefixes(
    model: PreTrainedModel, paged: CausalModel, spans: Sequence[PositionSpan], allowed: float
) -> None:
    """Compare what spans with a past compute, alone in the model's own attention and together in ours.

    Args:
        model: with its weights, in evaluation mode; leaves it on paged attention.
        paged: the same model behind our interface.
        spans: positions to compute.
        allowed: mean difference that rounding explains, in standard deviations.

    Raises:
        UnsupportedModel: a layer's output or the logits of a span differ by more.
    """
    layout = _Layout.of(spans)
    weights = layout.slot_weights()
    # The first pass makes keys and values of all slots, wherever; there may be more slots than positions.
    past = [_PastLayer(spans[-1].start, range(len(weights)), weights) for _ in range(_num_layers(model))]
    tokens = _tokens(model, paged.spec.vocab_size, len(spans))
    model.set_attn_implementation(INSPECTED_ATTENTION)
    inspection = Inspection()
    _after(past, model, tokens[0], inspection=inspection)
    cache = _paged_past(inspection, paged.spec, len(weights))
    modules = tuple(inspection.calls)
    model.set_attn_implementation("eager")
    wanted = []
    for row, span in enumerate(spans):
        for layer in past:
            layer.num_tokens, layer.prefix = span.start, layout.prefix(row, span.num_prefix)
        with _outputs_of(modules) as outputs:
            logits = _after(past, model, tokens[row])
        wanted.append([*(output.reshape(SPAN_TOKENS, -1) for output in outputs), logits])
    model.set_attn_implementation(PAGED_ATTENTION)
    parts = []
    for part in _PARTS:
        with _outputs_of(modules) as outputs:
            logits = paged.forward_logits(layout.batch(spans, tokens, part, cache))
        parts.append(
            [output.reshape(len(spans), part.stop - part.start, -1) for output in (*outputs, logits)]
        )
    got = [torch.cat(both, dim=1) for both in zip(*parts, strict=True)]
    names = [f"the output of {type(module).__name__}" for module in modules] + ["the array of logits"]
    for row, span in enumerate(spans):
        for name, ours, theirs in zip(names, got, wanted[row], strict=True):
            by = mean_difference(ours[row], theirs)
            if not by <= allowed:  # and not `>`: NaN must not pass
                raise UnsupportedModel(
                    f"{type(model).__name__} computes other values over the paged cache than by itself at {span}: "
                    f"{name} differs by {by:.2g} standard deviations in the mean, and rounding explains at most "
                    f"{allowed:g}"
                )


def compare_gathered_over_prefixes(
    model: PreTrainedModel, paged: CausalModel, spans: Sequence[PositionSpan], allowed: float
) -> None:
    """Compare what spans with a past compute, alone and over gathered blocks together.

    Args:
        model: with its weights and its own attention, in evaluation mode.
        paged: the same model behind our interface.
        spans: positions to compute.
        allowed: mean difference that rounding explains, in standard deviations.

    Raises:
        UnsupportedModel: the logits of a span differ by more.
    """
    layout = _Layout.of(spans)
    tokens = _tokens(model, paged.spec.vocab_size, len(spans))
    past = _whole_past(layout, model, tokens[0])
    states = [layer.slots for layer in past if layer.slots is not None]
    cache = tuple(
        LayerCache(keys=_in_blocks(keys, layer, paged.spec), values=_in_blocks(values, layer, paged.spec))
        for (keys, values), layer in zip(states, paged.spec.cache_layers, strict=True)
    )
    wanted = []
    for row, span in enumerate(spans):
        for layer in past:
            layer.num_tokens, layer.prefix = span.start, layout.prefix(row, span.num_prefix)
        wanted.append(_after(past, model, tokens[row]))
    parts = [paged.forward_logits(layout.batch(spans, tokens, part, cache)) for part in _PARTS]
    got = torch.cat([part.reshape(len(spans), -1, part.shape[-1]) for part in parts], dim=1)
    for row, span in enumerate(spans):
        by = mean_difference(got[row], wanted[row])
        if not by <= allowed:  # and not `>`: NaN must not pass
            raise UnsupportedModel(
                f"{type(model).__name__} computes other logits over the paged cache than by itself at {span}: they "
                f"differ by {by:.2g} standard deviations in the mean, and rounding explains at most {allowed:g}"
            )


def takes_positions_as_given(model: PreTrainedModel, vocab_size: int, spans: Sequence[PositionSpan]) -> bool:
    """Return whether a model computes the same bits however many tokens it counts in its cache.

    What it computes may then depend on explicit positions and on distances only, and padding before a sequence changes
    nothing. That is sharp in every dtype, because both are computed with the same shapes.

    Args:
        model: with its weights and its own attention, in evaluation mode.
        vocab_size: of the tokens to draw.
        spans: positions to compute.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    layout = _Layout.of(spans)
    tokens = _tokens(model, vocab_size, len(spans))
    past = _whole_past(layout, model, tokens[0])
    for row, span in enumerate(spans):
        positions = torch.arange(span.start, span.end, device=model.device)[None]
        found = []
        for num_more in (0, _NUM_MORE):
            for layer in past:
                layer.num_tokens, layer.prefix = span.start + num_more, layout.prefix(row, span.num_prefix)
            mask = torch.ones(1, span.end + num_more, dtype=torch.int64, device=model.device)
            found.append(_after(past, model, tokens[row], position_ids=positions, attention_mask=mask))
        if not torch.equal(*found):
            return False
    return True


def _whole_past(layout: _Layout, model: PreTrainedModel, tokens: Tensor) -> list[_PastLayer]:
    """Return layers that have keys and values in all slots."""
    past = [_PastLayer(0, (), layout.slot_weights()) for _ in range(_num_layers(model))]
    _after(past, model, tokens)  # the first pass draws them
    return past


@contextmanager
def _outputs_of(modules: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect the output of each module's next call, in the order of the calls."""
    outputs: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, output: Any) -> None:
        outputs.append(output if isinstance(output, Tensor) else output[0])

    hooks = [module.register_forward_hook(keep) for module in modules]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _paged_past(inspection: Inspection, spec: ModelSpec, num_slots: int) -> tuple[LayerCache, ...]:
    """Put what the model has made of its invented past into a paged cache."""
    return tuple(
        LayerCache(
            keys=_in_blocks(call.key[..., :num_slots, :], layer, spec),
            values=_in_blocks(call.value[..., :num_slots, :], layer, spec),
        )
        for call, layer in zip(inspection.calls.values(), spec.cache_layers, strict=True)
    )


def _in_blocks(states: Tensor, layer: LayerCacheSpec, spec: ModelSpec) -> Tensor:
    """Put the states of all slots, [1, num_kv_heads, num_slots, width], into blocks."""
    slots = states.new_zeros((states.shape[2], layer.num_kv_heads, layer.head_dim), dtype=spec.dtype)
    slots[..., : states.shape[-1]] = states[0].transpose(0, 1)
    return slots.view(-1, _BLOCK_SIZE, layer.num_kv_heads, layer.head_dim)


def _after(past: Sequence[_PastLayer], model: PreTrainedModel, tokens: Tensor, **options: Any) -> Tensor:
    """Compute tokens after a past, as the model by itself does: [num_tokens] -> [num_tokens, vocab_size]."""
    cache = Cache(layers=list(past))
    with torch.inference_mode():
        output = model(input_ids=tokens[None], past_key_values=cache, use_cache=True, **options)
    logits: Tensor = output.logits[0]
    return logits


def _num_layers(model: PreTrainedModel) -> int:
    num_layers: int = model.config.get_text_config().num_hidden_layers
    return num_layers


def _tokens(model: PreTrainedModel, vocab_size: int, num_spans: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (num_spans, SPAN_TOKENS), generator=generator).to(model.device)
