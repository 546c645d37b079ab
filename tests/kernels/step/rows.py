"""Random rows of a step for the tests of its kernels: tables, a packet, and what it was made from."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from triolet.kernels.step.layout import (
    HEADER_WORDS,
    ROW_WORDS,
    Flag,
    Header,
    Record,
    RowTables,
    RowWord,
    StepBuffers,
)

BLOCK_SIZE = 4
MAX_BLOCKS = 40
NO_FLAGS = Flag(0)


@attrs.frozen(eq=False)
class MadeStep:
    """A step of random rows, on the CPU."""

    tables: RowTables
    packet: Tensor
    row_ids: tuple[int, ...]

    def copy(self, device: str) -> MadeStep:
        """On a device, with memory of its own."""
        tables = make_tables(len(self.tables.records) - 1, self.tables.vocab_size, device)
        tables.words.copy_(self.tables.words)
        return MadeStep(tables, self.packet.clone().to(device), self.row_ids)


def make_tables(max_num_seqs: int, vocab_size: int, device: str = "cpu") -> RowTables:
    return RowTables.allocate(
        max_num_seqs=max_num_seqs,
        max_blocks=MAX_BLOCKS,
        vocab_size=vocab_size,
        spare_block=999,
        device=torch.device(device),
    )


def make_buffers(num_tokens: int, num_seqs: int, vocab_size: int, device: str = "cpu") -> StepBuffers:
    """Buffers full of what no kernel writes."""
    buffers = StepBuffers.allocate(
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        max_blocks=MAX_BLOCKS,
        vocab_size=vocab_size,
        device=torch.device(device),
    )
    for field in attrs.fields(StepBuffers):
        getattr(buffers, field.name).fill_(-77)
    return buffers


def make_step(
    roll: random.Random,
    lens: Sequence[tuple[int, int]],
    vocab_size: int,
    *,
    flags: Flag = NO_FLAGS,
    num_top: int = -1,
) -> MadeStep:
    """Make a step.

    Args:
        roll: where all numbers come from.
        lens: of each sequence the tokens that are computed already, and those of this step.
        vocab_size: of the model.
        flags: what rows may ask for.
        num_top: of the likeliest tokens that rows may ask for.
    """
    tables = make_tables(len(lens) + 2, vocab_size)
    tables.records[:-1] = torch.tensor(
        [[roll.randrange(vocab_size) for _ in range(tables.records.shape[1])] for _ in tables.records[:-1]]
    )
    tables.block_tables[:-1] = torch.randperm(tables.block_tables[:-1].numel()).view(-1, MAX_BLOCKS)
    row_ids = tuple(roll.sample(range(len(lens) + 2), len(lens)))
    numbers = tables.records.view(torch.float32)
    for row_id in row_ids:
        record = tables.records[row_id]
        record[Record.FLAGS] = int(Flag(roll.randrange(8)) & flags)
        record[Record.TOP_K] = roll.choice([vocab_size, 5])
        numbers[row_id, Record.TEMPERATURE] = roll.choice([0.0, 0.7])
        numbers[row_id, Record.LOG_MIN_P] = -3.0
        record.view(torch.float64)[Record.TOP_P // 2] = roll.random()
        record.view(torch.int64)[Record.ANSWER // 2] = roll.getrandbits(63)
        numbers[row_id, Record.REPETITION] = roll.choice([1.0, 1.3, 0.7])
        numbers[row_id, Record.FREQUENCY] = roll.choice([0.0, 0.3, -0.4])
        numbers[row_id, Record.PRESENCE] = roll.choice([0.0, 0.9])
        record[Record.POSITION], record[Record.MIN_TOKENS] = roll.randrange(9), roll.choice([0, 5])
        record[Record.NUM_ENDING] = roll.randrange(3)
        tables.ending_ids[row_id, :2] = torch.tensor(roll.sample(range(vocab_size), 2))
        record[Record.NUM_BIASES] = roll.randrange(4)
        tables.bias_ids[row_id, :3] = torch.tensor(roll.sample(range(vocab_size), 3))
        tables.biases[row_id, :3] = torch.randn(3) * 4
        tables.allowed[row_id] = torch.tensor([roll.getrandbits(31) for _ in range(tables.mask_words)])
        some = torch.rand(vocab_size) < 0.4
        tables.counts[row_id] = torch.where(some, torch.randint(9, (vocab_size,)) * 2 + 1, 0).int()
        record[Record.NUM_TOP] = roll.choice([-1, num_top, num_top, roll.randint(-1, num_top)])
    masks = [i for i in range(len(lens)) if roll.random() < 0.4]
    first_token = HEADER_WORDS + ROW_WORDS * len(lens)
    token_ids = [roll.randrange(vocab_size) for _ in range(sum(query_len for _, query_len in lens))]
    words = [0] * first_token + token_ids
    words[Header.NUM_ROWS], words[Header.NUM_TOKENS] = len(lens), len(token_ids)
    words[Header.FIRST_TOKEN], words[Header.FIRST_MASK] = first_token, len(words)
    words[Header.NUM_TOP] = int(tables.records[list(row_ids), Record.NUM_TOP].max())
    words += [roll.getrandbits(31) for _ in range(len(masks) * tables.mask_words)]
    done = 0
    for i, (row_id, (start, query_len)) in enumerate(zip(row_ids, lens, strict=True)):
        at = HEADER_WORDS + ROW_WORDS * i
        words[at + RowWord.ROW_ID], words[at + RowWord.START] = row_id, start
        words[at + RowWord.QUERY_LEN], words[at + RowWord.FIRST_TOKEN] = query_len, done
        words[at + RowWord.TOKENS] = -1 if query_len == 1 else done
        words[at + RowWord.IS_SAMPLED] = roll.choice([0, 1, 1, 1])
        words[at + RowWord.MASK] = masks.index(i) if i in masks else -1
        done += query_len
    return MadeStep(tables, torch.tensor(words, dtype=torch.int32), row_ids)
