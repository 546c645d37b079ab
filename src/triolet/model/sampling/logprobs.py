"""Log-probabilities and ranks of chosen, likeliest and prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    ranks = (logprobs >= own).sum(dim=1)
    counts = [logprobs.shape[1] if count == ALL else min(count, logprobs.shape[1]) for count in num_top]
    top = torch.topk(logprobs, max(counts), dim=1)
    columns = [chosen, own[:, 0], ranks, top.indices, top.values]
    asked = [(row, token_ids) for row, token_ids in enumerate(named) if token_ids]
    if asked:
        columns.append(_of_named(logprobs, asked))
    token_ids_of, own_of, ranks_of, top_ids, top_logprobs, *named_logprobs = read_together(columns)
    tops = [
        (ids[:count], values[:count])
        for ids, values, count in zip(top_ids, top_logprobs, counts, strict=True)
    ]
    for values in named_logprobs:
        for (row, token_ids), found in zip(asked, values, strict=True):
            tops[row] = list(token_ids), found[: len(token_ids)]
    return [
        TokenLogprobs((token_id, *ids), (logprob, *values), rank)
        for token_id, logprob, rank, (ids, values) in zip(token_ids_of, own_of, ranks_of, tops, strict=True)
    ]


def _of_named(logprobs: Tensor, asked: Sequence[tuple[int, tuple[int, ...]]]) -> Tensor:
    # [num_asked, the most token ids of a row] log-probabilities of the tokens named by some rows
    most = max(len(token_ids) for _, token_ids in asked)
    # Before the row's token ids stands its number, behind them padding.
    places = torch.tensor([(row, *ids, *[0] * (most - len(ids))) for row, ids in asked]).to(logprobs.device)
    return logprobs[places[:, :1], places[:, 1:]]


def read_together(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """Read tensors of float32 or of integers below 2**53, as `Tensor.tolist` does, with one wait for their device."""
    if not tensors[0].is_cuda:
        return [tensor.tolist() for tensor in tensors]
    return unpack(pack(tensors).cpu(), tensors)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors to one in a row: float64 holds them all."""
    return torch.cat([tensor.flatten().to(torch.float64) for tensor in tensors])


def unpack(packed: Tensor, tensors: Sequence[Tensor]) -> list[list[Any]]:
    """Return the lists that `tensors` were before they were packed; of themselves only shape and dtype are read."""
    parts = packed.split([tensor.numel() for tensor in tensors])
    return [
        part.view(tensor.shape).to(tensor.dtype).tolist() for part, tensor in zip(parts, tensors, strict=True)
    ]


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
