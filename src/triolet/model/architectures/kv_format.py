"""Format in which a GPU's KV cache keeps keys and values, and the scales that a checkpoint has for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

import attrs
import torch

from triolet.errors import UnsupportedModel
from triolet.model.architectures.decoder_config import DecoderConfig
from triolet.model.folder.checkpoint import Checkpoint

KV_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "fp8": torch.float8_e4m3fn,  # as in vLLM
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
SCALE_ENDINGS: Final = (
    ".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point", ".q_zero_point",
    "k_proj.output_scale", "v_proj.output_scale",
)  # fmt: skip
"""Endings of tensors that say how activations are rounded; a model is complete without them."""


@attrs.frozen
class KvScales:
    """What the keys and the values of one layer are divided by before they are rounded."""

    keys: float = 1.0
    values: float = 1.0


NO_SCALES: Final = KvScales()


@attrs.frozen(kw_only=True)
class KvFormat:
    """Format of a KV cache in float8."""

    dtype: torch.dtype
    scales: tuple[KvScales, ...] = ()  # of each layer; empty if all are 1

    def of_layer(self, index: int) -> KvScales:
        """Return the scales of a layer."""
        return self.scales[index] if self.scales else NO_SCALES


def read_kv_scales(config: DecoderConfig, checkpoint: Checkpoint) -> tuple[KvScales, ...]:
    """Read the scales of all layers, under the names that vLLM reads; 1 where there is none.

    Raises:
        UnsupportedModel: a scale that is not one number above 0.
        ModelFileError: see `Checkpoint.read`.
    """
    return tuple(
        KvScales(_read(config, index, "k", checkpoint), _read(config, index, "v", checkpoint))
        for index in range(len(config.layers))
    )


def _names(config: DecoderConfig, index: int, letter: str) -> Iterator[str]:
    names = config.names
    module = names.qkv[0].rpartition(".")[0]
    for prefix in (names.prefix, ""):  # a checkpoint of the bare decoder has none
        attention = f"{prefix}{names.layer.format(layer=index)}{module}"
        for ending in ("", ".attn", f".{letter}_proj"):
            yield f"{attention}{ending}.{letter}_scale"
        yield f"{attention}.{letter}_proj.output_scale"


def _read(config: DecoderConfig, index: int, letter: str, checkpoint: Checkpoint) -> float:
    name = next((name for name in _names(config, index, letter) if name in checkpoint.tensors), None)
    if name is None:
        return 1.0
    if math.prod(shape := checkpoint.tensors[name].shape) != 1:
        raise UnsupportedModel(f"tensor {name!r} must hold one scale for all heads; got shape {shape}")
    scale = checkpoint.read(name).float().item()
    if not 0 < scale < math.inf:
        raise UnsupportedModel(f"tensor {name!r} must be a finite scale above 0; got {scale}")
    return scale
