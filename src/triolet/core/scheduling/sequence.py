"""Sequence: the state that the scheduler keeps of a request beside its journal entry, and the conditions of its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from triolet.core.journal import Journal, JournalEntry
from triolet.core.request.repetition_detection import REPETITION_DETECTED, is_repeating
from triolet.core.request.request import FinishReason
from triolet.core.step_plan import PlanRow, RowStart, SampledToken

Order = tuple[float, int]


@attrs.define(eq=False)
class Sequence:
    """Mutable state of a live request, used only by the scheduler."""

    entry: JournalEntry  # the request and its answer so far
    order: Order  # the smaller goes first; a preempted sequence keeps it
    row_id: int | None = None  # its row in the runner's table; None while it waits
    num_computed_tokens: int = 0  # tokens whose KV is present
    # Tokens given to the step in flight, with those of the draft; 0 between steps.
    num_scheduled_tokens: int = 0
    draft_token_ids: tuple[int, ...] = ()  # draft tokens of the step in flight, after the known tokens
    # Tokens given to the step before that one, and tokens that it samples, none or one; see `steps_in_flight`.
    num_assumed_tokens: int = 0
    num_unknown_tokens: int = 0
    last_step: int = 0  # number of the last step that it was part of
    num_charged_tokens: int = 0  # tokens charged to its client, or free of charge
    turn: int = 0  # its turn among the names of its client; see `policies.name_turns`
    block_table: list[int] = attrs.field(
        factory=list
    )  # its blocks in order; see `core.kv_cache.cache_groups`
    num_passed_blocks: int = 0  # leading blocks of each group that its window has passed
    num_planned_blocks: int = 0  # blocks of the table that plans have sent to the runner
    # Of the leading full blocks that have been computed.
    block_hashes: list[bytes] = attrs.field(factory=list)
    # Of leading full blocks, computed or not: a look-up need not compute them twice.
    known_hashes: list[bytes] = attrs.field(factory=list)
    prefix_root: bytes = b""  # hash of its cache namespace; empty until it is needed
    adapter_slot: int | None = None  # slot of its adapter, while it has a row; None for none

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that are not computed when the step being planned begins."""
        return self.entry.num_tokens + self.num_unknown_tokens - self.num_expected_tokens

    @property
    def num_expected_tokens(self) -> int:
        """Tokens whose KV is present when the step being planned begins."""
        return self.num_computed_tokens + self.num_assumed_tokens

    @property
    def num_known_tokens(self) -> int:
        """Tokens given to the step in flight without those of the draft."""
        return self.num_scheduled_tokens - len(self.draft_token_ids)

    @property
    def end(self) -> int:
        """Number of its known tokens that are computed when the step in flight succeeds."""
        return self.num_expected_tokens + self.num_known_tokens

    def num_missing_blocks(self, num_tokens: int, block_size: int, num_groups: int = 1) -> int:
        """Return how many blocks must be added before `num_tokens` more can be computed."""
        return -(-(self.num_expected_tokens + num_tokens) // block_size) * num_groups - len(self.block_table)

    @property
    def is_unserved(self) -> bool:
        """True if it runs and is not part of the step that is planned or in flight."""
        return self.row_id is not None and not self.num_scheduled_tokens

    def begin(
        self,
        row_id: int,
        block_ids: list[int],
        hashes: list[bytes],
        num_cached_tokens: int,
        num_passed_blocks: int = 0,
    ) -> None:
        """Set its row, and the cached blocks that hold its first tokens."""
        self.row_id, self.num_passed_blocks = row_id, num_passed_blocks
        self.block_table, self.block_hashes = block_ids, hashes
        self.num_computed_tokens = num_cached_tokens

    def schedule(self, num_tokens: int, step_id: int) -> None:
        """Make it part of the step that is being planned."""
        self.num_scheduled_tokens, self.draft_token_ids = num_tokens, ()
        self.last_step = step_id

    def assume(self) -> None:
        """Take the step in flight for done, so that the one after it can be planned."""
        is_sampled = self.num_scheduled_tokens == self.num_pending_tokens
        self.num_assumed_tokens, self.num_scheduled_tokens = self.num_scheduled_tokens, 0
        self.num_unknown_tokens = int(is_sampled and self.entry.request.pooling is None)

    def recall(self) -> None:
        """Undo `assume`."""
        self.num_scheduled_tokens, self.num_assumed_tokens, self.num_unknown_tokens = (
            self.num_assumed_tokens,
            0,
            0,
        )

    def end_step(self) -> tuple[int, int]:
        """Count the tokens of a finished step as computed; its new tokens are in the journal.

        Returns:
            How many draft tokens the step had, and how many of them were accepted.
        """
        if self.num_assumed_tokens:  # what is scheduled belongs to the step after it
            self.num_computed_tokens += self.num_assumed_tokens
            self.num_assumed_tokens = self.num_unknown_tokens = 0
            return 0, 0
        if not self.draft_token_ids:
            self.num_computed_tokens += self.num_scheduled_tokens
            self.num_scheduled_tokens = 0
            return 0, 0
        num_tried = len(self.draft_token_ids)
        end = self.end
        # The last token of the journal was sampled after the draft, so its KV is not computed yet.
        num_right = min(num_tried, max(0, self.entry.num_tokens - 1 - end))
        self.num_computed_tokens = end + num_right
        self.num_scheduled_tokens = 0
        return num_tried, num_right

    # Parts of a plan; see `core.step_plan`.

    def row_start(self) -> RowStart:
        """Return the start of its row: everything that its tokens depend on."""
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
            # masked below `min_tokens`; as in vLLM the end of sequence is masked even if `ignore_eos` is set
            ending_token_ids=frozenset(request.eos_token_ids) | frozenset(request.params.stop_token_ids),
            bad_words_token_ids=request.bad_words_token_ids,
            wants_prompt_logprobs=entry.wants_prompt_logprobs,
            pooling=request.pooling,
            adapter_slot=self.adapter_slot,
            soft_prompt=request.soft_prompt,
        )

    def take_row(self) -> PlanRow:
        """Return its row of the step being planned; each new block is sent once."""
        assert self.row_id is not None
        new_block_ids = tuple(self.block_table[self.num_planned_blocks :])
        self.num_planned_blocks = len(self.block_table)
        is_sampled = self.num_scheduled_tokens >= self.num_pending_tokens
        return PlanRow(
            self.row_id,
            self.num_expected_tokens,
            self.num_scheduled_tokens,
            new_block_ids,
            is_sampled,
            self.entry.mask if is_sampled else None,
            self.draft_token_ids,
        )


def largest_first(sequences: Iterable[Sequence]) -> list[Sequence]:
    """Return the sequences of a step, those with the most tokens first."""
    return sorted(
        (sequence for sequence in sequences if sequence.num_scheduled_tokens),
        key=lambda sequence: (sequence.num_scheduled_tokens, sequence.entry.num_tokens),
        reverse=True,
    )


Ending = tuple[FinishReason, int | str | None]


def ending_of(entry: JournalEntry) -> Ending | None:
    """Return why an answer has ended with its last token, and its stop_reason; None if it goes on."""
    # The tokenizer's own end of sequence has no stop_reason; further ones of a model are reported like stop
    # token ids.
    #
    # The order is vLLM's: end of sequence, stop token ids, length, and only then the repetition that
    # `min_tokens` delays. So an end of sequence on the last allowed token is a stop. (Before `min_tokens` the
    # sampler leaves no ending token.)
    request, output = entry.request, entry.output_token_ids
    params = request.params
    if output[-1] in request.eos_token_ids and not params.ignore_eos:
        return FinishReason.STOP, None if output[-1] == request.eos_token_ids[0] else output[-1]
    if output[-1] in params.stop_token_ids:
        return FinishReason.STOP, output[-1]
    if len(output) >= request.max_tokens:
        return FinishReason.LENGTH, None
    detection = params.repetition_detection
    if detection is not None and len(output) >= params.min_tokens and is_repeating(output, detection):
        return FinishReason.REPETITION, REPETITION_DETECTED
    return None


def commit_tokens(
    journal: Journal, tokens: Iterable[SampledToken], by_epoch: Mapping[int, Sequence], now_s: float
) -> dict[int, Ending | None]:
    """Commit the tokens of a step to the journal; tokens after the end of an answer are dropped.

    Args:
        tokens: in order, of an answer none, one, or several.
        by_epoch: the requests that are computed now.
    Returns:
        By epoch, the answers that have grown, and the endings of those that have ended.
    """
    grown: dict[int, Ending | None] = {}
    for token in tokens:
        sequence = by_epoch.get(token.epoch)
        if sequence is None or grown.get(token.epoch) is not None:
            continue
        if journal.commit(sequence.entry, token, now_s):
            grown[token.epoch] = ending_of(sequence.entry)
    return grown
