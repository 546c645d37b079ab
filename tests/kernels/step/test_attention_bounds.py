"""Attention in a captured step has bounds of the lengths from the host, and the lengths from memory."""

from __future__ import annotations

import attrs
import pytest
import torch

from tests.kernels.targets import PagedCase, Target, on_every_triton_target
from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.kernels.paged_attention import paged_attention_triton

pytest.importorskip("triton")


@on_every_triton_target
@pytest.mark.parametrize("longest", [600])
def test_bounds_of_the_lengths_give_the_bits_of_the_lengths(target: Target, longest: int) -> None:
    lens = [(1, 1), (1, 33), (1, longest)]
    case = PagedCase.make(lens, target=target)
    fields = {
        field.name: getattr(case.metadata, field.name)
        for field in attrs.fields(AttentionMetadata)
        if field.init
    }
    bounded = AttentionMetadata(**(fields | {"seq_lens_host": (2000,) * len(lens)}))
    exact, same = (
        paged_attention_triton(case.query, case.keys, case.values, metadata, scale=case.scale)
        for metadata in (case.metadata, bounded)
    )
    torch.testing.assert_close(exact.double().cpu(), case.truth(), **target.tolerance, check_dtype=False)
    assert torch.equal(exact, same)
