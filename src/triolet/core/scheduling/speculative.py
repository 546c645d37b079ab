"""Speculative decoding by n-gram lookup: draft tokens are verified together with a row's next one.

Theory of operation
-------------------
A decode reads every weight to make one token. A row may bring a *draft*: tokens that are guessed to come next
(`core.scheduling.ngram_proposer`); their KV is computed along with that of its last known token. The runner then has
logits after each of them, samples from the first as always, and goes on to the next as long as the sampled token equals
the draft token. So a step gives one token more than were accepted.

The answer is the same as without a draft. A token is a function of the logits and of (seed, position), and both are
the same as without one; a draft decides only how many tokens one step gives.

Drafts use what is left: of the token budget, after all known tokens are scheduled, and of the blocks, of which one
remains for each row's next step, since no request is to be preempted for a draft. They are charged to no client before
they are accepted. A request that was in a step which crashed the runner gets none any more: a crash must say which
known token it was about. The KV of a rejected token is overwritten by the tokens that follow, in a block that no other
request shares: blocks are published as far as the journal has their tokens, and no further.

A row's next draft is at most twice as long, and one token, as what was accepted of its last one: where drafts are
rejected they soon cost next to nothing.
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
    """Draft state of one row.

    Args:
        index: n-grams of prompt and answer.
        limit: longest draft to make.
    """

    index: NgramIndex
    limit: int

    def follow(self, entry: JournalEntry, most: int) -> int:
        """Index up to `most` tokens that are new, and return how many it were."""
        seen = self.index.num_tokens
        new = entry.tokens(seen, min(entry.num_tokens, seen + most))
        self.index.extend(new)
        return len(new)


class SpeculativeDecoding:
    """Maker of the drafts of a step.

    Args:
        config: length of drafts and of the n-grams.
        counters: count drafted and accepted tokens.
        recovery: names the requests that get no drafts.
    """

    def __init__(self, config: SchedulerConfig, counters: SchedulerCounters, recovery: RecoveryState) -> None:
        self._config, self._counters, self._recovery = config, counters, recovery
        per_position = counters.num_accepted_tokens_per_pos
        per_position += [0] * (config.num_speculative_tokens - len(per_position))
        self._drafters: dict[int, _Drafter] = {}  # by epoch: of the rows of the last step

    def add_drafts(self, scheduled: Collection[Sequence], budget: int, pool: BlockPool) -> None:
        """Add drafts to the decodes of the step that is being planned.

        Args:
            scheduled: the rows of the step.
            budget: tokens that are left of its budget.
            pool: gives the blocks.
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
        """Return True if the row decodes, follows no grammar, and was in no step that crashed."""
        entry = row.entry
        return (
            row.num_pending_tokens == 1
            and entry.request.constraint is None  # its mask is known for one token at a time
            and not self._recovery.poison_bisection.was_struck(entry.serial)
        )

    def _draft(self, row: Sequence, drafter: _Drafter, budget: int, num_blocks: int) -> int:
        """Give a row its draft, and return how many blocks are missing for it."""
        size, entry = self._config.block_size, row.entry
        num_places = (len(row.block_table) + max(0, num_blocks)) * size - row.num_computed_tokens - 1
        num_wanted = entry.request.max_tokens - len(entry.output_token_ids) - 1
        limit = min(drafter.limit, budget, num_places, num_wanted)
        row.draft_token_ids = drafter.index.guess(limit) if limit > 0 else ()
        row.num_scheduled_tokens += len(row.draft_token_ids)
        return max(0, row.num_missing_blocks(row.num_scheduled_tokens, size))

    def end_step(self, row: Sequence) -> None:
        """Count the accepted draft tokens of a finished step; its tokens are in the journal."""
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
