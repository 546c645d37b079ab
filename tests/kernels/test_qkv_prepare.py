"""One launch does to queries, keys and values what norms, rotation and cache writes do one after the other."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.targets import Target, on_every_triton_target
from tests.kernels.test_rotary import cos_sin_table
from triolet.errors import KernelShapeError
from triolet.kernels.qkv_prepare import HeadNorms, qkv_prepare, qkv_prepare_reference, qkv_prepare_triton

NUM_HEADS, NUM_KV_HEADS = 3, 2


@on_every_triton_target
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "offset"),
    [(16, 16, 0.0), (24, 16, None), (80, 32, 1.0), (64, 64, None), (40, 0, 0.0), (8, 0, None)],
)
def test_triton_agrees_with_norms_rotation_and_writes_and_touches_nothing_else(
    target: Target, head_dim: int, rotary_dim: int, offset: float | None
) -> None:
    num_tokens, all_heads = 5, NUM_HEADS + 2 * NUM_KV_HEADS
    wide = target.randn(num_tokens, all_heads + 1, head_dim)  # rows with a gap between them
    heads = wide[:, :all_heads]
    table = cos_sin_table(rotary_dim).to(target.device) if rotary_dim else None
    norms = None
    if offset is not None:
        weights = target.randn(2, head_dim)
        norms = HeadNorms(query_weight=weights[0], key_weight=weights[1], eps=1e-5, weight_offset=offset)
    slots = torch.tensor([7, -1, 0, 30, 12]).to(target.device)
    positions = torch.tensor([3, 0, 63, 1, 20]).to(target.device)
    empty = torch.full((2, 16, NUM_KV_HEADS, head_dim), 7.0, dtype=target.dtype, device=target.device)
    keys, values, expected_keys, expected_values = (empty.clone() for _ in range(4))
    expected = qkv_prepare_reference(
        heads.clone(), expected_keys, expected_values, slots, positions,
        num_heads=NUM_HEADS, norms=norms, cos_sin=table,
    )  # fmt: skip
    before = wide.clone()
    got = qkv_prepare_triton(
        heads, keys, values, slots, positions, num_heads=NUM_HEADS, norms=norms, cos_sin=table
    )
    assert got.data_ptr() == wide.data_ptr()
    torch.testing.assert_close(got, expected, **target.tolerance)
    torch.testing.assert_close(keys, expected_keys, **target.tolerance)
    assert values.equal(expected_values)
    assert wide[:, NUM_HEADS:].equal(before[:, NUM_HEADS:])


def test_tensors_that_do_not_fit_together_are_refused() -> None:
    heads, cache, one = torch.zeros(1, 4, 8), torch.zeros(1, 4, 1, 8), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(KernelShapeError, match="heads and caches"):
        qkv_prepare(heads, cache, cache, one, one, num_heads=3, norms=None, cos_sin=None)
    with pytest.raises(KernelShapeError, match="dtype"):
        qkv_prepare(heads.half(), cache, cache, one, one, num_heads=2, norms=None, cos_sin=None)
    gaps = torch.zeros(1, 4, 1, 16)[..., ::2]
    with pytest.raises(KernelShapeError, match="contiguous caches"):
        qkv_prepare(heads, gaps, gaps, one, one, num_heads=2, norms=None, cos_sin=None)
