"""A request while it is computed: what the scheduler keeps beside the journal's entry."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from triolet.core.journal import JournalEntry
from triolet.core.step_plan import PlanRow, RowStart

Order = tuple[float, int]


@attrs.define(eq=False)
class Sequence:
    """Mutable, and only the scheduler's.

    Args:
        entry: the request and its answer so far.
        order: the smaller goes first; a preempted sequence keeps it.
        row_id: its row in the runner's table; None while it waits.
        num_computed_tokens: tokens whose KV is present.
        num_scheduled_tokens: tokens given to the step in flight, with those of the draft; 0 between steps.
        draft_token_ids: what the step in flight tries beyond the known tokens.
        last_step: number of the last step that it had a part in.
        num_charged_tokens: tokens that its client has paid for, or that were free.
        block_table: its blocks in order.
        num_planned_blocks: blocks of the table that the runner has been told of.
        block_hashes: of the leading full blocks that have been computed.
        known_hashes: of leading full blocks, computed or not: a look-up need not compute them twice.
        prefix_root: hash of its cache namespace; empty until it is needed.
    """

    entry: JournalEntry
    order: Order
    row_id: int | None = None
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    draft_token_ids: tuple[int, ...] = ()
    last_step: int = 0
    num_charged_tokens: int = 0
    block_table: list[int] = attrs.field(factory=list)
    num_planned_blocks: int = 0
    block_hashes: list[bytes] = attrs.field(factory=list)
    known_hashes: list[bytes] = attrs.field(factory=list)
    prefix_root: bytes = b""

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that are known and not computed."""
        return self.entry.num_tokens - self.num_computed_tokens

    @property
    def num_known_tokens(self) -> int:
        """Tokens given to the step in flight without those of the draft."""
        return self.num_scheduled_tokens - len(self.draft_token_ids)

    @property
    def end(self) -> int:
        """How many of its known tokens are computed when the step in flight succeeds."""
        return self.num_computed_tokens + self.num_known_tokens

    def num_missing_blocks(self, num_tokens: int, block_size: int) -> int:
        """Blocks that must be added before `num_tokens` more can be computed."""
        return -(-(self.num_computed_tokens + num_tokens) // block_size) - len(self.block_table)

    @property
    def is_unserved(self) -> bool:
        """Whether it runs and has no part in the step that is planned or in flight."""
        return self.row_id is not None and not self.num_scheduled_tokens

    def begin(self, row_id: int, block_ids: list[int], hashes: list[bytes], num_cached_tokens: int) -> None:
        """It has got a row, and the blocks that hold its first tokens already."""
        self.row_id = row_id
        self.block_table, self.block_hashes = block_ids, hashes
        self.num_computed_tokens = num_cached_tokens

    def schedule(self, num_tokens: int, step_id: int) -> None:
        """It has a part in the step that is being planned."""
        self.num_scheduled_tokens, self.draft_token_ids = num_tokens, ()
        self.last_step = step_id

    def end_step(self) -> tuple[int, int]:
        """What it had a part in is done, and what came of it is in the journal.

        Returns:
            How many tokens it tried beyond the known ones, and how many of them are known now.
        """
        num_tried = len(self.draft_token_ids)
        end = self.end
        # The last token of the journal was chosen, not tried: it has yet to be computed.
        num_right = min(num_tried, max(0, self.entry.num_tokens - 1 - end))
        self.num_computed_tokens = end + num_right
        self.num_scheduled_tokens = 0
        return num_tried, num_right

    def forget_computed(self) -> None:
        """Its blocks and its row are gone; everything must be computed again."""
        self.row_id = None
        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_planned_blocks = 0
        self.block_table = []
        self.block_hashes = []

    # What the runner is told of it; see `core.step_plan`.

    def row_start(self) -> RowStart:
        """It has just got a row: everything that its tokens depend on."""
        assert self.row_id is not None
        entry = self.entry
        request = entry.request
        return RowStart(
            row_id=self.row_id,
            request_id=request.request_id,
            epoch=entry.epoch,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=tuple(entry.output_token_ids),
            params=request.params,
            seed=request.seed,
            ending_token_ids=request.masked_token_ids,
            bad_words_token_ids=request.bad_words_token_ids,
            wants_prompt_logprobs=entry.wants_prompt_logprobs,
        )

    def take_row(self) -> PlanRow:
        """Its share of the step that is being planned; each new block is told once."""
        assert self.row_id is not None
        new_block_ids = tuple(self.block_table[self.num_planned_blocks :])
        self.num_planned_blocks = len(self.block_table)
        is_sampled = self.num_scheduled_tokens >= self.num_pending_tokens
        return PlanRow(
            self.row_id,
            self.num_computed_tokens,
            self.num_scheduled_tokens,
            new_block_ids,
            is_sampled,
            self.entry.mask if is_sampled else None,
            self.draft_token_ids,
        )


def largest_first(sequences: Iterable[Sequence]) -> list[Sequence]:
    """Those with a part in a step, by the size of it."""
    return sorted(
        (sequence for sequence in sequences if sequence.num_scheduled_tokens),
        key=lambda sequence: (sequence.num_scheduled_tokens, sequence.entry.num_tokens),
        reverse=True,
    )
