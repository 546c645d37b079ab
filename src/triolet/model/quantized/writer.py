"""Writer of model folders with rounded integers, in the format of compressed-tensors.

A weight becomes integers around zero, and a scale for each group of inputs or each output. The
largest value of a group lies half a step beyond the last integer, which makes the steps of all others finer. Scales are
rounded to their stored dtype first, and the integers fit the rounded ones.

Source: compressed-tensors, `calculate_qparams` of symmetric integers, and its formats `pack-quantized` and
`int-quantized`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import save_file
from torch import Tensor

from triolet.errors import UnsupportedModel
from triolet.model.architectures.decoder_config import DecoderConfig
from triolet.model.architectures.weight_map import WeightSource, plan_tensors
from triolet.model.folder.json_fields import read_json_object
from triolet.model.folder.pooling_config import module_folders
from triolet.model.folder.tokenizer_settings import TEMPLATES
from triolet.model.quantized.dequantize import WORD_BITS

_FILE_BYTES = 4 * 2**30
"""Tensors that are in memory, and in one file, together."""
_COPIED = (".json", ".jinja", ".model", ".txt")
"""Endings of the files beside the weights: tokenizer, chat template and defaults."""


@attrs.frozen(kw_only=True)
class IntegerScheme:
    """Form of the linear layers of a folder."""

    bits: int
    group_size: int | None = None  # inputs that share a scale; None for all of an output
    packs: bool = True  # into words, where activations stay what they are
    rounds_activations: bool = False  # to int8 by token, where the reading program does that


SCHEMES = {
    "w4a16": IntegerScheme(bits=4, group_size=128),
    "w8a8": IntegerScheme(bits=8, packs=False, rounds_activations=True),
    "int8": IntegerScheme(bits=8),
    "int4": IntegerScheme(bits=4, group_size=32),
}


def write_integers(
    folder: Path,
    out: Path,
    scheme: IntegerScheme,
    config: DecoderConfig,
    source: WeightSource,
    dtype: torch.dtype,
) -> dict[str, int]:
    """Write a folder whose linear layers are integers; everything else stays what it is.

    Args:
        folder: the model; its files beside the weights, and the folders that modules.json names, are copied.
        out: must not exist.
        scheme: form of the layers.
        config: of the model.
        source: its tensors.
        dtype: of the scales.

    Returns:
        Number of tensors of each type.

    Raises:
        UnsupportedModel: the layers do not divide into groups or are stored transposed, or a weight is not finite.
    """
    linear = _linear_weights(config, source, scheme)
    partial = out.with_name(f"{out.name}.part")
    partial.mkdir()
    try:
        _write_weights(partial, source, linear, scheme, dtype)
        for path in folder.iterdir():
            if path.suffix in _COPIED and path.name not in ("config.json", "model.safetensors.index.json"):
                shutil.copyfile(path, partial / path.name)
        if (templates := folder / TEMPLATES).is_dir():
            shutil.copytree(templates, partial / TEMPLATES)
        for module in module_folders(folder):
            shutil.copytree(module, partial / module.relative_to(folder), dirs_exist_ok=True)
        described = read_json_object(folder / "config.json")
        plain = sorted({name for name in source.tensors if _is_router(name, config)})
        described["quantization_config"] = _section(scheme, ["lm_head", *map(_module, plain)])
        (partial / "config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")
        # Only a complete folder gets the name that was asked for.
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {f"int{scheme.bits}": len(linear), "as they were": len(source.tensors) - len(linear)}


def rounded(weight: Tensor, scheme: IntegerScheme, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round a weight to integers around zero.

    Args:
        weight: [out, in], float32.
        scheme: bits and groups; a group size divides `in`.
        dtype: of the scales.

    Returns:
        int8 [out, in], and the scales [out, num_groups].
    """
    num_out, num_in = weight.shape
    groups = weight.reshape(num_out, -1, scheme.group_size or num_in)
    steps = 2**scheme.bits - 1
    scales = (groups.abs().amax(dim=2) / (steps / 2)).to(dtype)
    # A group of zeros has no scale to divide by.
    divisors = torch.where(scales == 0, torch.ones_like(scales), scales).float()
    half = 2 ** (scheme.bits - 1)
    integers = (groups / divisors[:, :, None]).round().clamp(-half, half - 1)
    return integers.to(torch.int8).reshape(num_out, num_in), scales


def packed(integers: Tensor, bits: int) -> Tensor:
    """Pack each row of integers around zero into words, the first in the lowest bits; the last word may have room.

    Args:
        integers: int8 [rows, columns].
        bits: 4 or 8.

    Returns:
        int32 [rows, ceil(columns * bits / 32)].
    """
    per_word = WORD_BITS // bits
    unsigned = integers.to(torch.int64) + 2 ** (bits - 1)
    unsigned = torch.nn.functional.pad(unsigned, (0, -integers.shape[1] % per_word))
    shifts = torch.arange(per_word) * bits
    words = (unsigned.view(len(integers), -1, per_word) << shifts).sum(dim=2)
    # The upper half of the unsigned words are the negative ones.
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _linear_weights(config: DecoderConfig, source: WeightSource, scheme: IntegerScheme) -> set[str]:
    if config.names.transposed:
        raise UnsupportedModel(
            f"{config.architecture} stores its layers transposed; no format of integers does"
        )
    plans = plan_tensors(config, source.tensors)
    names = {
        name
        for key, plan in plans.items()
        for name, shape in plan.sources
        if key.startswith("layers.") and len(shape) == 2 and not _is_router(name, config)
    }
    for name in sorted(names):
        num_in = source.tensors[name].shape[1]
        if scheme.group_size is not None and num_in % scheme.group_size:
            raise UnsupportedModel(
                f"tensor {name!r} must have a multiple of {scheme.group_size} inputs for this format; got {num_in}"
            )
    return names


def _is_router(name: str, config: DecoderConfig) -> bool:
    """Tell whether a weight is a router, or the gate of a shared expert: readers have no place for integers there."""
    return name.endswith((f".{config.names.router}.weight", f".{config.names.shared_gate}.weight"))


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _write_weights(
    folder: Path, source: WeightSource, linear: set[str], scheme: IntegerScheme, dtype: torch.dtype
) -> None:
    held: dict[str, Tensor] = {}
    places: dict[str, int] = {}
    count = held_bytes = total_bytes = 0
    for name, tensor in _written(source, linear, scheme, dtype):
        if held and held_bytes + tensor.nbytes > _FILE_BYTES:
            save_file(held, folder / f"{count}.part", metadata={"format": "pt"})
            held, count, held_bytes = {}, count + 1, 0
        held[name], places[name] = tensor, count
        held_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    save_file(held, folder / f"{count}.part", metadata={"format": "pt"})
    if count == 0:
        (folder / "0.part").rename(folder / "model.safetensors")
        return
    names = [f"model-{index + 1:05}-of-{count + 1:05}.safetensors" for index in range(count + 1)]
    for index, file in enumerate(names):
        (folder / f"{index}.part").rename(folder / file)
    weight_map = {name: names[place] for name, place in places.items()}
    index_file = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file), encoding="utf-8")


def _written(
    source: WeightSource, linear: set[str], scheme: IntegerScheme, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for name in source.tensors:
        weight = source.read(name)
        if name not in linear:
            yield name, weight
            continue
        if not weight.isfinite().all():
            raise UnsupportedModel(f"tensor {name!r} must be finite to be rounded; it has infinities or NaNs")
        integers, scales = rounded(weight.float(), scheme, dtype)
        module = _module(name)
        if scheme.packs:
            yield f"{module}.weight_packed", packed(integers, scheme.bits)
            yield f"{module}.weight_shape", torch.tensor(integers.shape)
        else:
            yield name, integers
        yield f"{module}.weight_scale", scales


def _section(scheme: IntegerScheme, ignore: list[str]) -> dict[str, Any]:
    """Return the `quantization_config` of config.json."""
    weights = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if scheme.group_size is None else "group",
        "group_size": scheme.group_size,
        "dynamic": False,
    }
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if scheme.packs else "int-quantized",
        "quantization_status": "compressed",
        "ignore": ignore,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": activations if scheme.rounds_activations else None,
                "output_activations": None,
            }
        },
    }
