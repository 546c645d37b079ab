"""The likeliest tokens that the C++ step finds while it computes the logits are those that torch finds in them."""

from __future__ import annotations

import math
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.cpu_variants import compiled, on_every_cpu_variant
from tests.model.paged import PagedDriver
from tests.model.tiny import VOCAB_SIZE, make_model
from triolet.model.backends.cpu import plan
from triolet.model.backends.cpu.decoder import CpuDecoder
from triolet.model.interface import ForwardBatch
from triolet.model.loading.model import load_model
from triolet.model.loading.options import LoadOptions


class Both:
    """A model whose `forward_logits` asks for the likeliest tokens first, and notes them."""

    def __init__(self, model: CpuDecoder) -> None:
        self.model, self.spec = model, model.spec
        self.max_logits: list[float] = []
        self.tokens: list[int] = []

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self.model.forward(batch)

    def compute_logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return self.model.compute_logits(hidden, rows)

    def forward_logits(self, batch: ForwardBatch) -> Tensor:
        max_logits, tokens = self.model.forward_greedy(batch)
        self.max_logits += max_logits
        self.tokens += tokens
        return self.model.forward_logits(batch)


def load(
    folder: Path, variant: str, monkeypatch: pytest.MonkeyPatch, *, quantization: str | None = None
) -> CpuDecoder:
    monkeypatch.setattr(plan, "library", lambda: compiled(variant))
    model = load_model(str(folder), LoadOptions(quantization=quantization)).model
    assert isinstance(model, CpuDecoder)
    return model


@on_every_cpu_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 333])
def test_the_likeliest_tokens_are_those_of_the_logits(
    vocab_size: int, dtype: torch.dtype, variant: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = make_model("llama", tmp_path, dtype=dtype, vocab_size=vocab_size)
    both = Both(load(folder, variant, monkeypatch))
    driver = PagedDriver(both)
    sequences = [driver.sequence(40) for _ in range(6)]
    chunks = [
        (each, [(7 * i + j) % vocab_size for j in range(1 + 5 * i)]) for i, each in enumerate(sequences)
    ]
    logits = torch.cat([*driver.step(chunks), *driver.step([(each, [9]) for each in sequences])])
    max_logits, tokens = logits.max(dim=1)
    assert both.tokens == tokens.tolist()
    assert both.max_logits == max_logits.tolist()


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_of_equal_logits_the_first_is_chosen_and_a_nan_before_all(
    num_threads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = load(make_model("llama", tmp_path), "", monkeypatch)
    both = Both(model)
    driver = PagedDriver(both)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for bad, max_logit in ((0.0, 0.0), (math.nan, math.nan)):
            norm = model._kept[[i for i, kept in enumerate(model._kept) if isinstance(kept, Tensor)][-1]]
            assert isinstance(norm, Tensor)  # the final norm: with it, all logits are equal
            norm.fill_(bad)
            driver.once([1, 2, 3])
            assert both.tokens[-3:] == [0, 0, 0]
            assert all(found == max_logit or found != found for found in both.max_logits[-3:])
            assert math.isnan(both.max_logits[-1]) == math.isnan(max_logit)
    finally:
        torch.set_num_threads(before)


def test_steps_of_several_threads_at_once_do_not_disturb_each_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = load(make_model("llama", tmp_path), "", monkeypatch)
    ids = list(range(1, 40))
    truth = PagedDriver(model).once(ids)
    wrong: list[int] = []

    def compute(number: int) -> None:
        driver = PagedDriver(model, seed=number)
        for _ in range(20):
            sequence = driver.sequence(len(ids))
            logits = driver.step([(sequence, ids)])[0]
            driver.free(sequence)
            if not logits.equal(truth):
                wrong.append(number)

    threads = [threading.Thread(target=compute, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(sys.platform != "linux", reason="an eventfd is Linux'")
def test_a_step_in_the_background_finds_the_same_and_says_when_it_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class InBackground(Both):
        def forward_logits(self, batch: ForwardBatch) -> Tensor:
            done = os.eventfd(0)
            model.prepare()
            run = model.begin_greedy(batch, num_steps=1, done_fd=done)
            with open(done, "rb", buffering=0) as end:
                assert end.read(8) == (1).to_bytes(8, sys.byteorder)  # waits for it
            (step,) = run.steps(1)
            assert run.is_over
            assert step.elapsed_s > 0
            found.append((step.max_logits, step.token_ids))
            return super().forward_logits(batch)

    model = load(make_model("llama", tmp_path), "", monkeypatch)
    found: list[tuple[list[float], list[int]]] = []
    both = InBackground(model)
    driver = PagedDriver(both)
    for length in (1, 2, 30):
        driver.once(list(range(3, 3 + length)))
    assert [max_logit for max_logits, _ in found for max_logit in max_logits] == both.max_logits
    assert [token for _, tokens in found for token in tokens] == both.tokens
