"""Log-probabilities of the tokens of prompts: the logits after each token say how likely the next one was.

A long prompt is computed in chunks, so a step gives a share of its positions; the journal puts the shares together.
They are of the model's own distribution, whatever `logprobs_mode` says of the answer: nothing is sampled here.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from triolet.core.plan import PromptLogprobs, TokenLogprobs
from triolet.model.logprobs import token_logprobs

ROWS_AT_ONCE = 64
"""Positions that are normalised together: in float32 and a long vocabulary they take some 40 MB."""


@attrs.frozen(eq=False)
class PromptShare:
    """Positions of one prompt whose logits a step computes.

    Args:
        epoch: of the request's stay.
        start: position of the first token that is looked up; the logits are those after the token before it.
        token_ids: [num_positions] int64, the tokens that stand there.
        num_top: likeliest tokens to name at each position; -1 for all.
    """

    epoch: int
    start: int
    token_ids: Tensor
    num_top: int


def prompt_logprobs(shares: Sequence[PromptShare], logits: Tensor) -> tuple[PromptLogprobs, ...]:
    """Look the prompts' tokens up.

    Args:
        shares: in the order of their logits.
        logits: [num_positions of all shares, vocab_size] of any floating dtype.
    """
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
