"""A model without numbers: its KV cache holds token ids, so that a wrong block, slot or position shows as a
wrong token.

The next token is a hash of everything the request's block table leads to. An engine that frees a block too early,
shares the wrong one, skips a token or computes one twice gets a different answer than `expected_answer`,
which looks at no block at all.

KV that an adapter has computed is other KV, for every content of an adapter: a wrong slot shows as a wrong token, too.

A model may have several cache groups: its next token is then a hash of what all of them see, and of a group with a
window that is no more than the window.

From the seed `REPETITIVE` on a request says mostly what it has said before, so that it pays to guess.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

from triolet.core.kv_cache.cache_groups import HOLE
from triolet.core.step_plan import (
    BlockLoad,
    PlanRow,
    PooledVectors,
    RowFailure,
    RowResult,
    RowStart,
    SampledToken,
    StepPlan,
    StepResult,
)

POISON = -1
WEIGHTS = 7**6  # a multiple of 7, as the circle is
ADAPTED = 7**9  # likewise
REPETITIVE = 10**6
CIRCLE = (1, 4, 6, 5, 2, 0)


def next_token(token_ids: Sequence[int], seed: int, vocab_size: int, mask: bytes | None = None) -> int:
    """What comes after these; with a mask, one of those that have a bit."""
    digest = hashlib.blake2b(array("q", [seed, *token_ids]).tobytes(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    if seed >= REPETITIVE and number % 8:
        wish = (token_ids[-1] * 3 + 1) % 7 % vocab_size  # the CIRCLE's next
    else:
        wish = number % vocab_size
    if mask is None:
        return wish
    allowed = [token_id for token_id in range(vocab_size) if mask[token_id // 8] >> token_id % 8 & 1]
    return wish if wish in allowed else allowed[number % len(allowed)]


def seen(kv: Sequence[int], windows: Sequence[int | None] = (None,)) -> list[int]:
    """What the layers of all groups see of the tokens before the next one."""
    return [one for window in windows for one in (kv if window is None else kv[-window:])]


def expected_vector(
    prompt: Sequence[int], weights: int = 0, windows: Sequence[int | None] = (None,)
) -> bytes:
    """What a pooled request for this prompt gets."""
    kv = [token_id + WEIGHTS * weights for token_id in prompt]
    return vector_of(len(prompt), seen(kv, windows))


def vector_of(num_tokens: int, read: Sequence[int]) -> bytes:
    return array("f", [num_tokens, next_token(read, 0, 1000)]).tobytes()


def expected_answer(
    prompt: Sequence[int],
    seed: int,
    num_tokens: int,
    vocab_size: int,
    ending: Iterable[int] = (),
    mask_after: Callable[[Sequence[int]], bytes | None] = lambda output: None,
    adapter: int = 0,
    weights: Sequence[int] = (),
    windows: Sequence[int | None] = (None,),
) -> list[int]:
    """An answer of so many tokens, or fewer: it ends with a token of the `ending`, and where a mask has no bit.

    `weights` has the number of the weights of each token; those of the last one compute all further ones.
    """
    answer = list[int]()
    for position in range(num_tokens):
        mask = mask_after(answer)
        if mask is not None and not any(mask):
            break
        number = weights[min(position, len(weights) - 1)] if weights else 0
        offset = ADAPTED * adapter + WEIGHTS * number
        kv = [token_id + offset for token_id in (*prompt, *answer)]
        answer.append(next_token(seen(kv, windows), seed, vocab_size, mask))
        if answer[-1] in set(ending):
            break
    return answer


@attrs.define
class _Row:
    start: RowStart
    tokens: list[int]
    block_table: list[int]
    num_computed: int | None = None  # before its first step it is not known what the cache had
    has_failed: bool = False
    is_spoiled: bool = False  # a step of it began where its window was not what it must be


class FakeModel:
    """Executes plans the way a runner does; `cache[block_id][offset]` is a token id.

    `store` is what a prefix store has, by key; several models, one after the other, may share it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int = 50,
        weights: int = 0,
        store: dict[bytes, list[int]] | None = None,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self.windows = windows  # of the cache groups, full attention first
        self.store = {} if store is None else store
        # KV that other weights have computed is other KV.
        self.offset = WEIGHTS * weights
        self.cache = [[POISON] * block_size for _ in range(num_blocks)]
        self.block_size, self.vocab_size = block_size, vocab_size
        self.rows: dict[int, _Row] = {}
        self.adapters: dict[int, int] = {}  # by slot, the number of its contents
        self.failing: set[str] = set()
        self.most_tokens: int | None = None  # a step with more finds no memory
        self.has_lacked_memory = False  # in the last step

    def execute(self, plan: StepPlan) -> StepResult:
        for row_id in plan.ended:
            self.rows.pop(row_id, None)
        for start in plan.starts:
            self.rows[start.row_id] = _Row(start, [*start.prompt_token_ids, *start.output_token_ids], [])
        for planned in plan.rows:
            self.rows[planned.row_id].block_table += planned.new_block_ids
        is_void = plan.is_ahead and self.has_lacked_memory
        self.has_lacked_memory = False
        if not is_void and self.most_tokens is not None and plan.num_tokens > self.most_tokens:
            self.has_lacked_memory = True
            return StepResult(plan.step_id, (), out_of_memory="planted")
        for save in plan.saves:
            blocks = [token for block_id in save.block_ids for token in self.cache[block_id]]
            assert len(save.block_ids) == len(self.windows) and HOLE not in save.block_ids, (
                "one of every group"
            )
            assert self.store.setdefault(save.key, blocks) == blocks, "a key names one content"
            assert POISON not in blocks, "full blocks are saved"
        if is_void:
            return StepResult(plan.step_id, (), out_of_memory="the step before found none")
        rows = [row for row in plan.rows if not self.rows[row.row_id].has_failed]
        assert plan.is_ahead or len(rows) == len(plan.rows), "a row that has failed is known to the next plan"
        num_loaded = {row.row_id: self._load(row, plan.loads) for row in rows}
        for row in rows:
            self._write(row, num_loaded[row.row_id])
        sampled = [one for planned in rows if planned.sample for one in self._sample(planned)]
        return StepResult(plan.step_id, tuple(sampled), num_loaded_tokens=sum(num_loaded.values()))

    def _load(self, planned: PlanRow, loads: Sequence[BlockLoad]) -> int:
        """Tokens of a row that the store has, copied to its blocks."""
        mine = [load for load in loads if load.row_id == planned.row_id]
        size, count = self.block_size, len(self.windows)
        first = planned.start // size * count
        table = self.rows[planned.row_id].block_table[first : first + len(mine) * count]
        assert [one for load in mine for one in load.block_ids] == table, (
            "blocks of a row come in order, from its first token on"
        )
        assert HOLE not in table, "what is loaded has a place in every group"
        stored = list(itertools.takewhile(lambda load: load.key in self.store, mine))
        for load in stored:
            for group, block_id in enumerate(load.block_ids):
                self.cache[block_id] = self.store[load.key][group * size : (group + 1) * size]
        assert not mine or planned.start % size == 0
        return min(len(stored) * size, planned.num_tokens - 1)

    def _write(self, planned: PlanRow, num_loaded: int) -> None:
        row = self.rows[planned.row_id]
        tokens = [*row.tokens, *planned.draft_token_ids]
        slot = row.start.adapter_slot
        offset = self.offset + (0 if slot is None else ADAPTED * self.adapters.get(slot, 0))
        assert planned.num_tokens > len(planned.draft_token_ids)
        assert planned.mask is None or not planned.draft_token_ids
        assert planned.sample == (planned.start + planned.num_tokens == len(tokens))
        self._look_back(row, planned.start, offset)
        for position in range(planned.start + num_loaded, planned.start + planned.num_tokens):
            for group in range(len(self.windows)):
                block = self.cache[self._block_id(row, group, position)]
                block[position % self.block_size] = tokens[position] + offset
        assert row.num_computed in (None, planned.start), "a step begins where the last one ended"
        row.num_computed = planned.start + planned.num_tokens

    def _look_back(self, row: _Row, start: int, offset: int) -> None:
        """The first token of a chunk sees further back than the last, from which alone something is sampled."""
        for group, window in enumerate(self.windows):
            if window is not None and start:
                first = max(0, start - window + 1)
                expected = [token + offset for token in row.tokens[first:start]]
                row.is_spoiled |= self._read(row, group, first, start) != expected

    def _block_id(self, row: _Row, group: int, position: int) -> int:
        block_id = row.block_table[position // self.block_size * len(self.windows) + group]
        assert block_id != HOLE, f"group {group} reads a hole at token {position}"
        return block_id

    def _read(self, row: _Row, group: int, first: int, end: int) -> list[int]:
        size = self.block_size
        return [self.cache[self._block_id(row, group, p)][p % size] for p in range(first, end)]

    def _seen(self, row: _Row) -> list[int]:
        end = len(row.tokens)
        return [
            one
            for group, window in enumerate(self.windows)
            for one in self._read(row, group, 0 if window is None else max(0, end - window), end)
        ] + [POISON] * row.is_spoiled

    def _sample(self, planned: PlanRow) -> Iterator[RowResult]:
        """A token, and one after every token of the draft that was right."""
        row = self.rows[planned.row_id]
        start, draft = row.start, iter(planned.draft_token_ids)
        if start.request_id in self.failing:
            row.has_failed = True
            yield RowFailure(start.request_id, start.epoch, "planted")
            return
        token_id = None
        if start.pooling is not None:
            vector = vector_of(len(row.tokens), self._seen(row))
            yield PooledVectors(start.epoch, 0, 2, vector, is_last=True)
            return
        while token_id is None or token_id == next(draft, None):
            token_id = next_token(self._seen(row), start.seed, self.vocab_size, planned.mask)
            position = len(row.tokens) - len(start.prompt_token_ids)
            row.tokens.append(token_id)
            yield SampledToken(start.request_id, start.epoch, position, token_id)
        row.num_computed = len(row.tokens) - 1  # what was computed behind a wrong guess counts for nothing
