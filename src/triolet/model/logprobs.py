"""Log-probabilities for those who ask: of the model's own distribution, before masks, penalties and temperature."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from triolet.core.plan import TokenLogprobs

ALL = -1


def token_logprobs(logprobs: Tensor, chosen: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Pick what each row asks for.

    Args:
        logprobs: [num_rows, vocab_size] float32, normalised.
        chosen: [num_rows] int64, the token that each row got.
        num_top: for each row the number of likeliest tokens to name; -1 for all.
    Returns:
        One per row. The rank of the chosen token is the number of tokens at least as likely: 1 for a single likeliest.
    """
    own = logprobs.gather(1, chosen[:, None])
    ranks = (logprobs >= own).sum(dim=1).tolist()
    tops = _tops(logprobs, num_top)
    columns = zip(chosen.tolist(), own[:, 0].tolist(), ranks, tops, strict=True)
    return [
        TokenLogprobs((token_id, *top_ids), (logprob, *top_logprobs), rank)
        for token_id, logprob, rank, (top_ids, top_logprobs) in columns
    ]


def _tops(logprobs: Tensor, num_top: Sequence[int]) -> list[tuple[list[int], list[float]]]:
    vocab_size = logprobs.shape[1]
    counts = [vocab_size if count == ALL else min(count, vocab_size) for count in num_top]
    top = torch.topk(logprobs, max(counts), dim=1)
    rows = zip(top.indices.tolist(), top.values.tolist(), counts, strict=True)
    return [(token_ids[:count], values[:count]) for token_ids, values, count in rows]
