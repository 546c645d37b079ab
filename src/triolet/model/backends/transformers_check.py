"""Checks that a model of transformers computes correctly on the paged cache, before it serves.

Hundreds of architectures come this way, too many to review, so nothing is taken on trust. First
every attention layer is asked what it would compute (`inspect_layers`): what paged attention lacks, such as
sinks, biases, chunks, and prefixes that see each other, is refused by name. Then a few random tokens are
computed twice (`compare_with_own_attention`): by the model's own eager attention in one piece, and by ours
in two chunks, in one row with another sequence. That finds what no inspection sees: layers that carry a
state from token to token, and positions that are counted instead of taken from `position_ids`. At last the same is
asked around every threshold of the config (`check_positions`), with random keys and values for the earlier tokens.

A model that attends by itself over gathered blocks is asked what it keeps (`cache_layers`), and then measured in the
same way: chunks, decode steps and the positions around each threshold (`compare_gathered`), alone and with padding
(`takes_padding`).

The cost is four passes over at most seven tokens, and four more over eight tokens for each threshold. Most of them take
about as long as one decode step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from triolet.errors import TrioletError, UnsupportedModel
from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.model.backends.own_attention import OwnAttentionModel, cache_layers_of
from triolet.model.backends.position_thresholds import (
    MAX_PREFIX,
    SPAN_TOKENS,
    PositionSpan,
    position_thresholds,
    spans_of,
    uncovered,
)
from triolet.model.backends.transformers_attention import (
    INSPECTED_ATTENTION,
    PAGED_ATTENTION,
    Inspection,
    TransformersAttentionCall,
    refuse_unsupported_call,
)
from triolet.model.backends.transformers_positions import (
    compare_attention_arguments,
    compare_gathered_over_prefixes,
    compare_over_prefixes,
    mean_difference,
    takes_positions_as_given,
)
from triolet.model.interface import CausalModel, ForwardBatch, LayerCache, LayerCacheSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NUM_TOKENS: Final = 7  # of the sequence that is compared
_FIRST_CHUNK: Final = 4
_NUM_OTHER: Final = 3  # tokens of its neighbour, which stand before it in the first step's row
_BLOCK_SIZE: Final = 2  # so small that a sequence takes several blocks
_BLOCK_TABLES: Final = ((1, 3), (6, 0, 4, 2))  # the neighbour's, and the compared sequence's

# Mean difference of the logits, in units of their standard deviation. Rounding came to 1e-6, 4e-3 and 3e-2 in random
# models of 24 layers; a scale left out to 0.15, positions that are counted to 0.18. float32 leaves room for TF32.
_TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 0.12}


def inspect_layers(
    model: PreTrainedModel, max_position: int
) -> Mapping[nn.Module, TransformersAttentionCall]:
    """Run two tokens through the model and collect what each attention layer asks for.

    Args:
        model: with its weights, in evaluation mode.
        max_position: longest sequence, tokens.

    Returns:
        The attention modules in the order in which they attend, with their calls.

    Raises:
        UnsupportedModel: a layer asks for what paged attention does not offer, or none uses the interface.
    """
    inspection = Inspection()
    model.set_attn_implementation(INSPECTED_ATTENTION)
    tokens = torch.arange(2, device=model.device)
    _own_logits(model, tokens, position_ids=tokens[None], inspection=inspection)
    if not inspection.calls:
        raise UnsupportedModel(
            f"{type(model).__name__} has no layer that uses transformers' attention interface"
        )
    for module, call in inspection.calls.items():
        refuse_unsupported_call(module, call, len(tokens), max_position)
    return inspection.calls


def compare_with_own_attention(model: PreTrainedModel, paged: CausalModel) -> float:
    """Compute a few random tokens with the model's eager attention and with ours; leaves the model on ours.

    Args:
        model: with its weights, in evaluation mode.
        paged: the same model behind our interface.

    Returns:
        The mean difference of the logits, in units of their standard deviation.

    Raises:
        UnsupportedModel: the two differ by more than the dtype's rounding explains.
    """
    neighbour, sequence = _two_sequences(model, paged)
    model.set_attn_implementation("eager")
    own = _own_logits(model, sequence)
    model.set_attn_implementation(PAGED_ATTENTION)
    with _failures_as_unsupported(model):
        got = _paged_logits(paged, neighbour, sequence)
    difference = mean_difference(got, own)
    _refuse_difference(model, difference, _TOLERANCE[paged.spec.dtype])
    return difference


def _refuse_difference(model: PreTrainedModel, difference: float, allowed: float) -> None:
    if not difference <= allowed:  # and not `>`: NaN must not pass
        raise UnsupportedModel(
            f"{type(model).__name__} computes other logits over the paged cache than by itself: they differ "
            f"by {difference:.2g} standard deviations in the mean, and rounding explains at most {allowed:g}"
        )


def cache_layers(model: PreTrainedModel) -> Mapping[int, LayerCacheSpec]:
    """Return what each layer of a model with its own attention keeps, by the layer's index.

    Raises:
        UnsupportedModel: the model keeps something else than keys and values of every token.
    """
    with _failures_as_unsupported(model):
        return cache_layers_of(model)


def compare_gathered(model: PreTrainedModel, paged: OwnAttentionModel) -> None:
    """Compute random tokens with the model alone and over gathered blocks: first tokens, and those around thresholds.

    Args:
        model: with its weights and its own attention, in evaluation mode.
        paged: the same model behind our interface.

    Raises:
        UnsupportedModel: the two differ by more than the dtype's rounding explains.
    """
    neighbour, sequence = _two_sequences(model, paged)
    own = torch.cat((_own_logits(model, neighbour), _own_logits(model, sequence)))
    with _failures_as_unsupported(model):
        step = _stepper(paged, model.device)
        # chunks, decode steps of both at once, and a chunk after a decode step
        first = step(torch.cat((neighbour[:2], sequence[:4])), (0, 0, 2), (1, 0, 4))
        both = step(torch.cat((neighbour[2:], sequence[4:5])), (0, 2, 3), (1, 4, 5))
        last = step(sequence[5:], (1, 5, 7))
        got = torch.cat((first[:2], both[:1], first[2:], both[1:], last))
        _refuse_difference(model, mean_difference(got, own), _TOLERANCE[paged.spec.dtype])
        spans, _ = _whole_spans(model, paged)
        compare_gathered_over_prefixes(model, paged, spans, _TOLERANCE[paged.spec.dtype])


def takes_padding(model: PreTrainedModel, paged: OwnAttentionModel) -> bool:
    """Return whether decode steps of sequences of unlike length come out right in one call, at every threshold.

    Args:
        model: with its weights and its own attention, in evaluation mode.
        paged: the same model behind our interface; it is left with as much padding as possible.
    """
    spans, are_all = _whole_spans(model, paged)
    # A longer sequence pads the others, by a number of tokens that is no multiple of any threshold.
    start = min(2 * spans[-1].start + 5, paged.spec.max_position - SPAN_TOKENS, MAX_PREFIX)
    paged.max_padding = math.inf
    try:
        with _failures_as_unsupported(model):
            if not are_all or not takes_positions_as_given(model, paged.spec.vocab_size, spans):
                return False
            longer = PositionSpan(start, start)
            compare_gathered_over_prefixes(model, paged, (*spans, longer), _TOLERANCE[paged.spec.dtype])
    except UnsupportedModel:
        return False
    return True


def _whole_spans(model: PreTrainedModel, paged: CausalModel) -> tuple[list[PositionSpan], bool]:
    """Return the spans whose earlier tokens are all there, and whether those are all that cross a threshold."""
    # A model that counts what is in its cache would take a sequence without its beginning for a shorter one.
    max_position = paged.spec.max_position
    thresholds = position_thresholds(model.config.get_text_config().to_dict(), max_position)
    spans = spans_of([threshold for threshold in thresholds if threshold.tokens < max_position], max_position)
    whole = [span for span in spans if span.num_prefix == span.start]
    return whole, all(span in whole or not span.thresholds for span in spans)


def _two_sequences(model: PreTrainedModel, paged: CausalModel) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(paged.spec.vocab_size, (_NUM_OTHER + _NUM_TOKENS,), generator=generator)
    neighbour, sequence = tokens.to(model.device).split([_NUM_OTHER, _NUM_TOKENS])
    return neighbour, sequence


def check_positions(
    model: PreTrainedModel, paged: CausalModel, calls: Mapping[nn.Module, TransformersAttentionCall]
) -> None:
    """Compare the model with itself beyond every threshold of its config; leaves the model on our attention.

    Args:
        model: with its weights, in evaluation mode.
        paged: the same model behind our interface.
        calls: each attention layer's call, from `inspect_layers`.

    Raises:
        UnsupportedModel: something changes at a position that paged attention does not follow, or may change at one
            that cannot be computed; the config's field is named.
    """
    max_position = paged.spec.max_position
    thresholds = position_thresholds(model.config.get_text_config().to_dict(), max_position)
    spans = spans_of(thresholds, max_position)
    windows = frozenset(call.sliding_window for call in calls.values() if call.sliding_window)
    if beyond := uncovered(spans, windows):
        raise UnsupportedModel(
            f"{type(model).__name__} may change at {', '.join(map(str, beyond))}, which cannot be checked: it would "
            f"take more than {MAX_PREFIX} tokens"
        )
    with _failures_as_unsupported(model):
        compare_attention_arguments(model, paged.spec.vocab_size, spans)
        compare_over_prefixes(model, paged, spans, _TOLERANCE[paged.spec.dtype])


def _own_logits(model: PreTrainedModel, tokens: Tensor, **options: Any) -> Tensor:
    # one sequence from its start, [num_tokens] -> [num_tokens, vocab_size]
    with _failures_as_unsupported(model), torch.inference_mode():
        logits: Tensor = model(input_ids=tokens[None], use_cache=False, **options).logits[0]
    return logits


def _paged_logits(paged: CausalModel, neighbour: Tensor, sequence: Tensor) -> Tensor:
    """Compute the sequence's logits in two steps over a paged cache, the first with a neighbour before it."""
    step = _stepper(paged, sequence.device)
    beginning = torch.cat((neighbour, sequence[:_FIRST_CHUNK]))
    logits = step(beginning, (0, 0, _NUM_OTHER), (1, 0, _FIRST_CHUNK))[_NUM_OTHER:]
    return torch.cat((logits, step(sequence[_FIRST_CHUNK:], (1, _FIRST_CHUNK, _NUM_TOKENS))))


def _stepper(paged: CausalModel, device: torch.device) -> Callable[..., Tensor]:
    """Return a function that computes steps over a small paged cache: tokens and chunks in, all logits out."""
    spec = paged.spec
    num_blocks = sum(map(len, _BLOCK_TABLES)) + 1

    def room(layer: LayerCacheSpec) -> Tensor:
        shape = (num_blocks, _BLOCK_SIZE, layer.num_kv_heads, layer.head_dim)
        return torch.zeros(shape, dtype=spec.dtype, device=device)

    cache = tuple(LayerCache(keys=room(layer), values=room(layer)) for layer in spec.cache_layers)

    def step(tokens: Tensor, *chunks: tuple[int, int, int]) -> Tensor:
        positions, metadata = _metadata(chunks, device)
        batch = ForwardBatch(
            token_ids=tokens,
            positions=positions,
            cache=cache,
            attention=metadata,
            logits_indices=torch.arange(len(tokens), device=device),
        )
        return paged.forward_logits(batch)

    return step


def _metadata(
    chunks: tuple[tuple[int, int, int], ...], device: torch.device
) -> tuple[Tensor, AttentionMetadata]:
    # positions and metadata of a step; a chunk is (row of `_BLOCK_TABLES`, first position, end)
    lengths = [end - start for _, start, end in chunks]
    places = [(row, position) for row, start, end in chunks for position in range(start, end)]
    slots = [_BLOCK_TABLES[row][p // _BLOCK_SIZE] * _BLOCK_SIZE + p % _BLOCK_SIZE for row, p in places]
    longest = max(len(_BLOCK_TABLES[row]) for row, _, _ in chunks)
    tables = [(*_BLOCK_TABLES[row], *[-1] * (longest - len(_BLOCK_TABLES[row]))) for row, _, _ in chunks]

    def ints(values: object, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return ints([position for _, position in places], torch.int64), AttentionMetadata(
        cu_query_lens=nn.functional.pad(ints(lengths).cumsum(0, dtype=torch.int32), (1, 0)),
        seq_lens=ints([end for _, _, end in chunks]),
        block_tables=ints(tables),
        slot_mapping=ints(slots, torch.int64),
        query_lens_host=tuple(lengths),
        seq_lens_host=tuple(end for _, _, end in chunks),
    )


@contextmanager
def _failures_as_unsupported(model: PreTrainedModel) -> Iterator[None]:
    """Turn any error of the modelling code into one that says that it cannot run over a paged cache."""
    try:
        yield
    except (TrioletError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be run over a paged cache: {type(error).__name__}: {error}"
        ) from error
