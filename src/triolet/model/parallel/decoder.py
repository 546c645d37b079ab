"""Decoder of one rank: partial sums are added up over the group, and logits put side by side."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from torch import Tensor

from triolet.model.architectures.decoder_config import DecoderConfig
from triolet.model.architectures.kv_format import KvFormat
from triolet.model.architectures.weight_map import WeightReader
from triolet.model.backends.layers.linear import Linear, PackedLinear, make_linear
from triolet.model.backends.quant_method import LinearWeights
from triolet.model.backends.torch_decoder import Attention, Decoder, DecoderLayer, FeedForward, Head
from triolet.model.backends.torch_loading import build_decoder
from triolet.model.interface import ForwardBatch, ModelSpec
from triolet.model.parallel.group import Group


@attrs.frozen(eq=False, slots=True)
class SummedLinear:
    """Projection out of a part of the columns; its bias is added once, to the sum."""

    partial: Callable[[Tensor], Tensor]
    bias: Tensor | None
    group: Group

    def __call__(self, x: Tensor) -> Tensor:
        # [num_tokens, in / size] -> [num_tokens, out]
        y = self.group.add_up(self.partial(x))
        return y if self.bias is None else y + self.bias


@attrs.frozen(eq=False, slots=True)
class GatheredLinear:
    """Head of a part of the vocabulary, with the logits of all parts side by side."""

    partial: Callable[[Tensor], Tensor]
    group: Group

    def __call__(self, x: Tensor) -> Tensor:
        # [n, hidden] -> [n, vocab_size]
        return self.group.side_by_side(self.partial(x))


@attrs.frozen(eq=False, kw_only=True)
class RankDecoder:
    """Decoder of one rank; see `triolet.model.interface.PartialModel`."""

    whole: Decoder  # gathers the logits
    part: Decoder  # the same layers, with the logits of a part of the vocabulary
    group: Group

    @property
    def spec(self) -> ModelSpec:
        return self.whole.spec

    @property
    def first_id(self) -> int:
        return self.group.part.span(self.spec.vocab_size)[0]

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self.whole.forward(batch)

    def compute_logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return self.whole.compute_logits(hidden, rows)

    def forward_logits(self, batch: ForwardBatch) -> Tensor:
        return self.whole.forward_logits(batch)

    def forward_part(self, batch: ForwardBatch) -> Tensor:
        return self.part.forward_logits(batch)

    def gather(self, x: Tensor) -> Tensor:
        return self.group.gather(x)


def build_part(
    config: DecoderConfig,
    weights: WeightReader,
    group: Group,
    max_model_len: int | None,
    kv_format: KvFormat | None = None,
) -> RankDecoder:
    """Build the decoder of one rank.

    Args:
        config: of this rank's part.
        weights: of this rank's part.
        group: whose members add up and gather.
        max_model_len: longest sequence that will be asked for, tokens.
        kv_format: of a KV cache in float8; None for one in the dtype of the weights.
    """
    whole = build_decoder(config, weights, max_model_len=max_model_len, kv_format=kv_format)
    head: Head = whole.head
    if "head.weight" not in weights:  # tied: the embedding is whole on every rank
        begin, end = group.part.span(len(whole.embedding))
        head = make_linear(LinearWeights(whole.embedding[begin:end]))
    layers = tuple(
        _summed(layer, f"layers.{index}.", weights, group) for index, layer in enumerate(whole.layers)
    )
    part = attrs.evolve(whole, layers=layers, head=head)
    return RankDecoder(whole=attrs.evolve(part, head=GatheredLinear(head, group)), part=part, group=group)


def _summed(layer: DecoderLayer, prefix: str, weights: WeightReader, group: Group) -> DecoderLayer:
    def summed(linear: Callable[[Tensor], Tensor]) -> SummedLinear:
        assert isinstance(linear, Linear | PackedLinear), "there are no adapters"
        return SummedLinear(attrs.evolve(linear, bias=None), linear.bias, group)

    assert isinstance(layer.mlp, FeedForward), "mixtures of experts are refused"
    assert isinstance(layer.attention, Attention), "so are latent attention and recurrent layers"
    return attrs.evolve(
        layer,
        attention=attrs.evolve(layer.attention, out=summed(layer.attention.out)),
        mlp=attrs.evolve(layer.mlp, project_out=summed(layer.mlp.project_out)),
    )
