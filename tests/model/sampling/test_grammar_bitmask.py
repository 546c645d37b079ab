"""What is masked is not chosen; everything else stays as the model said."""

from __future__ import annotations

import pytest
import torch

from triolet.model.sampling.logits_processors import apply_bitmasks_

NEVER = float("-inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [8, 13, 320])
def test_masks_take_out_what_has_no_bit(dtype: torch.dtype, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(3, vocab_size, generator=generator).to(dtype)
    allowed = torch.rand(vocab_size, generator=generator) < 0.5
    mask = bytes(
        sum(int(bit) << place for place, bit in enumerate(allowed[start : start + 8]))
        for start in range(0, vocab_size, 8)
    )
    masked = logits.clone()
    apply_bitmasks_(masked, [None, mask, None])
    assert torch.equal(masked[[0, 2]], logits[[0, 2]])
    assert torch.equal(masked[1][allowed], logits[1][allowed])
    assert (masked[1][~allowed] == NEVER).all()


def test_tokens_that_a_short_mask_says_nothing_of_may_not_come() -> None:
    logits = torch.zeros(1, 20)
    apply_bitmasks_(logits, [b"\xff"])
    assert (logits[0, :8] == 0).all()
    assert (logits[0, 8:] == NEVER).all()


def test_bits_behind_the_vocabulary_are_ignored() -> None:
    logits = torch.zeros(1, 5)
    apply_bitmasks_(logits, [b"\xe1\xff\xff"])
    assert logits[0].tolist() == [0.0, NEVER, NEVER, NEVER, NEVER]
