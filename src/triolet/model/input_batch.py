"""The runner's table of rows, one per request that is being computed, and the input tensors of a step.

A plan holds only what changed; everything else is kept here. A plan that contradicts what is remembered is
a bug of ours and raises `InvariantViolated` before anything is computed: on a GPU a wrong index would poison the
process, and on a CPU it would write into another request's blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from triolet.core.request.pooling_params import PoolingParams
from triolet.core.request.prompt_adapter import SoftPrompt
from triolet.core.step_plan import PlanRow, RowStart, StepPlan
from triolet.errors import InvalidParams, InvariantViolated
from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.model.interface import ForwardBatch, LayerCache
from triolet.model.memory.block_tables import BlockTables
from triolet.model.sampling.logprobs import PromptShare
from triolet.model.sampling.sampling_row import SamplingRow

Int64s = npt.NDArray[np.int64]


class Row:
    """Tokens of one request that is being computed, and how far they are computed.

    Args:
        start: the request.
        vocab_size: of the model.
    """

    __slots__ = (
        "_tokens",
        "adapter_slot",
        "epoch",
        "has_failed",
        "mask",
        "num_blocks",
        "num_computed_tokens",
        "num_pending",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_tokens",
        "pooled",
        "pooling",
        "request_id",
        "sampling",
        "soft_prompt",
    )

    def __init__(self, start: RowStart, vocab_size: int) -> None:
        self.request_id = start.request_id
        self.epoch = start.epoch
        self.adapter_slot = start.adapter_slot
        self._tokens: Int64s = np.array(start.prompt_token_ids + start.output_token_ids, dtype=np.int64)
        self.num_tokens = len(self._tokens)
        self.num_pending = 0  # tokens that are sampled on the device and not read yet
        self.num_prompt_tokens = len(start.prompt_token_ids)
        self.num_prompt_logprobs = start.params.prompt_logprobs if start.wants_prompt_logprobs else None
        # None until the first step, which starts after the tokens found in the prefix cache.
        self.num_computed_tokens: int | None = None
        self.num_blocks = 0
        self.mask: bytes | None = None  # of the step's token
        self.has_failed = (
            False  # it gave no token: a plan that was made before that was known may still name it
        )
        self.pooling = start.pooling
        self.soft_prompt = start.soft_prompt
        # Penalties do not count placeholders.
        num_virtual = 0 if start.soft_prompt is None else start.soft_prompt.num_virtual_tokens
        self.pooled: Tensor | None = None  # [hidden_size] float32, what pooling keeps of the prompt so far
        self.sampling = SamplingRow(
            params=start.params,
            seed=start.seed,
            vocab_size=vocab_size,
            prompt_token_ids=start.prompt_token_ids[num_virtual:],
            output_token_ids=start.output_token_ids,
            ending_token_ids=start.ending_token_ids,
            bad_words_token_ids=start.bad_words_token_ids,
        )

    def tokens(self, start: int, end: int) -> Int64s:
        """Return the tokens of prompt and answer at positions `start : end`."""
        return self._tokens[start:end]

    def prompt_share(self, start: int, end: int) -> PromptShare | None:
        """Return the prompt positions with log-probabilities from a step over `start : end`; None if not wanted."""
        end = min(end, self.num_prompt_tokens - 1)  # after the last one comes the answer
        if self.num_prompt_logprobs is None or start >= end:
            return None
        token_ids = torch.from_numpy(self.tokens(start + 1, end + 1))
        return PromptShare(self.epoch, start + 1, token_ids, self.num_prompt_logprobs)

    def advance(self, planned: PlanRow) -> None:
        """Record a step's part of this row."""
        # draft tokens are written where they will be if they are accepted
        self.num_computed_tokens, self.mask = planned.start + planned.num_tokens, planned.mask
        if draft := planned.draft_token_ids:
            self._make_room(len(draft))
            self._tokens[self.num_tokens : self.num_tokens + len(draft)] = draft

    def soft_prompt_share(self, planned: PlanRow, first: int) -> SoftPromptShare | None:
        """Return the virtual tokens that a step computes; None if it computes none.

        Args:
            planned: the step's part of this row.
            first: index of the first token of it in the step.
        """
        if self.soft_prompt is None or planned.start >= self.soft_prompt.num_virtual_tokens:
            return None
        num_tokens = min(planned.num_tokens, self.soft_prompt.num_virtual_tokens - planned.start)
        return SoftPromptShare(self, self.soft_prompt, first, planned.start, num_tokens)

    def go_on(self) -> None:
        """Note that a multi-step run computes the token that it sampled last."""
        self.num_computed_tokens = self.num_tokens

    def token(self, position: int) -> int:
        """Return the token at a position."""
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

    def settle(self, token_id: int) -> None:
        """Remember a token that was sampled on the device, whatever has been planned behind it since."""
        self._make_room(1)
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        self.sampling.append(token_id)

    def _make_room(self, count: int) -> None:
        if self.num_tokens + count > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * self.num_tokens + 16 + count)

    def sampling_after(self, num_guessed: int) -> SamplingRow:
        """Return the sampler's row as it will be if this many draft tokens are accepted."""
        if not num_guessed:
            return self.sampling
        return self.sampling.after(self.tokens(self.num_tokens, self.num_tokens + num_guessed).tolist())


@attrs.frozen(eq=False)
class SoftPromptShare:
    """Tokens of a step that are virtual."""

    row: Row
    soft_prompt: SoftPrompt
    first: int  # index of the first of them in the step
    start: int  # and in the soft prompt
    num_tokens: int


@attrs.frozen(eq=False)
class PoolShare:
    """Tokens of a step that belong to a row that is pooled."""

    row: Row
    params: PoolingParams
    first: int  # index of the first of them in the step
    num_tokens: int
    end: int  # position in the prompt after the last of them
    is_last: bool  # whether the prompt ends with them
    token_ids: Tensor  # [num_tokens] int64


@attrs.frozen(eq=False)
class StepInput:
    """Tensors of a plan."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    attention: AttentionMetadata  # where the sequences and their blocks are
    # [num_logits] int64: the tokens after which something is sampled, then those of prompts after which the
    # next one is looked up.
    logits_indices: Tensor
    # The rows that the first of these belong to: each once, and once more for every token of its draft.
    sampled: tuple[Row, ...]
    prompted: tuple[PromptShare, ...] = ()  # what the others are for
    pooled: tuple[PoolShare, ...] = ()  # rows of which nothing is sampled
    # [num_tokens] int64 on the CPU, the slot of each token's adapter, negative for none; None if no row has one.
    adapter_slots: Tensor | None = None
    soft_prompts: tuple[SoftPromptShare, ...] = ()
    further_attention: tuple[AttentionMetadata, ...] = ()  # of the cache groups after the first one

    def token_type_ids(self) -> Tensor:
        """Return 1 for the tokens of the second text of each pair, 0 for all others; [num_tokens] int64."""
        types = torch.zeros_like(self.token_ids)
        for share in self.pooled:
            if (start := share.params.token_type_start) is not None:
                types[share.first + start : share.first + share.num_tokens] = 1
        return types

    def forward_batch(self, cache: tuple[LayerCache, ...], soft_prompts: SoftPrompts) -> ForwardBatch:
        """Return the model's part of it, for a step over this cache."""
        batch = ForwardBatch(
            token_ids=self.token_ids,
            positions=self.positions,
            cache=cache,
            attention=self.attention,
            logits_indices=self.logits_indices,
            adapter_slots=self.adapter_slots,
            further_attention=self.further_attention,
        )
        return soft_prompts.applied(self.soft_prompts, batch) if self.soft_prompts else batch


class SoftPrompts(Protocol):
    """Weights of soft prompts."""

    def applied(self, shares: tuple[SoftPromptShare, ...], batch: ForwardBatch) -> ForwardBatch:
        """Return a step's batch with the soft prompts of its rows."""
        ...


@attrs.frozen(eq=False)
class Decoding:
    """Input tensors that stay the same while the same rows decode one token each; see `StepInput`."""

    rows: tuple[Row, ...]
    row_ids: Int64s
    places: Int64s
    cu_query_lens: Tensor
    logits_indices: Tensor
    query_lens: tuple[int, ...]
    adapter_slots: Tensor | None


def _pool_share(planned: PlanRow, row: Row, params: PoolingParams, step_end: int) -> PoolShare:
    end = planned.start + planned.num_tokens
    return PoolShare(
        row,
        params,
        step_end - planned.num_tokens,
        planned.num_tokens,
        end,
        planned.sample,
        torch.from_numpy(row.tokens(planned.start, end)),
    )


def _is_plain_decode(planned: PlanRow, row: Row) -> bool:
    """Tell whether this row computes one token and samples the next, without a draft or prompt log-probabilities."""
    return (
        planned.num_tokens == 1
        and planned.sample
        and row.pooling is None
        and not planned.draft_token_ids
        and not row.prompt_share(planned.start, planned.start + 1)
    )


def _adapter_slots(rows: Sequence[Row], query_lens: Sequence[int]) -> Tensor | None:
    if all(row.adapter_slot is None for row in rows):
        return None
    slots = [-1 if row.adapter_slot is None else row.adapter_slot for row in rows]
    return torch.from_numpy(np.repeat(np.array(slots, dtype=np.int64), query_lens))


class RowTable:
    """Rows by row id, and their block tables.

    Args:
        num_blocks: of the KV cache.
        block_size: tokens in a block.
        max_num_seqs: rows of the table.
        max_model_len: longest sequence, tokens.
        vocab_size: of the model.
        device: where step inputs go.
        num_groups: cache groups.
        has_holes: whether one of them has a window.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        device: torch.device,
        num_groups: int = 1,
        has_holes: bool = False,
    ) -> None:
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._device = device
        self.highest_block_id = -1  # of those that any row has had
        self._rows: list[Row | None] = [None] * max_num_seqs
        self._decoding = self._decoding_of((), ())
        self._block_tables = BlockTables(
            num_groups=num_groups,
            num_rows=max_num_seqs,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            device=device,
            has_holes=has_holes,
        )

    def clear(self) -> None:
        """Forget every row."""
        self._rows = [None] * len(self._rows)

    def decoded(self, plan: StepPlan) -> tuple[Row, ...]:
        """Return the rows of a plan that only decodes one unconstrained token per row; empty for any other plan."""
        if plan.starts:
            return ()
        rows = []
        for planned in plan.rows:
            row = self._rows[self._checked(planned.row_id)]
            if (
                row is None
                or row.has_failed
                or planned.mask is not None
                or not _is_plain_decode(planned, row)
            ):
                return ()
            rows.append(row)
        return tuple(rows)

    def adapted_rows(self, plan: StepPlan) -> list[Row]:
        """Return the rows of a plan that have an adapter."""
        rows = [self._rows[self._checked(planned.row_id)] for planned in plan.rows]
        return [row for row in rows if row is not None and row.adapter_slot is not None]

    def take(self, plan: StepPlan) -> StepInput:
        """Apply a plan to the table and build the input of its step.

        Raises:
            InvariantViolated: the plan contradicts the table, which may now hold half of it: `clear` it.
        """
        return self.input_of(plan, self.apply(plan))

    def apply(self, plan: StepPlan) -> list[Row]:
        """Apply a plan to the table and return the rows of its step; see `take`."""
        self._begin(plan)
        if not plan.rows or len({row.row_id for row in plan.rows}) != len(plan.rows):
            raise InvariantViolated(f"step {plan.step_id} must have rows, each once; got {plan.rows}")
        return [self._advance(planned, plan.num_steps - 1) for planned in plan.rows]

    def input_of(self, plan: StepPlan, rows: Sequence[Row]) -> StepInput:
        """Build the input of a plan's step from the rows that `apply` returned."""
        return self._input(plan.rows, rows, plan.num_steps - 1)

    def blocks_of(self, row_id: int, first: int, end: int) -> npt.NDArray[np.int32]:
        """Return the blocks at places `first : end` of a row's block table, of the first cache group."""
        return self._block_tables.of_row(row_id, first, end)

    def _begin(self, plan: StepPlan) -> None:
        for row_id in plan.ended:
            self._rows[self._checked(row_id)] = None
        for start in plan.starts:
            self._start(start)

    def without_failed(self, plan: StepPlan) -> StepPlan:
        """Return a plan without the rows that failed in the step before it."""
        failed = {
            planned.row_id
            for planned in plan.rows
            if (row := self._rows[self._checked(planned.row_id)]) is not None and row.has_failed
        }.difference(plan.ended)
        if not failed:
            return plan
        left = tuple([planned for planned in plan.rows if planned.row_id not in failed])
        return attrs.evolve(
            plan, rows=left, loads=tuple([load for load in plan.loads if load.row_id not in failed])
        )

    def note(self, plan: StepPlan) -> None:
        """Apply a plan to the table as far as it starts rows and gives them blocks; nothing of it is computed."""
        self._begin(plan)
        for planned in plan.rows:
            row = self._rows[self._checked(planned.row_id)]
            if row is not None and planned.new_block_ids:
                self._add_blocks(row, planned)

    def take_loaded(self, plan: StepPlan, loaded: Iterable[PlanRow]) -> StepPlan:
        """Apply a plan to the table as far as it starts rows, and has rows whose KV was loaded.

        Args:
            plan: without those rows.
            loaded: those rows, as they were planned.
        Returns:
            What is left of the plan, for `take`.
        Raises:
            InvariantViolated: see `take`.
        """
        self._begin(plan)
        for planned in loaded:
            self._advance(planned, 0)
        return attrs.evolve(plan, ended=(), starts=())

    def note_loaded(self, row_id: int, end: int) -> None:
        """Note that the KV of a row's first `end` tokens is there, before a plan that begins after them is taken."""
        if (row := self._rows[self._checked(row_id)]) is not None and row.num_computed_tokens is not None:
            row.num_computed_tokens = end

    def take_back(self, plan: StepPlan) -> None:
        """Undo `take` for a step that was not computed."""
        for planned in plan.rows:
            if (row := self._rows[planned.row_id]) is not None:
                row.num_computed_tokens = planned.start

    def _checked(self, row_id: int) -> int:
        if not 0 <= row_id < len(self._rows):
            raise InvariantViolated(f"row_id must be in [0, {len(self._rows)}); got {row_id}")
        return row_id

    def _start(self, start: RowStart) -> None:
        if (occupant := self._rows[self._checked(start.row_id)]) is not None:
            raise InvariantViolated(f"row {start.row_id} is {occupant.request_id}'s; got {start.request_id}")
        row = Row(start, self._vocab_size)
        if not 0 < row.num_tokens <= self._max_model_len:
            raise InvariantViolated(
                f"{start.request_id} must have 1 to {self._max_model_len} tokens; got {row.num_tokens}"
            )
        self._check_vocabulary(start, row)
        self._rows[start.row_id] = row

    def _check_vocabulary(self, start: RowStart, row: Row) -> None:
        try:
            start.params.check_vocabulary(self._vocab_size)
        except InvalidParams as error:
            raise InvariantViolated(f"{start.request_id} was admitted with {error}") from error
        token_ids = row.tokens(0, row.num_tokens)
        if token_ids.min() < 0 or token_ids.max() >= self._vocab_size:
            raise InvariantViolated(
                f"token ids of {start.request_id} must be in [0, {self._vocab_size}); "
                f"got {token_ids.min()} to {token_ids.max()}"
            )

    def _advance(self, planned: PlanRow, further: int) -> Row:
        # check one row's share against the table, then record its progress and blocks, enough for `further` tokens
        row = self._rows[self._checked(planned.row_id)]
        if row is None:
            raise InvariantViolated(f"row {planned.row_id} must have been started; got {planned}")
        end = planned.start + planned.num_tokens
        if planned.start < 0 or row.num_computed_tokens not in (None, planned.start):
            raise InvariantViolated(
                f"start must be {row.num_computed_tokens or 0} for {row.request_id}; got {planned}"
            )
        known_end = end - len(planned.draft_token_ids)
        num_tokens = row.num_tokens + row.num_pending
        if not planned.start < known_end <= num_tokens or planned.sample != (known_end == num_tokens):
            raise InvariantViolated(f"{row.request_id} has {num_tokens} tokens; got {planned}")
        if planned.draft_token_ids:
            self._check_draft(row, planned)
        if planned.new_block_ids:
            self._add_blocks(row, planned)
        if row.num_blocks * self._block_size < end + further:
            raise InvariantViolated(
                f"{row.request_id} must have blocks for {end + further} tokens; "
                f"got {row.num_blocks} of {self._block_size}"
            )
        row.advance(planned)
        return row

    def _check_draft(self, row: Row, planned: PlanRow) -> None:
        draft = planned.draft_token_ids
        if (
            not planned.sample
            or planned.mask is not None
            or row.num_tokens + len(draft) > self._max_model_len
        ):
            raise InvariantViolated(f"{row.request_id} cannot take draft tokens; got {planned}")
        if not 0 <= min(draft) <= max(draft) < self._vocab_size:
            raise InvariantViolated(
                f"token ids of {row.request_id} must be in [0, {self._vocab_size}); got {planned}"
            )

    def _add_blocks(self, row: Row, planned: PlanRow) -> None:
        block_ids = planned.new_block_ids
        row.num_blocks = self._block_tables.add(planned.row_id, row.num_blocks, block_ids, row.request_id)
        self.highest_block_id = max(self.highest_block_id, *block_ids)

    def _input(self, plan_rows: Sequence[PlanRow], rows: Sequence[Row], further: int) -> StepInput:
        if all(map(_is_plain_decode, plan_rows, rows)):
            return self._decode_input(plan_rows, tuple(rows), further)
        query_lens = tuple(planned.num_tokens for planned in plan_rows)
        seq_lens = tuple(planned.start + planned.num_tokens for planned in plan_rows)
        ends = np.cumsum(query_lens, dtype=np.int64)
        token_ids = np.concatenate(
            [
                row.tokens(planned.start, planned.start + planned.num_tokens)
                for planned, row in zip(plan_rows, rows, strict=True)
            ]
        )
        # A sequence's tokens stand at ends - query_len ... ends - 1 of the step, and end at position seq_len - 1.
        positions = np.arange(ends[-1]) + np.repeat(np.array(seq_lens) - ends, query_lens)
        row_ids = np.array([planned.row_id for planned in plan_rows])
        num_blocks = -(-max(seq_lens) // self._block_size)
        places = np.repeat(np.arange(len(rows)), query_lens)
        num_sampled = [
            len(planned.draft_token_ids) + 1 if planned.sample and row.pooling is None else 0
            for planned, row in zip(plan_rows, rows, strict=True)
        ]
        sampled_ends = np.cumsum(num_sampled)
        # A row is sampled after its last tokens: the last one that is known, and those of its draft.
        logits_indices = [np.arange(sampled_ends[-1]) + np.repeat(ends - sampled_ends, num_sampled)]
        prompted, pooled, soft_prompts = [], [], []
        for planned, row, end in zip(plan_rows, rows, ends, strict=True):
            if row.pooling is not None:
                pooled.append(_pool_share(planned, row, row.pooling, int(end)))
            if row.soft_prompt is not None:
                soft_prompts.append(row.soft_prompt_share(planned, int(end) - planned.num_tokens))
            if share := row.prompt_share(planned.start, planned.start + planned.num_tokens):
                prompted.append(share)
                logits_indices.append(end - planned.num_tokens + np.arange(len(share.token_ids)))
        attention, *further_attention = self._block_tables.attention(
            row_ids,
            places,
            positions,
            num_blocks,
            cu_query_lens=self._tensor(np.concatenate(([0], ends)).astype(np.int32)),
            seq_lens=np.array(seq_lens, dtype=np.int32),
            query_lens_host=query_lens,
            seq_lens_host=seq_lens,
        )
        return StepInput(
            token_ids=self._tensor(token_ids),
            positions=self._tensor(positions),
            attention=attention,
            logits_indices=self._tensor(np.concatenate(logits_indices)),
            sampled=tuple(row for row, count in zip(rows, num_sampled, strict=True) for _ in range(count)),
            prompted=tuple(prompted),
            pooled=tuple(pooled),
            adapter_slots=_adapter_slots(rows, query_lens),
            soft_prompts=tuple(share for share in soft_prompts if share is not None),
            further_attention=tuple(further_attention),
        )

    def _decode_input(self, plan_rows: Sequence[PlanRow], rows: tuple[Row, ...], further: int) -> StepInput:
        # the most frequent step: only the tensors that change are written; block tables cover `further` more tokens
        if rows != self._decoding.rows:  # compared by identity
            self._decoding = self._decoding_of(plan_rows, rows)
        known = self._decoding
        starts = [planned.start for planned in plan_rows]
        token_ids = [row.token(start) for row, start in zip(rows, starts, strict=True)]
        positions = np.array(starts)
        attention, *further_attention = self._block_tables.attention(
            known.row_ids,
            known.places,
            positions,
            (max(starts) + further) // self._block_size + 1,
            cu_query_lens=known.cu_query_lens,
            seq_lens=(positions + 1).astype(np.int32),
            query_lens_host=known.query_lens,
            seq_lens_host=tuple([start + 1 for start in starts]),
        )
        return StepInput(
            self._tensor(np.array(token_ids)),
            self._tensor(positions),
            attention,
            known.logits_indices,
            rows,
            adapter_slots=known.adapter_slots,
            further_attention=tuple(further_attention),
        )

    def _decoding_of(self, plan_rows: Sequence[PlanRow], rows: tuple[Row, ...]) -> Decoding:
        places = np.arange(len(rows))
        return Decoding(
            rows=rows,
            row_ids=np.array([planned.row_id for planned in plan_rows]),
            places=places,
            cu_query_lens=self._tensor(np.arange(len(rows) + 1, dtype=np.int32)),
            logits_indices=self._tensor(places),
            query_lens=(1,) * len(rows),
            adapter_slots=_adapter_slots(rows, (1,) * len(rows)),
        )

    def _tensor(self, array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array).to(self._device)
