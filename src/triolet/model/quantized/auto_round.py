"""Layers of AutoRound, which packs as GPTQ or AWQ do, or stores float8.

Source: auto-round, `export_to_autoround` and `inference/convert_model`.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final

import attrs

from triolet.model.folder.json_fields import Fields
from triolet.model.quantized.formats import Awq, Fp8, Gptq, group_size_of
from triolet.model.quantized.layer import Module, QuantizedFormat, QuantizedLayer

_PLAIN_BITS: Final = 16  # of modules that are not quantised

_PACKINGS: Final = {
    "auto": "gptq",
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
    "auto_round:fp8": "fp8",
    "auto_round:fp8_static": "fp8",
}
"""What `packing_format` means. AutoRound's own packing is that of GPTQ, with zero points as they are."""


@attrs.frozen
class AutoRound:
    """AutoRound: integers of 2 to 8 bits in GPTQ's or AWQ's packing, and float8 scaled per tensor, row or block."""

    usual: QuantizedFormat
    # Settings of single modules, by name and by regular expression; None for modules that are not quantised.
    named: dict[str, QuantizedFormat | None]
    patterns: tuple[tuple[re.Pattern[str], QuantizedFormat | None], ...]

    marks: ClassVar[tuple[str, ...]] = ("qweight", "weight_scale", "weight_scale_inv")
    unused: ClassVar[tuple[str, ...]] = ("input_scale", "act_scale")

    @classmethod
    def of(cls, fields: Fields) -> AutoRound:
        """Read `quantization_config`."""
        # Rotations of activations, without which the weights mean something else.
        if fields.values.get("rotation_config"):
            raise fields.wrong("rotation_config", "absent: rotations are not supported")
        usual = _format_of(fields)
        named: dict[str, QuantizedFormat | None] = {}
        patterns: list[tuple[re.Pattern[str], QuantizedFormat | None]] = []
        extra = fields.section("extra_config")
        for name in () if extra is None else extra.values:
            own = None if extra is None else extra.section(name)
            if own is None:
                raise fields.wrong("extra_config", f"of settings, which {name!r} has none of")
            if not own.values:
                continue
            found = _format_of(attrs.evolve(own, values={**fields.values, **own.values}))
            named[name] = found
            try:
                patterns.append((re.compile(name), found))
            except (re.error, OverflowError, RecursionError):
                continue  # a name that is no expression stands for itself, as AutoRound has it
        if usual is None:
            raise fields.wrong("bits", f"less than {_PLAIN_BITS}")
        return cls(usual, named, tuple(patterns))

    def layer(self, module: Module) -> QuantizedLayer | None:
        own = self.named.get(module.name)
        if module.name not in self.named:
            own = next((found for pattern, found in self.patterns if pattern.search(module.name)), self.usual)
        # A module that is left out may have tensors of these names all the same: the settings of all are then the ones.
        return (own or self.usual).layer(module)


def _format_of(fields: Fields) -> QuantizedFormat | None:
    """Return how AutoRound packs a module with these settings; None if it does not quantise it."""
    bits = fields.integer("bits", 4)
    if bits >= _PLAIN_BITS:
        return None
    data_type = fields.text("data_type", "int")
    packing = fields.text("packing_format", "auto_round:fp8" if data_type.startswith("fp") else "auto")
    if packing not in _PACKINGS:
        raise fields.wrong("packing_format", f"one of {', '.join(_PACKINGS)}")
    kind = _PACKINGS[packing]
    if data_type not in (("fp", "fp8", "fp8_e4m3") if kind == "fp8" else ("int",)):
        rule = "fp, fp8 or fp8_e4m3" if kind == "fp8" else "int"
        raise fields.wrong("data_type", f"{rule} for packing_format {packing}")
    if kind == "fp8":
        if bits != 8:
            raise fields.wrong("bits", f"8 for packing_format {packing}")
        return _fp8(fields)
    # Other words are packed where activations are quantised, too.
    if fields.integer("act_bits", _PLAIN_BITS) < _PLAIN_BITS:
        raise fields.wrong("act_bits", f"{_PLAIN_BITS} for packing_format {packing}")
    if not 2 <= bits <= 8 or (kind == "awq" and bits != 4):
        raise fields.wrong("bits", "4" if kind == "awq" else "from 2 to 8")
    size = group_size_of(fields, 128)
    return Awq(size) if kind == "awq" else Gptq(bits, size, has_order=False, stored_minus_one=kind == "gptq")


def _fp8(fields: Fields) -> Fp8:
    size = fields.values.get("group_size")
    if isinstance(size, list):  # rows and columns of a block
        return Fp8.of(attrs.evolve(fields, values={**fields.values, "weight_block_size": size}))
    return Fp8.of(attrs.evolve(fields, values={**fields.values, "weight_block_size": None}))
