"""The first thing that happens to logits: what may not come next is taken out, before anybody looks at the rest.

A mask comes as bits, one per token id, least significant first (as llguidance writes it); bits that are missing at its
end are those of tokens that may not come.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

NEVER = float("-inf")


def apply_masks_(logits: Tensor, masks: Sequence[bytes | None]) -> None:
    """Take what is masked out of the rows that have a mask, in place.

    Args:
        logits: [num_rows, vocab_size] of any floating dtype.
        masks: one per row; None leaves a row as it is.
    """
    rows = [row for row, mask in enumerate(masks) if mask is not None]
    if not rows:
        return
    vocab_size = logits.shape[1]
    num_bytes = (vocab_size + 7) // 8
    bits = np.zeros((len(rows), num_bytes), dtype=np.uint8)
    for place, row in enumerate(rows):
        mask = np.frombuffer(masks[row] or b"", dtype=np.uint8)[:num_bytes]
        bits[place, : len(mask)] = mask
    barred = torch.from_numpy(np.unpackbits(bits, axis=1, count=vocab_size, bitorder="little") == 0)
    index = torch.tensor(rows, device=logits.device)
    logits[index] = logits[index].masked_fill(barred.to(logits.device), NEVER)
