"""The attention that transformers' modelling code calls instead of its own: over our paged cache.

Transformers looks an attention function up by the name in the model's config and hands it whatever keyword
arguments the model was called with. Two names are registered:

* `PAGED_ATTENTION` is used while serving. It writes the step's keys and values and attends over the block
  tables. What it needs travels as the keyword argument `paged_step`: nothing global changes, and several
  models in one process do not see each other. It has no mask function, and so transformers builds no masks.
* `INSPECTED_ATTENTION` is used once, after loading. It computes nothing; it collects what each layer asks
  for, and it comes with a mask function, so that the rule of the mask that the model wants for the layer
  arrives too.

The contract of both: [1, heads, num_tokens, head_dim] in, ([1, num_tokens, heads, head_dim], None) out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import torch
from torch import Tensor, nn

from triolet.errors import UnsupportedModel
from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.kernels.kv_write import kv_write
from triolet.kernels.paged_attention import paged_attention
from triolet.model.interface import LayerCache, LayerCacheSpec

PAGED_ATTENTION: Final = "triolet_paged"
INSPECTED_ATTENTION: Final = "triolet_inspected"

# What models pass along without it changing the result of a causal attention at inference.
HARMLESS_OPTIONS: Final = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "deterministic",
        "dropout",
        "head_mask",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "output_hidden_states",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


@attrs.frozen(eq=False)
class PagedStep:
    """One step's cache and block tables, on their way through the model's keyword arguments."""

    cache: tuple[LayerCache, ...]  # one entry per attention layer
    metadata: AttentionMetadata  # where each sequence's chunk and blocks are
    layer_of: Mapping[nn.Module, int]  # each attention module's index in `cache`


@attrs.frozen(eq=False)
class MaskRule:
    """Stands in for a mask: `allows(batch, head, query_position, key_position)`, elementwise over tensors."""

    allows: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@attrs.frozen(eq=False)
class TransformersAttentionCall:
    """Arguments of one layer's call of its attention function."""

    query: Tensor  # [1, num_heads, num_tokens, head_dim]
    key: Tensor  # [1, num_kv_heads, num_tokens, head_dim]
    value: Tensor  # [1, num_kv_heads, num_tokens, value_dim]
    mask: object  # the mask it was given; a `MaskRule` if it came from transformers' own mask functions
    options: Mapping[str, Any]  # every other keyword argument

    @property
    def sliding_window(self) -> int | None:
        """Tokens that a query sees, itself included; None for all before it."""
        return self.options.get("sliding_window") or None

    def cache_spec(self) -> LayerCacheSpec:
        """Return the cache layout of the layer."""
        # Keys and values share one width in the cache: the wider of the two.
        return LayerCacheSpec(
            num_kv_heads=self.key.shape[1], head_dim=max(self.key.shape[-1], self.value.shape[-1])
        )


@attrs.define(eq=False)
class Inspection:
    """Collects each attention module's call during one forward pass."""

    calls: dict[nn.Module, TransformersAttentionCall] = attrs.field(factory=dict)

    def record(self, module: nn.Module, call: TransformersAttentionCall) -> None:
        """Keep one layer's call.

        Raises:
            UnsupportedModel: the layer attends twice in one pass, which needs two caches.
        """
        if module in self.calls:
            raise UnsupportedModel(f"{type(module).__name__} attends more than once per forward pass")
        self.calls[module] = call


def register_attention() -> None:
    """Make both functions known to transformers; doing it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PAGED_ATTENTION, _paged_attention)
    AttentionInterface.register(INSPECTED_ATTENTION, _inspected_attention)
    AttentionMaskInterface.register(INSPECTED_ATTENTION, _mask_rule)


def _paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    *,
    paged_step: PagedStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_options: object,
) -> tuple[Tensor, None]:
    layer = paged_step.cache[paged_step.layer_of[module]]
    metadata = paged_step.metadata
    width = layer.keys.shape[-1]
    kv_write(_rows(key, width, layer.keys.dtype), layer.keys, metadata.slot_mapping)
    kv_write(_rows(value, width, layer.values.dtype), layer.values, metadata.slot_mapping)
    attended = paged_attention(
        _rows(query, width, layer.keys.dtype),
        layer.keys,
        layer.values,
        metadata,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window or None,
        soft_cap=softcap,
    )
    return attended[None, ..., : value.shape[-1]].to(query.dtype), None


def _rows(states: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    # [1, heads, num_tokens, dim] -> [num_tokens, heads, width]; zeros beyond `dim` change no dot product
    rows = states[0].transpose(0, 1).to(dtype)
    if rows.shape[-1] < width:
        rows = nn.functional.pad(rows, (0, width - rows.shape[-1]))
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _inspected_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    *,
    inspection: Inspection | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if inspection is None:
        raise UnsupportedModel(
            f"{type(module).__name__} does not hand keyword arguments on to its attention function"
        )
    inspection.record(module, TransformersAttentionCall(query, key, value, attention_mask, options))
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


def _mask_rule(*, mask_function: Callable[..., Tensor], **_options: object) -> MaskRule:
    return MaskRule(mask_function)


def refuse_unsupported_call(
    module: nn.Module, call: TransformersAttentionCall, num_tokens: int, max_position: int
) -> None:
    """Hold one layer's call against what paged attention computes.

    Args:
        module: the attention module, for the message.
        call: what it asked for.
        num_tokens: tokens of the inspected pass.
        max_position: longest sequence, tokens; the mask's rule is looked at up to there.

    Raises:
        UnsupportedModel: it asks for something that paged attention would silently leave out.
    """
    problem = _problem(module, call, num_tokens, max_position)
    if problem is not None:
        raise UnsupportedModel(f"{type(module).__name__} {problem}, which paged attention does not offer")


def _problem(
    module: nn.Module, call: TransformersAttentionCall, num_tokens: int, max_position: int
) -> str | None:
    known = HARMLESS_OPTIONS | {"scaling", "sliding_window", "softcap", "is_causal"}
    for name, option in call.options.items():
        if name not in known and option is not None and option is not False:
            return f"passes {name!r} to its attention function"
    causal = call.options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        return "attends in both directions"
    (_, num_heads, *_), (_, *kv_shape, _) = call.query.shape, call.key.shape
    if kv_shape != list(call.value.shape[1:-1]) or kv_shape[1] != num_tokens or num_heads % kv_shape[0]:
        return (
            f"has queries of shape {tuple(call.query.shape)}, keys of {tuple(call.key.shape)} "
            f"and values of {tuple(call.value.shape)} for {num_tokens} tokens"
        )
    if isinstance(call.mask, MaskRule):
        return _mask_problem(call.mask, call.sliding_window, max_position, call.query.device)
    return None if call.mask is None else "builds an attention mask of its own"


def _mask_problem(mask: MaskRule, window: int | None, max_position: int, device: torch.device) -> str | None:
    """Compare the rule with "causal, within the window" at the positions where such rules change."""
    positions = {0, 1, 2, max_position - 1, *(1 << bit for bit in range(max_position.bit_length()))}
    positions |= {(window or 1) + offset for offset in (-1, 0, 1)}
    index = torch.tensor(sorted(p for p in positions if p < max_position), device=device)
    query, key = index[:, None], index[None, :]
    zero = index.new_zeros(())
    ours = (key <= query) & (key > query - (window or max_position))
    theirs = mask.allows(zero, zero, query, key).expand_as(ours)
    if torch.equal(ours, theirs):
        return None
    row, column = (ours != theirs).nonzero()[0].tolist()
    verb = "hides" if ours[row, column] else "shows"
    return (
        f"{verb} position {index[column]} from the token at position {index[row]} (sliding_window={window})"
    )
