"""What the runner remembers of one request that it is computing: its tokens, and how far they are computed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from triolet.core.plan import PlanRow, RowStart
from triolet.model.prompt_logprobs import PromptShare
from triolet.model.sampling_row import SamplingRow

Int64s = npt.NDArray[np.int64]


class Row:
    """One request in the table.

    Args:
        start: the request.
        vocab_size: of the model.
    """

    __slots__ = (
        "_tokens",
        "epoch",
        "mask",
        "num_blocks",
        "num_computed_tokens",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_tokens",
        "request_id",
        "sampling",
    )

    def __init__(self, start: RowStart, vocab_size: int) -> None:
        self.request_id = start.request_id
        self.epoch = start.epoch
        self._tokens: Int64s = np.array(start.prompt_token_ids + start.output_token_ids, dtype=np.int64)
        self.num_tokens = len(self._tokens)
        self.num_prompt_tokens = len(start.prompt_token_ids)
        self.num_prompt_logprobs = start.params.prompt_logprobs if start.wants_prompt_logprobs else None
        # None until the first step, whose start is behind whatever the prefix cache had.
        self.num_computed_tokens: int | None = None
        self.num_blocks = 0
        self.mask: bytes | None = None  # of the step's token
        self.sampling = SamplingRow(
            params=start.params,
            seed=start.seed,
            vocab_size=vocab_size,
            prompt_token_ids=start.prompt_token_ids,
            output_token_ids=start.output_token_ids,
            ending_token_ids=start.ending_token_ids,
            bad_words_token_ids=start.bad_words_token_ids,
        )

    def tokens(self, start: int, end: int) -> Int64s:
        """Tokens of prompt and answer."""
        return self._tokens[start:end]

    def prompt_share(self, start: int, end: int) -> PromptShare | None:
        """What a step that computes `start : end` tells of the prompt, if that is wanted."""
        end = min(end, self.num_prompt_tokens - 1)  # after the last one comes the answer
        if self.num_prompt_logprobs is None or start >= end:
            return None
        token_ids = torch.from_numpy(self.tokens(start + 1, end + 1))
        return PromptShare(self.epoch, start + 1, token_ids, self.num_prompt_logprobs)

    def advance(self, planned: PlanRow) -> None:
        """Take note of what a step computes of it; the draft is written where its tokens will be if they come true."""
        self.num_computed_tokens, self.mask = planned.start + planned.num_tokens, planned.mask
        if draft := planned.draft_token_ids:
            self._make_room(len(draft))
            self._tokens[self.num_tokens : self.num_tokens + len(draft)] = draft

    def go_on(self) -> None:
        """A run computes the token that it sampled last."""
        self.num_computed_tokens = self.num_tokens

    def token(self, position: int) -> int:
        """One of them."""
        return int(self._tokens[position])

    def append(self, token_id: int) -> bool:
        """Remember a token that was sampled.

        Returns:
            Whether it is what the draft said, so that the token after it was sampled, too. If it is not, what was
            computed behind it counts for nothing.
        """
        place, num_computed = self.num_tokens, self.num_computed_tokens or 0
        was_guessed = place < num_computed and int(self._tokens[place]) == token_id
        self._make_room(1)
        self._tokens[place] = token_id
        self.num_tokens += 1
        if not was_guessed:
            self.num_computed_tokens = min(num_computed, place)
        self.sampling.append(token_id)
        return was_guessed

    def _make_room(self, count: int) -> None:
        if self.num_tokens + count > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * self.num_tokens + 16 + count)

    def sampling_after(self, num_guessed: int) -> SamplingRow:
        """What the sampler looks at after so many tokens of the draft: itself, as it will be if they come true."""
        if not num_guessed:
            return self.sampling
        return self.sampling.after(self.tokens(self.num_tokens, self.num_tokens + num_guessed).tolist())
