"""Blocks of weights that share a scale, as a configuration names them or the shape of the scales tells them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from triolet.model.folder.json_fields import Fields

Block = tuple[int, int]
"""Rows and columns of a weight that share a scale."""

USUAL = 128
"""Side of the blocks of most checkpoints, whose last one may be cut off."""

_MOST_BITS = 8  # of an integer that is packed


def named_blocks(fields: Fields) -> tuple[Block, ...]:
    """Read the blocks and groups that `config_groups` of compressed-tensors names.

    Raises:
        ModelFileError: a size is not a positive integer.
    """
    found: list[Block] = []
    for weights in _schemes(fields):
        block = weights.values.get("block_structure")
        if isinstance(block, str):  # older files say 128x128
            block = [int(size) if size.isdecimal() else 0 for size in block.split("x")]
        if block is not None:
            if not isinstance(block, list) or len(block) != 2 or not all(map(_is_size, block)):
                raise weights.wrong("block_structure", "two positive integers")
            found.append((block[0], block[1]))
        elif weights.values.get("group_size") not in (None, -1):
            found.append((1, weights.integer("group_size", 1)))
    return tuple(dict.fromkeys(found))


def named_bits(fields: Fields) -> tuple[int, ...]:
    """Read the bits of packed integers that `config_groups` of compressed-tensors names; 4 and 8 if it names none.

    Raises:
        ModelFileError: a number of bits is not a positive integer.
    """
    named = {weights.integer("num_bits", 8) for weights in _schemes(fields) if "num_bits" in weights}
    return tuple(sorted(bits for bits in named if bits <= _MOST_BITS)) or (4, 8)


def _schemes(fields: Fields) -> Iterator[Fields]:
    """Yield what `config_groups` says of weights, group by group."""
    groups = fields.section("config_groups")
    for name in () if groups is None else groups.values:
        group = None if groups is None else groups.section(name)
        weights = None if group is None else group.section("weights")
        if weights is not None:
            yield weights


def block_of(shape: tuple[int, int], scales: tuple[int, int], named: Sequence[Block]) -> Block | None:
    """Return the block of a weight with scales of this shape; None if several would fit, or none does.

    Args:
        shape: of the weight, [out, in].
        scales: number of scales along each of its sides.
        named: blocks that the configuration names, for this layer or for others.
    """
    if scales == (1, 1):
        return shape
    fitting = {
        block for block in named if (math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1])) == scales
    }
    if fitting:
        return fitting.pop() if len(fitting) == 1 else None
    rows, columns = (_only_size(*side) for side in zip(shape, scales, strict=True))
    return None if rows is None or columns is None else (rows, columns)


def _only_size(size: int, count: int) -> int | None:
    if count in (1, size):
        return size // count
    equal = {size // count} if size % count == 0 else set()
    cut_off = {USUAL} if math.ceil(size / USUAL) == count else set()
    sizes = equal | cut_off
    return sizes.pop() if len(sizes) == 1 else None


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0
