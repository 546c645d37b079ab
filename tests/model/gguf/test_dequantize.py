"""Blocks of every type become the float32 values that gguf-py makes of them, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from triolet.model.gguf.dequantize import dequantize
from triolet.model.gguf.ggml_types import REFUSED, TYPES


@pytest.mark.parametrize("number", TYPES, ids=lambda number: TYPES[number].name)
def test_random_bytes_become_the_bits_that_gguf_py_makes_of_them(number: int) -> None:
    kind = TYPES[number]
    blocks = np.random.default_rng(number).integers(0, 256, (2000, kind.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType(number)).reshape(2000, -1)
    values = dequantize(blocks, kind.name).reshape(2000, -1)
    assert values.shape == (2000, kind.block_values)
    np.testing.assert_array_equal(values.view(np.uint32), expected.view(np.uint32))


def test_names_and_sizes_of_types_are_those_of_gguf_py() -> None:
    for number, kind in TYPES.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert (kind.name, (kind.block_values, kind.block_bytes)) == (
            theirs.name,
            gguf.GGML_QUANT_SIZES[theirs],
        )
    for number, name in REFUSED.items():
        assert gguf.GGMLQuantizationType(number).name == name
    assert not TYPES.keys() & REFUSED.keys()
