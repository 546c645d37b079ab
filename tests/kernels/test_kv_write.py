from __future__ import annotations

import pytest
import torch

from tests.kernels.targets import Target, on_every_triton_target
from triolet.errors import KernelShapeError
from triolet.kernels.kv_write import kv_write, kv_write_reference, kv_write_triton


def test_each_token_lands_in_its_slot_and_nothing_else_changes() -> None:
    new, cache = torch.randn(4, 2, 8), torch.full((3, 4, 2, 8), float("nan"))
    kv_write(new, cache, torch.tensor([5, 0, -1, 11]))
    slots = cache.flatten(0, 1)
    assert slots[5].equal(new[0])
    assert slots[0].equal(new[1])
    assert slots[11].equal(new[3])
    assert slots.isnan().all(dim=(1, 2)).sum() == 12 - 3


@on_every_triton_target
@pytest.mark.parametrize("head_dim", [8, 24, 128])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_triton_writes_the_same_bits(
    target: Target, num_tokens: int, num_kv_heads: int, head_dim: int
) -> None:
    merged = target.randn(num_tokens, 2 * num_kv_heads, head_dim)
    new = merged[:, num_kv_heads:]  # a view with gaps, as a merged projection gives
    slot_mapping = torch.randperm(48)[:num_tokens].to(target.device)
    slot_mapping[::5] = -1
    written = torch.full((3, 16, num_kv_heads, head_dim), 7.0, dtype=target.dtype, device=target.device)
    expected = written.clone()
    kv_write_triton(new, written, slot_mapping)
    kv_write_reference(new, expected, slot_mapping)
    assert written.equal(expected)


def test_a_step_of_padding_alone_writes_nothing() -> None:
    cache = torch.zeros(2, 4, 1, 8)
    kv_write(torch.ones(3, 1, 8), cache, torch.tensor([-1, -1, -7]))
    assert cache.eq(0).all()


@pytest.mark.parametrize(
    ("new", "cache", "slot_mapping"),
    [
        (torch.zeros(2, 1, 8), torch.zeros(2, 4, 2, 8), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 1, 8), torch.zeros(2, 4, 1, 16), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 1, 8), torch.zeros(2, 4, 1, 8), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(2, 1, 8), torch.zeros(2, 4, 1, 8).half(), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 1, 8), torch.zeros(2, 4, 1, 16)[..., ::2], torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 1, 16)[..., ::2], torch.zeros(2, 4, 1, 8), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 1, 8), torch.zeros(2, 4, 1, 8, device="meta"), torch.zeros(2, dtype=torch.int64)),
    ],
    ids=["heads", "head_dim", "num_tokens", "dtype", "cache with gaps", "rows with gaps", "device"],
)
def test_tensors_that_do_not_fit_together_are_refused(
    new: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    with pytest.raises(KernelShapeError, match="must agree"):
        kv_write(new, cache, slot_mapping)
