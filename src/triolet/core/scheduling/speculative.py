"""Speculative decoding by n-gram lookup: which tokens a row has tried together with its next one.

Theory of operation
-------------------
A decode reads every weight to make one token. A row may bring a *draft*: tokens that are guessed to come next
(`core.scheduling.ngram_proposer`), whose KV is computed along with that of its last known token. The runner then has
logits after each of
them, chooses from the first as always, and goes on to the next as long as the choice is what the draft said. So a step
gives one token more than the draft had right.

The answer is the one that it would have been. A token is a function of the logits and of (seed, position), and both are
what they would be without a draft; a draft decides nothing but how many tokens come in one step.

Drafts live on what is left: of the token budget, after everybody has got what is theirs, and of the blocks, of which
one remains for each row's next step, since nobody is to be preempted for a guess. They are charged to no client before
they come true. A request that was in a step which crashed the runner makes none any more: a crash must say which known
token it was about. The KV of a guess that was wrong is written over by the tokens that did come, in a block that nobody
else knows of: blocks are published as far as the journal has their tokens, and no further.

A row's next draft is at most twice as long, and one token, as what was right of its last one: where guessing does not
work it soon costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Collection

import attrs

from triolet.core.journal import JournalEntry
from triolet.core.kv_cache.block_pool import BlockPool
from triolet.core.recovery.poison_bisection import RecoveryState
from triolet.core.scheduling.config import SchedulerConfig, SchedulerCounters
from triolet.core.scheduling.ngram_proposer import NgramIndex
from triolet.core.scheduling.sequence import Sequence

# Looking at a token takes some 1.5 microseconds; a step's share of a long prompt must not hold up the loop.
MAX_FOLLOWED_TOKENS = 1024


@attrs.define
class _Drafter:
    """What is known of one row's text.

    Args:
        index: of the tokens of prompt and answer.
        limit: longest draft that is worth a try.
    """

    index: NgramIndex
    limit: int

    def follow(self, entry: JournalEntry, most: int) -> int:
        """Look at some more tokens; returns how many were left to look at, up to `most`."""
        seen = self.index.num_tokens
        new = entry.tokens(seen, min(entry.num_tokens, seen + most))
        self.index.extend(new)
        return len(new)


class SpeculativeDecoding:
    """See the module's text.

    Args:
        config: how long drafts are, and what they take to be made.
        counters: of what came of them.
        caution: names those for whom none are made.
    """

    def __init__(self, config: SchedulerConfig, counters: SchedulerCounters, recovery: RecoveryState) -> None:
        self._config, self._counters, self._recovery = config, counters, recovery
        per_position = counters.num_accepted_tokens_per_pos
        per_position += [0] * (config.num_speculative_tokens - len(per_position))
        self._drafters: dict[int, _Drafter] = {}  # by epoch: of the rows of the last step

    def add_drafts(self, scheduled: Collection[Sequence], budget: int, pool: BlockPool) -> None:
        """Let decodes of the step that is being planned try what they may say next.

        Args:
            scheduled: the rows of the step, which have all their known tokens to compute, or some of them.
            budget: tokens that are left of it.
            pool: where blocks come from.
        """
        if not self._config.num_speculative_tokens:
            return
        rows = [sequence for sequence in scheduled if self._may_draft(sequence)]
        self._drafters = {row.entry.epoch: self._drafter(row.entry.epoch) for row in rows}
        num_followed, num_blocks = 0, pool.num_available - len(scheduled)
        for row in rows:
            drafter = self._drafters[row.entry.epoch]
            num_followed += drafter.follow(row.entry, MAX_FOLLOWED_TOKENS - num_followed)
            if drafter.index.num_tokens == row.entry.num_tokens:
                missing = self._draft(row, drafter, budget, num_blocks)
                row.block_table += pool.allocate(missing)
                num_blocks -= missing
                budget -= len(row.draft_token_ids)

    def _drafter(self, epoch: int) -> _Drafter:
        config = self._config
        return self._drafters.get(epoch) or _Drafter(
            NgramIndex(config.prompt_lookup_min), config.num_speculative_tokens
        )

    def _may_draft(self, row: Sequence) -> bool:
        """Whether it decodes, and what it may say after its next token is known already."""
        entry = row.entry
        return (
            row.num_pending_tokens == 1
            and entry.request.constraint is None  # its form allows one token at a time
            and not self._recovery.poison_bisection.was_struck(entry.serial)
        )

    def _draft(self, row: Sequence, drafter: _Drafter, budget: int, num_blocks: int) -> int:
        """Give a row its draft; returns how many blocks it misses for it."""
        size, entry = self._config.block_size, row.entry
        num_places = (len(row.block_table) + max(0, num_blocks)) * size - row.num_computed_tokens - 1
        num_wanted = entry.request.max_tokens - len(entry.output_token_ids) - 1
        limit = min(drafter.limit, budget, num_places, num_wanted)
        row.draft_token_ids = drafter.index.guess(limit) if limit > 0 else ()
        row.num_scheduled_tokens += len(row.draft_token_ids)
        return max(0, row.num_missing_blocks(row.num_scheduled_tokens, size))

    def end_step(self, row: Sequence) -> None:
        """The step of a row is done, and its tokens are in the journal: what it tried counts as far as it was right."""
        num_tried, num_right = row.end_step()
        if not num_tried:
            return
        if (drafter := self._drafters.get(row.entry.epoch)) is not None:
            drafter.limit = min(2 * num_right + 1, self._config.num_speculative_tokens)
        counters = self._counters
        counters.num_drafts += 1
        counters.num_draft_tokens += num_tried
        for position in range(num_right):
            counters.num_accepted_tokens_per_pos[position] += 1
