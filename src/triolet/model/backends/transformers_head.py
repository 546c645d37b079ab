"""Decoder and head of a transformers model, apart from each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the part of a causal model that computes hidden states."""
    # `base_model` is the model itself where the class names an attribute that it does not have, as Llama 4 does.
    return model.base_model if model.base_model is not model else getattr(model, "model", model)


def compute_logits(model: PreTrainedModel, hidden: Tensor, rows: Tensor) -> Tensor:
    """Apply a model's head, and whatever its own `forward` does to logits, to some tokens.

    Args:
        model: with its decoder.
        hidden: [num_tokens, hidden_size], from the decoder.
        rows: [num_logits] int64, indices into `hidden`.

    Returns:
        [num_logits, vocab_size].
    """
    # The model's own forward, because families scale and cap their logits there; its decoder only returns `hidden`.
    with returning(decoder_of(model), BaseOutput(hidden[rows][None])):
        logits: Tensor = model(input_ids=rows[None], use_cache=False).logits[0]
    return logits


class BaseOutput:
    """Output of a model without its head: hidden states, [1, num_tokens, hidden_size], and maybe what BERT pools."""

    def __init__(self, hidden: Tensor, pooled: Tensor | None = None) -> None:
        self.last_hidden_state, self.pooler_output = hidden, pooled

    def __getitem__(self, index: int) -> Tensor | None:  # how older code reads it
        return (self.last_hidden_state, self.pooler_output)[index]

    def __getattr__(self, name: str) -> None:  # caches, attentions, router logits
        return None


@contextmanager
def returning(module: nn.Module, output: object) -> Iterator[None]:
    """Let a module return `output` whatever it is called with."""
    vars(module)["forward"] = lambda *_, **__: output
    try:
        yield
    finally:
        del vars(module)["forward"]  # the class has its own
