"""Log-probabilities for those who ask: which tokens they are told of, and their ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from triolet.core.plan import TokenLogprobs

ALL = -1


def token_logprobs(
    logprobs: Tensor, chosen: Tensor, num_top: Sequence[int], named: Sequence[tuple[int, ...]] = ()
) -> list[TokenLogprobs]:
    """Pick what each row asks for.

    Args:
        logprobs: [num_rows, vocab_size] float32, normalised; or logits.
        chosen: [num_rows] int64, the token that each row got.
        num_top: for each row the number of likeliest tokens to name; -1 for all.
        named: for each row the tokens to name instead of the likeliest, if there are any.
    Returns:
        One per row. The rank of the chosen token is the number of tokens at least as likely: 1 for a single likeliest.
    """
    own = logprobs.gather(1, chosen[:, None])
    ranks = (logprobs >= own).sum(dim=1).tolist()
    tops = _tops(logprobs, num_top)
    for row, token_ids in enumerate(named):
        if token_ids:
            tops[row] = list(token_ids), logprobs[row, list(token_ids)].tolist()
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
