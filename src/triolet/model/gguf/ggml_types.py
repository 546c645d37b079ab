"""Types of the tensors of a GGUF file, and what a block of each takes."""

from __future__ import annotations

import attrs

K_VALUES = 256
"""Values in a block of the k-quants and of IQ4_XS."""


@attrs.frozen
class GgmlType:
    """Storage type of a tensor: rows are cut into blocks of `block_values` values, `block_bytes` bytes each."""

    name: str
    block_values: int
    block_bytes: int


TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    10: GgmlType("Q2_K", K_VALUES, 84),
    11: GgmlType("Q3_K", K_VALUES, 110),
    12: GgmlType("Q4_K", K_VALUES, 144),
    13: GgmlType("Q5_K", K_VALUES, 176),
    14: GgmlType("Q6_K", K_VALUES, 210),
    20: GgmlType("IQ4_NL", 32, 18),
    23: GgmlType("IQ4_XS", K_VALUES, 136),
    30: GgmlType("BF16", 1, 2),
    39: GgmlType("MXFP4", 32, 17),
}
"""Types that are read, by their number in the file."""

REFUSED: dict[int, str] = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip
"""Names of the types that are known and not read, for the error message."""
