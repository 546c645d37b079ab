"""Attention in both directions over whole prompts that are packed end to end, without padding.

Transformers' modelling code calls `PACKED_ATTENTION` by name, as it does the paged attention. Linear layers see the
prompts of a step as one row, [1, num_tokens]; only here are they told apart: each prompt attends to itself. Prompts of
the same length that stand side by side are computed in one call.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby
from typing import Final

import attrs
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from triolet.errors import UnsupportedModel
from triolet.model.backends.transformers_attention import (
    HARMLESS_OPTIONS,
    MaskRule,
    TransformersAttentionCall,
    register_attention,
)

PACKED_ATTENTION: Final = "triolet_packed"
_KNOWN_OPTIONS: Final = HARMLESS_OPTIONS | {"scaling", "sliding_window", "softcap", "is_causal"}


@attrs.frozen(eq=False)
class PackedStep:
    """Prompts of one step, on their way through the model's keyword arguments."""

    lengths: tuple[int, ...]  # tokens of each prompt, in their order
    windows: dict[nn.Module, int]  # by attention module; a token sees those less than this far away


def register_packed_attention() -> None:
    """Make the function known to transformers; doing it again changes nothing."""
    from transformers import AttentionInterface

    register_attention()
    AttentionInterface.register(PACKED_ATTENTION, _packed_attention)


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    *,
    packed_step: PackedStep,
    scaling: float | None = None,
    **_options: object,
) -> tuple[Tensor, None]:
    # [1, heads, num_tokens, head_dim] each -> [1, num_tokens, heads, head_dim]
    window, start = packed_step.windows[module], 0
    parts = []
    for length, same in groupby(packed_step.lengths):
        count = len(list(same))
        end = start + count * length

        def prompts(states: Tensor, start: int = start, end: int = end, count: int = count) -> Tensor:
            # [1, heads, num_tokens, head_dim] -> [count, heads, length, head_dim]
            alike: Tensor = states[0, :, start:end].unflatten(1, (count, -1))
            return alike.transpose(0, 1)

        attended = scaled_dot_product_attention(
            prompts(query),
            prompts(key),
            prompts(value),
            attn_mask=None if length <= window else _band(length, window, query.device),
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        parts.append(attended.transpose(1, 2).flatten(0, 1))
        start = end
    return torch.cat(parts)[None], None


@lru_cache(maxsize=16)  # of the lengths in use; one of 8,192 tokens takes 64 MiB
def _band(length: int, window: int, device: torch.device) -> Tensor:
    index = torch.arange(length, device=device)
    return (index[:, None] - index[None, :]).abs() < window


def window_of(module: nn.Module, call: TransformersAttentionCall, num_tokens: int, max_position: int) -> int:
    """Return the distance from which on a token of this layer is not seen; `max_position` if all are.

    Args:
        module: the attention module, for the message.
        call: what it asked for.
        num_tokens: tokens of the inspected pass.
        max_position: longest sequence, tokens.

    Raises:
        UnsupportedModel: the layer asks for something that packed attention would silently leave out.
    """
    name = type(module).__name__
    for option, value in call.options.items():
        if (option not in _KNOWN_OPTIONS or option == "softcap") and value is not None and value is not False:
            raise UnsupportedModel(
                f"{name} passes {option!r} to its attention function, which packed attention does not offer"
            )
    if call.key.shape[2] != num_tokens or call.query.shape[1] % call.key.shape[1]:
        raise UnsupportedModel(
            f"{name} has queries of shape {tuple(call.query.shape)} and keys of {tuple(call.key.shape)}"
        )
    if not isinstance(call.mask, MaskRule):
        raise UnsupportedModel(f"{name} builds an attention mask of its own")
    index = torch.arange(max_position, device=call.query.device)
    zero = index.new_zeros(())
    seen = call.mask.allows(zero, zero, zero, index).expand_as(index)
    window = int(seen.sum())
    # the places where rules change: the beginning, the end, and the window's edges anywhere between
    places = {0, 1, max_position // 2, max_position - 1}
    places |= {
        place + offset
        for place in tuple(places)
        for edge in (window,)
        for offset in (-edge, edge, 1 - edge, edge - 1)
    }
    few = torch.tensor(sorted(place for place in places if 0 <= place < max_position), device=index.device)
    theirs = call.mask.allows(zero, zero, few[:, None], few[None, :])
    ours = (few[:, None] - few[None, :]).abs() < window
    if not torch.equal(ours, theirs.expand_as(ours)):
        raise UnsupportedModel(
            f"{name} does not attend in both directions, to all tokens or within a window; an encoder must, and of "
            "models that attend to earlier tokens only those of the native decoder are pooled"
        )
    return window
