"""Memory of the kernels of a step: the tables of rows, the packet of a plan, and what the step is computed from.

All tables of rows are parts of one tensor of int32 words: a plan changes them by writing words, whatever they are.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Self

import attrs
import torch
from torch import Tensor

HEADER_WORDS = 8
ROW_WORDS = 8
RECORD_WORDS = 24
MAX_ENDING_IDS = 32
"""Tokens that `min_tokens` can bar of a row."""
MAX_BIASES = 512
"""Tokens that a row can have a bias for."""
MAX_TOP = 32
"""Likeliest tokens that a row can have named."""


class Header(IntEnum):
    """Words at the beginning of a packet."""

    NUM_ROWS = 0
    NUM_TOKENS = 1
    NUM_WRITES = 2
    FIRST_WRITE = 3  # word of the packet where the writes begin: (word of the tables, value) each
    FIRST_TOKEN = 4  # and the tokens of prompts
    FIRST_MASK = 5  # and the masks of grammars, `RowTables.mask_words` each
    NUM_TOP = (
        6  # the most likeliest tokens that a row of the step has named; -1 if no row has log-probabilities
    )


class RowWord(IntEnum):
    """Words of a row in a packet, behind the header."""

    ROW_ID = 0
    START = 1  # tokens that are computed already
    QUERY_LEN = 2
    FIRST_TOKEN = 3  # its first token's place in the step
    TOKENS = 4  # place of its tokens among those of the packet; -1: it has one, the row's last
    IS_SAMPLED = 5
    MASK = 6  # number of its mask in the packet; -1 for none


class Record(IntEnum):
    """Words of a row's record in the tables; the last half are bits of floating-point numbers where it says so."""

    LAST_TOKEN = 0
    POSITION = 1  # tokens of the answer: index in it of the next one
    FLAGS = 2
    TEMPERATURE = 3  # float32; 0 for a greedy row
    LOG_MIN_P = 4  # float32
    TOP_K = 5
    TOP_P = 6  # float64
    ANSWER = 8  # int64, where the noise of the answer begins
    REPETITION = 10  # float32
    FREQUENCY = 11  # float32
    PRESENCE = 12  # float32
    MIN_TOKENS = 13
    NUM_ENDING = 14
    NUM_BIASES = 15
    NUM_TOP = 16  # likeliest tokens to name with log-probabilities; -1 for no log-probabilities


class Flag(IntFlag):
    """What a row asks for beside an arg-max or a draw."""

    ALLOWED = 1
    BIAS = 2
    PENALTIES = 4


class Status(IntEnum):
    """What became of a row's sample."""

    CHOSEN = 0
    NOT_NUMBERS = 1
    NOTHING_ALLOWED = 2


@attrs.frozen(eq=False, kw_only=True)
class RowTables:
    """State of all rows; the last row is a spare one, of the padding."""

    words: Tensor  # [num_words] int32, all the others
    records: Tensor  # [num_rows, RECORD_WORDS] int32, see `Record`
    block_tables: Tensor  # [num_rows, max_blocks] int32
    ending_ids: Tensor  # [num_rows, MAX_ENDING_IDS] int32, what `min_tokens` bars
    bias_ids: Tensor  # [num_rows, MAX_BIASES] int32
    biases: Tensor  # [num_rows, MAX_BIASES] float32
    allowed: Tensor  # [num_rows, mask_words] int32, a bit for each token, least significant first
    # [num_rows, vocab_size] int32: twice the count in the answer, plus 1 if it is in the prompt or the answer.
    counts: Tensor
    vocab_size: int

    @classmethod
    def allocate(
        cls, *, max_num_seqs: int, max_blocks: int, vocab_size: int, spare_block: int, device: torch.device
    ) -> Self:
        """Allocate tables of zeros, whose last row has the spare block."""
        num_rows = max_num_seqs + 1
        widths = {
            "records": RECORD_WORDS,
            "block_tables": max_blocks,
            "ending_ids": MAX_ENDING_IDS,
            "bias_ids": MAX_BIASES,
            "biases": MAX_BIASES,
            "allowed": num_mask_words(vocab_size),
            "counts": vocab_size,
        }
        # 128 bytes are what a load of a warp is aligned to
        sizes = [-(-num_rows * width // 32) * 32 for width in widths.values()]
        words = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        parts = {
            name: part[: num_rows * width].view(num_rows, width)
            for (name, width), part in zip(widths.items(), words.split(sizes), strict=True)
        }
        parts["biases"] = parts["biases"].view(torch.float32)
        parts["block_tables"][max_num_seqs].fill_(spare_block)
        return cls(words=words, vocab_size=vocab_size, **parts)

    @property
    def spare_row(self) -> int:
        """Return the row of the padding."""
        return len(self.records) - 1

    @property
    def mask_words(self) -> int:
        """Return the words of a mask over the vocabulary."""
        return self.allowed.shape[1]

    def word_of(self, table: Tensor, row_id: int, column: int) -> int:
        """Return the index in `words` of a place in a table."""
        return int(table.storage_offset()) + row_id * table.shape[1] + column


def num_mask_words(vocab_size: int) -> int:
    """Return the int32 words of a bit for each token."""
    return -(-vocab_size // 32)


@attrs.frozen(eq=False, kw_only=True)
class StepBuffers:
    """Inputs of a step and what its sampling leaves, at the same addresses in all steps."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slots: Tensor  # [num_tokens] int64
    cu_query_lens: Tensor  # [num_seqs + 1] int32
    seq_lens: Tensor  # [num_seqs] int32
    block_tables: Tensor  # [num_seqs, max_blocks] int32
    last_tokens: Tensor  # [num_seqs] int64, place in the step of each sequence's last token
    # Parameters of the draw, as `draw_triton` takes them; a temperature of 0 is a row that is not drawn.
    temperature: Tensor  # [num_seqs] float32
    log_min_p: Tensor  # [num_seqs] float32
    top_k: Tensor  # [num_seqs] int64
    top_p: Tensor  # [num_seqs] float64
    answers: Tensor  # [num_seqs] int64
    answer_positions: Tensor  # [num_seqs] int64
    work: Tensor  # [num_seqs, vocab_size] float32, edited logits of the drawn rows

    @classmethod
    def allocate(
        cls, *, num_tokens: int, num_seqs: int, max_blocks: int, vocab_size: int, device: torch.device
    ) -> Self:
        """Allocate buffers for the largest step."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            token_ids=zeros(num_tokens),
            positions=zeros(num_tokens),
            slots=zeros(num_tokens),
            cu_query_lens=zeros(num_seqs + 1, dtype=torch.int32),
            seq_lens=zeros(num_seqs, dtype=torch.int32),
            block_tables=zeros(num_seqs, max_blocks, dtype=torch.int32),
            last_tokens=zeros(num_seqs),
            temperature=zeros(num_seqs, dtype=torch.float32),
            log_min_p=zeros(num_seqs, dtype=torch.float32),
            top_k=zeros(num_seqs),
            top_p=zeros(num_seqs, dtype=torch.float64),
            answers=zeros(num_seqs),
            answer_positions=zeros(num_seqs),
            work=zeros(num_seqs, vocab_size, dtype=torch.float32),
        )

    def part(self, num_tokens: int, num_seqs: int) -> Self:
        """Return the first of them, for a smaller step, at the same addresses."""
        tokens = {name: getattr(self, name)[:num_tokens] for name in ("token_ids", "positions", "slots")}
        others = [each.name for each in attrs.fields(type(self)) if each.name not in tokens]
        lengths = {name: num_seqs + (name == "cu_query_lens") for name in others}
        return type(self)(**tokens, **{name: getattr(self, name)[: lengths[name]] for name in others})
