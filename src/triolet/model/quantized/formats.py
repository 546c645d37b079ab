"""Formats of quantised layers: which tensors a layer has, what their shapes must be, and the formula.

A layer is found by its tensors, as the tools that write these files and those that read them do: lists of exceptions in
the configuration need not be followed. What the tensors do not tell is read from `quantization_config`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from triolet.kernels.cpu.gemm.blocks import BlockRows, i8_format, i8_rows, u4_format, u4_rows
from triolet.kernels.linear.weight_only import PackedWeight, byte_weight
from triolet.model.folder.json_fields import Fields
from triolet.model.quantized import dequantize
from triolet.model.quantized.dequantize import GroupedIntegers
from triolet.model.quantized.float4 import float4_layer
from triolet.model.quantized.layer import FLOATS, BlockLayout, Module, Parts, QuantizedLayer
from triolet.model.quantized.scale_blocks import Block, block_of, named_bits, named_blocks
from triolet.model.quantized.transforms import refuse_transforms

BYTES_OF_WORD = 4


@attrs.frozen
class Gptq:
    """GPTQ, versions 1 and 2."""

    bits: int
    group_size: int | None  # None: one group
    has_order: bool  # act order: `g_idx` tells the group of an input
    stored_minus_one: bool
    # Settings of modules whose name begins with a pattern, of which the first counts; None for those of all.
    dynamic: tuple[tuple[re.Pattern[str], Gptq | None], ...] = ()

    marks: ClassVar[tuple[str, ...]] = ("qweight",)
    unused: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def of(cls, fields: Fields) -> Gptq:
        """Read `quantization_config`."""
        return attrs.evolve(cls._of_all(fields), dynamic=tuple(_dynamic(fields)))

    @classmethod
    def _of_all(cls, fields: Fields) -> Gptq:
        bits = fields.integer("bits", 4)
        if bits not in (2, 3, 4, 8):
            raise fields.wrong("bits", "2, 3, 4 or 8")
        # transformers 5 and GPTQModel have a new name for it.
        name = "checkpoint_format" if fields.values.get("checkpoint_format") is not None else "format"
        version = fields.text(name, "gptq").lower()
        if version not in ("gptq", "gptq_v2"):
            raise fields.wrong(name, "gptq or gptq_v2")
        if fields.flag("is_marlin_format", False):
            raise fields.wrong("is_marlin_format", "false: the layout of Marlin is not supported")
        return cls(bits, group_size_of(fields, 128), fields.flag("desc_act", False), version == "gptq")

    def layer(self, module: Module) -> QuantizedLayer:
        own = next((found for pattern, found in self.dynamic if pattern.match(module.name)), None)
        return (own or self)._layer(module)

    def _layer(self, module: Module) -> QuantizedLayer:
        words, num_out = module.need("qweight", ("I32",), None, None)
        # The configuration does not know the shape: it follows from the packed words.
        num_in = words * dequantize.WORD_BITS // self.bits
        num_groups, _ = module.need("scales", FLOATS, None, num_out)
        module.check_groups("scales", num_groups, num_in, self.group_size or num_in)
        zero_words = math.ceil(num_out * self.bits / dequantize.WORD_BITS)
        module.need("qzeros", ("I32",), num_groups, zero_words)
        # Many folders have an index although their inputs are in order.
        has_index = self.has_order or module.find("g_idx") is not None
        if has_index:
            module.need("g_idx", ("I32",), num_in)
        size = self.group_size or num_in

        def integers(parts: Parts) -> GroupedIntegers:
            return dequantize.gptq(
                parts["qweight"],
                parts["qzeros"],
                parts["scales"],
                num_in,
                bits=self.bits,
                stored_minus_one=self.stored_minus_one,
            )

        def formula(parts: Parts) -> Tensor:
            groups = parts["g_idx"] if has_index else torch.arange(num_in) // size
            _check_index(module, groups, num_groups)
            return integers(parts).dequantize(groups)

        names = ("qweight", "qzeros", "scales", *(("g_idx",) if has_index else ()))
        is_ordered = module.has_ordered_groups("g_idx", size)
        blocks = _u4_blocks(integers, num_in, num_groups, size) if self.bits == 4 and is_ordered else None

        def stored(parts: Parts) -> PackedWeight:
            order = None if is_ordered else parts["g_idx"]
            if order is not None:
                _check_index(module, order, num_groups)
            return PackedWeight(
                bits=self.bits,
                num_in=num_in,
                num_out=num_out,
                group_size=size,
                words=parts["qweight"],
                zeros=parts["qzeros"],
                scales=parts["scales"],
                order=order,
                stored_minus_one=self.stored_minus_one,
            )

        has_kernel = self.bits in (4, 8) and num_out * self.bits % dequantize.WORD_BITS == 0
        return module.layer((num_out, num_in), names, formula, blocks, stored if has_kernel else None)


@attrs.frozen
class Awq:
    """AWQ in the layout `gemm`, four bits."""

    group_size: int | None

    marks: ClassVar[tuple[str, ...]] = ("qweight",)
    unused: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def of(cls, fields: Fields) -> Awq:
        """Read `quantization_config`."""
        for name in ("bits", "w_bit"):
            if fields.integer(name, 4) != 4:
                raise fields.wrong(name, "4")
        # `gemv` and the others pack the same words in another order.
        for name in ("version", "format", "checkpoint_format"):
            if fields.text(name, "gemm").lower() != "gemm":
                raise fields.wrong(name, "gemm: the other layouts are not supported")
        if fields.text("backend", "").lower() == "llm-awq":
            raise fields.wrong("backend", "another than llm-awq, which has a layout of its own")
        return cls(group_size_of(fields, 128))

    def layer(self, module: Module) -> QuantizedLayer:
        num_in, words = module.need("qweight", ("I32",), None, None)
        # Eight values of four bits fill a word.
        num_out = 8 * words
        num_groups, _ = module.need("scales", FLOATS, None, num_out)
        module.check_groups("scales", num_groups, num_in, self.group_size or num_in)
        module.need("qzeros", ("I32",), num_groups, words)
        size = self.group_size or num_in

        def integers(parts: Parts) -> GroupedIntegers:
            return dequantize.awq(parts["qweight"], parts["qzeros"], parts["scales"])

        return module.layer(
            (num_out, num_in),
            ("qweight", "qzeros", "scales"),
            # The last group may be a shorter one.
            lambda parts: integers(parts).dequantize(torch.arange(num_in) // size),
            _u4_blocks(integers, num_in, num_groups, size),
            lambda parts: PackedWeight(
                bits=4,
                num_in=num_in,
                num_out=num_out,
                group_size=size,
                words=parts["qweight"],
                zeros=parts["qzeros"],
                scales=parts["scales"],
                packs_outputs=True,
            ),
        )


@attrs.frozen
class CompressedTensors:
    """compressed-tensors: packed integers of up to 8 bits, int8, float8 and 4-bit floats.

    They are scaled per tensor, row, group or block.

    Activations are not quantised, whatever the scheme says of them: the weights alone are what it makes of them.
    """

    blocks: tuple[Block, ...] = ()  # that the schemes name
    bits: tuple[int, ...] = (4, 8)  # of packed integers, that they name

    marks: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale")
    # Of activations, and of keys and values in a cache.
    unused: ClassVar[tuple[str, ...]] = (
        "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point",
        "q_scale", "k_scale", "v_scale", "q_zero_point", "k_zero_point", "v_zero_point",
    )  # fmt: skip

    @classmethod
    def of(cls, fields: Fields) -> CompressedTensors:
        """Read `quantization_config`."""
        known = (
            "pack-quantized",
            "int-quantized",
            "naive-quantized",
            "float-quantized",
            "nvfp4-pack-quantized",
            "mxfp4-pack-quantized",
            "mixed-precision",
            "dense",
        )
        if fields.text("format", "dense") not in known:
            raise fields.wrong("format", f"one of {', '.join(known)}")
        sparsity = fields.section("sparsity_config")
        if sparsity is not None and sparsity.text("format", "dense") != "dense":
            raise fields.wrong("sparsity_config", "of the format dense")
        refuse_transforms(fields)
        return cls(named_blocks(fields), named_bits(fields))

    def layer(self, module: Module) -> QuantizedLayer | None:
        if (packed := module.find("weight_packed")) is not None:
            return float4_layer(module) if packed.dtype == "U8" else self._packed(module)
        if module.find("weight") is None:
            return None  # the scale of something else, such as that of a KV cache
        return scaled_layer(module, "weight_scale", self.blocks)

    def _packed(self, module: Module) -> QuantizedLayer:
        num_out, words = module.need("weight_packed", ("I32",), None, None)
        module.need("weight_shape", ("I64", "I32"), 2)
        shape = module.checkpoint.read_raw(module.full("weight_shape")).tolist()
        num_in = shape[1]
        # Which of the schemes is the layer's is not written down: only one number of bits fills these words.
        fitting = [bits for bits in self.bits if math.ceil(num_in * bits / dequantize.WORD_BITS) == words]
        # The shape is data of the file, and memory is allocated by it.
        if shape[0] != num_out or num_in < 1 or len(fitting) != 1:
            named = " or ".join(map(str, self.bits))
            rule = f"the shape of a weight of {named} bits in [{num_out}, {words}] words"
            raise module.wrong("weight_shape", rule, shape)
        (bits,) = fitting
        _, num_groups = module.need("weight_scale", FLOATS, num_out, None)
        module.check_groups("weight_scale", num_groups, num_in)
        size = num_in // num_groups
        if block_of((num_out, num_in), (num_out, num_groups), self.blocks) not in (
            (1, size),
            (num_out, num_in),
        ):
            rule = f"of one column for each whole group of the {num_in} inputs, of a size that config_groups names"
            raise module.wrong("weight_scale", rule, num_groups)
        names = ["weight_packed", "weight_scale", "weight_shape"]
        if module.find("weight_zero_point") is not None:
            zero_words = math.ceil(num_out * bits / dequantize.WORD_BITS)
            module.need("weight_zero_point", ("I32",), zero_words, num_groups)
            names.append("weight_zero_point")
        if module.find("weight_g_idx") is not None:
            module.need("weight_g_idx", ("I32",), num_in)
            names.append("weight_g_idx")

        def integers(parts: Parts) -> GroupedIntegers:
            return dequantize.packed_int(
                parts["weight_packed"],
                parts["weight_scale"],
                parts.get("weight_zero_point"),
                (num_out, num_in),
                bits,
            )

        is_symmetric = module.find("weight_zero_point") is None
        blocks = None
        is_ordered = module.has_ordered_groups("weight_g_idx", size, unset=-1)

        def formula(parts: Parts) -> Tensor:
            groups = None if is_ordered else parts["weight_g_idx"]
            if groups is not None:
                _check_index(module, groups, num_groups, "weight_g_idx")
            return integers(parts).dequantize(groups)

        def stored(parts: Parts) -> PackedWeight:
            order, zeros = None if is_ordered else parts["weight_g_idx"], parts.get("weight_zero_point")
            if order is not None:
                _check_index(module, order, num_groups, "weight_g_idx")
            return PackedWeight(
                bits=bits,
                num_in=num_in,
                num_out=num_out,
                group_size=size,
                words=parts["weight_packed"].T,
                zeros=None if zeros is None else zeros.T,
                scales=parts["weight_scale"].T,
                order=order,
            )

        if is_ordered:
            if bits == 4:
                blocks = _u4_blocks(integers, num_in, num_groups, size)
            elif bits == 8 and is_symmetric:
                blocks = BlockLayout(i8_format(size), lambda parts: _i8_rows(integers(parts)))
        is_packed = bits in (4, 8)  # in the kernels' sense
        return module.layer((num_out, num_in), tuple(names), formula, blocks, stored if is_packed else None)


@attrs.frozen
class Fp8:
    """float8 weights with a scale per block, row or tensor, as in Qwen3-FP8 and DeepSeek."""

    block: tuple[int, int]

    marks: ClassVar[tuple[str, ...]] = ("weight_scale_inv", "weight_scale")
    unused: ClassVar[tuple[str, ...]] = ("input_scale", "activation_scale", "k_scale", "v_scale")

    @classmethod
    def of(cls, fields: Fields) -> Fp8:
        """Read `quantization_config`."""
        # DeepSeek's block, used only where the scales are per block.
        if not fields.values.get("weight_block_size"):
            return cls((128, 128))
        block = fields.integers("weight_block_size")
        if len(block) != 2 or min(block) < 1:
            raise fields.wrong("weight_block_size", "two positive integers")
        return cls((block[0], block[1]))

    def layer(self, module: Module) -> QuantizedLayer | None:
        if module.find("weight") is None:
            return None
        if module.find("weight_scale_inv") is None:
            return scaled_layer(module, "weight_scale", (self.block,))
        return scaled_layer(module, "weight_scale_inv", (self.block,), is_named=True)


def scaled_layer(
    module: Module, scale_part: str, named: Sequence[Block], *, is_named: bool = False
) -> QuantizedLayer:
    """Return a layer of int8 or float8 values with a scale per tensor, row, group of columns or block.

    Args:
        module: has `weight` and the scales.
        scale_part: name of the scales.
        named: blocks that the configuration names; else the shape of the scales must tell.
        is_named: whether the scales must be those of the first of them.
    Raises:
        UnsupportedModel: weight and scales do not fit each other.
    """
    num_out, num_in = module.need("weight", ("I8", "F8_E4M3"), None, None)
    if min(num_out, num_in) < 1:
        raise module.wrong("weight", "of at least one row and one column", [num_out, num_in])
    if module.find("weight_zero_point") is not None:
        raise module.wrong("weight_zero_point", "absent: int8 weights must be symmetric", "a tensor")
    scale = module.find(scale_part)
    assert scale is not None
    block = named[0] if is_named else None
    if math.prod(scale.shape) == 1:
        block = (num_out, num_in)  # one for the tensor, whatever blocks are named
    if block is None:
        rows, columns = (*scale.shape, 1, 1)[:2]
        if min(rows, columns) < 1 or len(scale.shape) > 2:
            raise module.wrong(scale_part, "of one or two dimensions", list(scale.shape))
        if (block := block_of((num_out, num_in), (rows, columns), named)) is None:
            rule = f"of a shape that fits one size of blocks of [{num_out}, {num_in}] weights"
            raise module.wrong(scale_part, rule, list(scale.shape))
    sizes = (math.ceil(num_out / block[0]), math.ceil(num_in / block[1]))
    if scale.dtype not in FLOATS:
        raise module.wrong(scale_part, f"of dtype {' or '.join(FLOATS)}", scale.dtype)
    if math.prod(scale.shape) != math.prod(sizes) or (len(scale.shape) == 2 and scale.shape != sizes):
        raise module.wrong(scale_part, f"of shape {list(sizes)}", list(scale.shape))
    chosen = block
    stored = module.find("weight")
    is_kept = stored is not None and stored.dtype == "I8" and block[0] == 1 and num_in % block[1] == 0
    return module.layer(
        (num_out, num_in),
        ("weight", scale_part),
        lambda parts: dequantize.scaled_blocks(parts["weight"], parts[scale_part].reshape(sizes), chosen),
        BlockLayout(
            i8_format(chosen[1]), lambda parts: i8_rows(parts["weight"], parts[scale_part].reshape(sizes))
        )
        if is_kept
        else None,
        (lambda parts: byte_weight(parts["weight"], parts[scale_part].reshape(sizes), chosen))
        if num_in % BYTES_OF_WORD == 0
        else None,
    )


def _u4_blocks(
    integers: Callable[[Parts], GroupedIntegers], num_in: int, num_groups: int, size: int
) -> BlockLayout | None:
    """Return the layout of integers of four bits in groups of `size` inputs; None if the last group is shorter."""

    def rows(parts: Parts) -> BlockRows:
        read = integers(parts)
        return u4_rows(read.weight, read.zeros, read.scales)

    return BlockLayout(u4_format(size), rows) if num_in == num_groups * size else None


def _i8_rows(read: GroupedIntegers) -> BlockRows:
    # Symmetric: the zeros are all the same, in the middle.
    return i8_rows(read.weight - read.zeros[:1, :1], read.scales)


def _dynamic(fields: Fields) -> Iterator[tuple[re.Pattern[str], Gptq | None]]:
    """Yield the settings of single modules in `quantization_config`, as GPTQModel writes and reads them.

    Raises:
        ModelFileError: a setting is wrong, or no settings follow a name.
    """
    dynamic = fields.section("dynamic")
    for name in () if dynamic is None else dynamic.values:
        kind, pattern = (name[:2], name[2:]) if name[:2] in ("+:", "-:") else ("+:", name)
        try:
            compiled = re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise fields.wrong(
                "dynamic", f"of regular expressions, which {pattern!r} is not ({error})"
            ) from None
        own = None if dynamic is None else dynamic.section(name)
        if own is None:
            raise fields.wrong("dynamic", f"of settings, which {name!r} has none of")
        # Modules that are left out are not quantised, and told by their tensors.
        if kind == "-:" or not own.values:
            yield compiled, None
        else:
            yield compiled, Gptq._of_all(attrs.evolve(own, values={**fields.values, **own.values}))


def group_size_of(fields: Fields, default: int) -> int | None:
    """Return the inputs of a group; None if all inputs of an output are one.

    Raises:
        ModelFileError: it is not a positive integer or -1.
    """
    for name in ("group_size", "q_group_size"):
        if fields.values.get(name) == -1:
            return None
        if name in fields:
            return fields.integer(name, default)
    return default


def _check_index(module: Module, groups: Tensor, num_groups: int, part: str = "g_idx") -> None:
    if groups.numel() and not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
        got = f"{int(groups.min())} to {int(groups.max())}"
        raise module.wrong(part, f"of groups 0 to {num_groups - 1}", got)
