"""A state is found again: in a repeated step, behind another sequence's blocks, in blocks that were used before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from tests.model.backends.test_decoder_parity import SEEDS, TOLERANCE, reference, reference_logits, tokens
from tests.model.paged import PagedDriver, PagedSequence
from tests.model.tiny import make_model
from triolet.errors import InvariantViolated
from triolet.model.backends.layers.recurrent import batches
from triolet.model.backends.layers.recurrent.block_states import write_states
from triolet.model.interface import CausalModel
from triolet.model.loading.model import load_model

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE, LENGTH = 8, 30


@attrs.frozen
class Hybrid:
    """A model with recurrent layers, and the logits of transformers after each of some tokens."""

    model: CausalModel
    tokens: list[int]
    logits: Tensor

    def driver(self) -> PagedDriver:
        """The model with a cache of its own."""
        return PagedDriver(self.model, num_blocks=16, block_size=BLOCK_SIZE)


@pytest.fixture(
    scope="module",
    params=["granite-hybrid-dense", "qwen3-next-dense", "lfm2", "mamba", "minimax-window", "zamba"],
)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    folder: Path = make_model(
        request.param, tmp_path_factory.mktemp("hybrid"), seed=SEEDS.get(request.param, 0)
    )
    ids = tokens(LENGTH)
    return Hybrid(load_model(str(folder)).model, ids, reference_logits(reference(folder), ids))


def assert_same(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)


# First chunks, and one that is computed twice: within a block, to its end, over it, of a whole one, from the start.
REPEATED = [
    ((5,), 1), ((5, 1, 1), 1), ((5,), 3), ((5,), 4), ((5,), 14), ((8,), 1), ((8,), 8), ((3, 4), 1), ((), 6), ((), 20),
]  # fmt: skip


@pytest.mark.parametrize(("before", "count"), REPEATED, ids=str)
def test_a_step_that_is_computed_twice_gives_the_same_and_so_does_what_follows(
    before: tuple[int, ...], count: int, hybrid: Hybrid
) -> None:
    driver = hybrid.driver()
    sequence = driver.sequence(LENGTH)
    for size in before:
        driver.feed(sequence, hybrid.tokens[sequence.length : sequence.length + size])
    start, end = sequence.length, sequence.length + count
    driver.feed(sequence, hybrid.tokens[start:end])
    sequence.length = start
    assert_same(driver.feed(sequence, hybrid.tokens[start:end]), hybrid.logits[start:end])
    assert_same(driver.feed(sequence, hybrid.tokens[end:], chunk=3), hybrid.logits[end:])


@pytest.mark.parametrize("shorter", [1, 4])
@pytest.mark.parametrize("failing_layer", [0, 1])
def test_a_step_that_broke_off_between_two_layers_is_computed_again_in_smaller_ones(
    failing_layer: int, shorter: int, hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = hybrid.driver()
    sequence = driver.sequence(LENGTH)
    driver.feed(sequence, hybrid.tokens[:11])
    calls = [0]

    def break_off(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] > failing_layer:
            raise MemoryError
        write_states(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(batches, "write_states", break_off)
        with pytest.raises(MemoryError):
            driver.feed(sequence, hybrid.tokens[11:24])
    sequence.length = 11
    assert_same(driver.feed(sequence, hybrid.tokens[11:], chunk=shorter), hybrid.logits[11:])


def test_a_sequence_goes_on_behind_full_blocks_of_another_that_has_gone_further(hybrid: Hybrid) -> None:
    driver = hybrid.driver()
    first = driver.sequence(LENGTH)
    driver.feed(first, hybrid.tokens[:19], chunk=1)
    second = PagedSequence([*first.block_table[:2], *driver.sequence(LENGTH).block_table[:2]], 16)
    assert_same(driver.feed(second, hybrid.tokens[16:]), hybrid.logits[16:])
    assert_same(driver.feed(first, hybrid.tokens[19:]), hybrid.logits[19:])


def test_a_state_of_the_sequence_that_a_block_belonged_to_before_is_not_read(hybrid: Hybrid) -> None:
    driver = hybrid.driver()
    before = driver.sequence(BLOCK_SIZE)
    driver.feed(before, tokens(5, seed=9)[:4])
    driver.feed(before, tokens(5, seed=9)[4:])  # now a state after 5 tokens is in the second version
    after = PagedSequence([*before.block_table, *driver.sequence(LENGTH).block_table])
    driver.feed(after, hybrid.tokens[:5])  # and another one in the first
    assert_same(driver.feed(after, hybrid.tokens[5:]), hybrid.logits[5:])


def test_a_sequence_that_goes_on_where_no_state_is_breaks_an_invariant(hybrid: Hybrid) -> None:
    driver = hybrid.driver()
    sequence = driver.sequence(LENGTH)
    driver.feed(sequence, hybrid.tokens[:12])
    sequence.length = 10
    with pytest.raises(InvariantViolated, match=r"after \[10\]; got \[\[12, 0\]\]"):
        driver.feed(sequence, hybrid.tokens[10:11])


def test_rows_with_one_token_and_chunks_are_computed_in_one_step(hybrid: Hybrid) -> None:
    driver = hybrid.driver()
    starts = [0, 13, 8, 21]
    sequences = [driver.sequence(LENGTH) for _ in starts]
    for sequence, start in zip(sequences, starts, strict=True):
        if start:
            driver.feed(sequence, hybrid.tokens[:start])
    sizes = [7, 1, 12, 1]
    spans = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    found = driver.step(
        [(sequence, hybrid.tokens[span]) for sequence, span in zip(sequences, spans, strict=True)]
    )
    for logits, span in zip(found, spans, strict=True):
        assert_same(logits, hybrid.logits[span])
