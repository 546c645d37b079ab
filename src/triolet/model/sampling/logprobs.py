"""Log-probabilities and ranks of chosen, likeliest and prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from triolet.core.step_plan import PromptLogprobs, TokenLogprobs

ALL = -1  # as num_top: every token of the vocabulary


def token_logprobs(
    logprobs: Tensor, chosen: Tensor, num_top: Sequence[int], named: Sequence[tuple[int, ...]] = ()
) -> list[TokenLogprobs]:
    """Select the log-probabilities that each row asks for.

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


ROWS_AT_ONCE = 64  # prompt positions normalised together: about 40 MB in float32 with a large vocabulary


@attrs.frozen(eq=False)
class PromptShare:
    """Positions of one prompt with logits in this step."""

    epoch: int  # of the request's stay
    # Position of the first token that is looked up; the logits are those after the token before it.
    start: int
    token_ids: Tensor  # [num_positions] int64, the tokens that stand there
    num_top: int  # likeliest tokens to name at each position; -1 for all


def prompt_logprobs(shares: Sequence[PromptShare], logits: Tensor) -> tuple[PromptLogprobs, ...]:
    """Compute the log-probabilities of prompt tokens, from the model's own distribution in every `logprobs_mode`.

    Args:
        shares: in the order of their logits.
        logits: [num_positions of all shares, vocab_size] of any floating dtype.
    """
    # a long prompt is computed in chunks: a step gives some of its positions, and the journal joins them
    parts = logits.split([len(share.token_ids) for share in shares])
    return tuple(
        PromptLogprobs(share.epoch, share.start, tuple(_positions(share, part)))
        for share, part in zip(shares, parts, strict=True)
    )


def _positions(share: PromptShare, logits: Tensor) -> list[TokenLogprobs]:
    found: list[TokenLogprobs] = []
    token_ids = share.token_ids.to(logits.device)
    for some, ids in zip(logits.split(ROWS_AT_ONCE), token_ids.split(ROWS_AT_ONCE), strict=True):
        normalised = some.log_softmax(dim=1, dtype=torch.float32)
        found += token_logprobs(normalised, ids, [share.num_top] * len(ids))
    return found
