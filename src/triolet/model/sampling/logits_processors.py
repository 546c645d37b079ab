"""Change logits before a token is chosen, in vLLM's order.

    allowed_token_ids -> bad_words -> min_tokens -> logit_bias -> repetition -> frequency -> presence

Bad words and min_tokens both write -inf, in either order the same, and go in together. Nothing raises a token from
-inf: a bias is added to it, and penalties scale it or subtract from it.

Only the entries that change are touched: a request names a few tokens, and the others stay as the model said.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from triolet.model.sampling.sampling_row import SamplingRow, TokenCounts

NEVER = float("-inf")
LARGE = 1e30
"""Biases and penalties move a logit no further than this: far beyond what any model says, and a temperature still
leaves it a number."""


@attrs.frozen(eq=False)
class Entries:
    """Places in a [num_rows, vocab_size] tensor, each at most once, as two index tensors of one length."""

    rows: Tensor
    token_ids: Tensor

    @classmethod
    def of(cls, token_ids_of_row: Sequence[tuple[int, Sequence[int]]], device: torch.device) -> Entries:
        """From (row, its token ids) pairs."""
        rows = [row for row, token_ids in token_ids_of_row for _ in token_ids]
        token_ids = [token_id for _, token_ids in token_ids_of_row for token_id in token_ids]
        return cls(
            torch.tensor(rows, dtype=torch.int64, device=device),
            torch.tensor(token_ids, dtype=torch.int64, device=device),
        )

    @property
    def index(self) -> tuple[Tensor, Tensor]:
        """For `tensor[entries.index]`."""
        return self.rows, self.token_ids


class LogitEdits:
    """Changes that a batch of rows asks for; built once, applied every step while the batch stays the same.

    Args:
        rows: (index in the logits, row), for the rows with `has_edits`.
        device: where the logits are.
    """

    def __init__(self, rows: Sequence[tuple[int, SamplingRow]], device: torch.device) -> None:
        self._device = device
        self._allowed = self._allowed_entries(rows)
        self._banning = [(i, row) for i, row in rows if row.bad_words or row.params.min_tokens]
        self._bias = self._bias_entries(rows)
        self._penalties = Penalties.of([(i, row) for i, row in rows if row.counts is not None], device)

    def _allowed_entries(self, rows: Sequence[tuple[int, SamplingRow]]) -> tuple[Tensor, Entries] | None:
        allowed = [(i, ids) for i, row in rows if (ids := row.params.allowed_token_ids) is not None]
        if not allowed:
            return None
        return torch.tensor([i for i, _ in allowed], device=self._device), Entries.of(allowed, self._device)

    def _bias_entries(self, rows: Sequence[tuple[int, SamplingRow]]) -> tuple[Entries, Tensor] | None:
        biases = [(i, bias) for i, row in rows if (bias := row.params.logit_bias)]
        if not biases:
            return None
        values = [value for _, bias in biases for value in bias.values()]
        added = torch.tensor([min(max(value, -LARGE), LARGE) for value in values], dtype=torch.float32)
        return Entries.of([(i, tuple(bias)) for i, bias in biases], self._device), added.to(self._device)

    def apply_(self, logits: Tensor) -> None:
        """Edit in place.

        Args:
            logits: [num_rows, vocab_size] float32.
        """
        if self._allowed is not None:
            allowed_rows, kept = self._allowed
            # Kept aside while the whole row is barred.
            values = logits[kept.index]
            logits[allowed_rows] = NEVER
            logits[kept.index] = values
        if banned := [(i, ids) for i, row in self._banning if (ids := row.banned_token_ids())]:
            logits[Entries.of(banned, self._device).index] = NEVER
        if self._bias is not None:
            biased, added = self._bias
            logits[biased.index] += added
        if self._penalties is not None:
            self._penalties.apply_(logits)


@attrs.frozen(eq=False)
class Penalties:
    """Repetition, frequency and presence penalties of the rows that ask for one."""

    rows: tuple[int, ...]  # index of each in the logits
    counts: tuple[TokenCounts, ...]  # what each has said so far
    coefficients: Tensor  # [num_penalised_rows, 3] float32: repetition, frequency, presence

    @classmethod
    def of(cls, rows: Sequence[tuple[int, SamplingRow]], device: torch.device) -> Penalties | None:
        """For (index in the logits, row) pairs; None if there are none."""
        if not rows:
            return None
        coefficients = [
            (
                # A logit divided by it must stay a finite number.
                min(max(row.params.repetition_penalty, 1 / LARGE), LARGE),
                row.params.frequency_penalty,
                row.params.presence_penalty,
            )
            for _, row in rows
        ]
        return cls(
            tuple(i for i, _ in rows),
            tuple(row.counts for _, row in rows if row.counts is not None),
            torch.tensor(coefficients, dtype=torch.float32, device=device),
        )

    def apply_(self, logits: Tensor) -> None:
        """Edit in place: [num_rows, vocab_size] float32."""
        lengths = [len(counts.token_ids) for counts in self.counts]
        places = np.stack((np.repeat(self.rows, lengths), np.repeat(np.arange(len(lengths)), lengths)))
        rows, owners = torch.from_numpy(places).to(logits.device)
        token_ids = torch.from_numpy(np.concatenate([counts.token_ids for counts in self.counts])).to(
            logits.device
        )
        counts = torch.from_numpy(np.concatenate([counts.counts for counts in self.counts])).to(logits.device)
        repetition, frequency, presence = self.coefficients[owners].unbind(dim=1)
        before = logits[rows, token_ids]
        # Towards less likely on both sides of 0.
        scores = torch.where(before > 0, before / repetition, before * repetition)
        scores = scores - frequency * counts - presence * (counts > 0)
        # What was barred stays barred: the clamp would make it a number.
        logits[rows, token_ids] = torch.where(before == NEVER, before, scores.clamp_(-LARGE, LARGE))


def apply_bitmasks_(logits: Tensor, masks: Sequence[bytes | None]) -> None:
    """Apply grammar bitmasks to the logits, in place, before sampling and logprobs.

    Args:
        logits: [num_rows, vocab_size] of any floating dtype.
        masks: one per row; None leaves a row as it is. One bit per token id, least significant first, as llguidance
            writes it; tokens past the end of the mask are barred.
    """
    rows = [row for row, mask in enumerate(masks) if mask is not None]
    if not rows:
        return
    vocab_size = logits.shape[1]
    num_bytes = (vocab_size + 7) // 8
    # Zeros bar the ids past the end of a mask: padding of the vocabulary.
    bits = np.zeros((len(rows), num_bytes), dtype=np.uint8)
    for place, row in enumerate(rows):
        mask = np.frombuffer(masks[row] or b"", dtype=np.uint8)[:num_bytes]
        bits[place, : len(mask)] = mask
    barred = torch.from_numpy(np.unpackbits(bits, axis=1, count=vocab_size, bitorder="little") == 0)
    index = torch.tensor(rows, device=logits.device)
    logits[index] = logits[index].masked_fill(barred.to(logits.device), NEVER)
