"""Only the logits that can be the largest are computed for greedy tokens, and what is chosen is what all would give."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.kernels.cpu_variants import compiled, each_on_some_variants
from tests.model.backends.test_cpu_greedy import Both, load
from tests.model.paged import PagedDriver
from tests.model.tiny import make_model
from triolet.kernels.cpu.abi import ModelStruct
from triolet.kernels.cpu.calibration import Calibration
from triolet.kernels.cpu.gemm import packing
from triolet.kernels.cpu.gemm.packing import ANY_ROWS, CppArgmaxFilter, CppLinear, pack_argmax_filter
from triolet.model.backends.cpu import plan
from triolet.model.backends.cpu.decoder import CpuDecoder
from triolet.model.interface import ForwardBatch

VOCAB_SIZE = 3000

Change = Callable[[Tensor, torch.Generator], Tensor]


@pytest.fixture(autouse=True)
def filter_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of the filter must not depend on what is faster on this machine."""

    def calibrate(_: object, model: ModelStruct, *__: object) -> Calibration:
        chosen = Calibration(argmax_filter_rows=ANY_ROWS)
        chosen.apply(model)
        return chosen

    monkeypatch.setattr(plan, "calibrate", calibrate)


def changed(folder: Path, changes: dict[str, Change]) -> Path:
    """The model with some of its weights replaced."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    generator = torch.Generator().manual_seed(3)
    for name, change in changes.items():
        weights[name] = change(weights[name].float(), generator).to(weights[name].dtype).contiguous()
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def heavy_tailed(weight: Tensor, generator: torch.Generator) -> Tensor:
    """A few numbers are thirty times as large as the others: most are rounded away."""
    return weight * torch.where(torch.rand(weight.shape, generator=generator) < 0.02, 30.0, 1.0)


def many_alike(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Of each output some hundred copies, bit for bit or nearly."""
    copies = weight[torch.arange(len(weight)) % 29]
    noise = torch.randn(weight.shape, generator=generator) * 1e-6
    return copies + torch.where(torch.rand(len(weight), 1, generator=generator) < 0.5, noise, 0.0)


def all_alike(weight: Tensor, generator: torch.Generator) -> Tensor:
    return weight[:1] + 1e-7 * torch.randn(weight.shape, generator=generator)


def times(factor: float) -> Change:
    return lambda weight, generator: weight * factor


def most_are_negative(weight: Tensor, generator: torch.Generator) -> Tensor:
    """So that nothing, as of outputs past the last, would be the most."""
    return weight - 20.0 * weight.mean(dim=0)


HEADS: dict[str, dict[str, Change]] = {
    "plain": {},
    "heavy-tailed weights": {"lm_head.weight": heavy_tailed},
    "heavy-tailed rows": {"model.norm.weight": heavy_tailed},
    "many alike": {"lm_head.weight": many_alike},
    "all alike": {"lm_head.weight": all_alike},
    "negative": {"lm_head.weight": most_are_negative},
    "tiny rows": {"model.norm.weight": times(1e-25)},
    "huge rows": {"model.norm.weight": times(1e25)},
    "zero weights": {"lm_head.weight": times(0.0)},
}
ON_SOME = each_on_some_variants(pytest.param(changes, id=name) for name, changes in HEADS.items())


@pytest.mark.parametrize(("changes", "variant"), ON_SOME)
def test_what_is_chosen_of_a_few_logits_is_what_all_would_give(
    changes: dict[str, Change], variant: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = changed(make_model("llama-plain", tmp_path, vocab_size=VOCAB_SIZE), changes)
    both = Both(load(folder, variant, monkeypatch))
    driver = PagedDriver(both)
    ids = torch.randint(VOCAB_SIZE, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = torch.cat([driver.once(ids[begin:end]) for begin, end in ((0, 1), (1, 3), (3, 40), (40, 200))])
    max_logits, tokens = logits.max(dim=1)
    assert both.tokens == tokens.tolist()
    assert both.max_logits == max_logits.tolist()


@pytest.mark.parametrize(("changes", "variant"), ON_SOME)
def test_in_bfloat16_what_is_chosen_is_as_large_as_the_largest_to_the_last_digit_that_is_stored(
    changes: dict[str, Change], variant: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = make_model("llama-plain", tmp_path, vocab_size=VOCAB_SIZE, dtype=torch.bfloat16)
    both = Both(load(changed(folder, changes), variant, monkeypatch))
    driver = PagedDriver(both)
    ids = torch.randint(VOCAB_SIZE, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    one_by_one = driver.sequence(6)
    logits = torch.cat([driver.once(ids), *(driver.step([(one_by_one, [token])])[0] for token in ids[:6])])
    max_logits, tokens = logits.float().max(dim=1)
    chosen = logits.float().gather(1, torch.tensor(both.tokens)[:, None])[:, 0]
    # rows beside each other are multiplied in another order, by tiles: a sum may be rounded to the next number
    torch.testing.assert_close(chosen, max_logits, rtol=2**-7, atol=0)
    torch.testing.assert_close(torch.tensor(both.max_logits), max_logits, rtol=2**-7, atol=0)
    assert both.tokens[-6:] == tokens[-6:].tolist()
    assert both.max_logits[-6:] == max_logits[-6:].tolist()


def parts(model: CpuDecoder) -> tuple[CppLinear, CppArgmaxFilter | None]:
    head = next(kept for kept in model._kept if isinstance(kept, CppLinear))
    return head, next((kept for kept in model._kept if isinstance(kept, CppArgmaxFilter)), None)


@pytest.mark.parametrize("num_rows", [1, 40])
def test_logits_that_can_not_be_the_largest_are_not_computed(
    num_rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = load(make_model("llama-plain", tmp_path, vocab_size=VOCAB_SIZE), "", monkeypatch)
    both = Both(model)
    ids = list(range(num_rows))
    logits = PagedDriver(both).once(ids)
    for outputs in hopeless(logits):
        weights_of(model, outputs).fill_(math.nan)
    assert PagedDriver(model).once(ids).isnan().float().mean() > 0.2
    asked = Recorded(model)
    PagedDriver(asked).once(ids)
    assert asked.tokens == both.tokens
    assert asked.max_logits == both.max_logits


TOGETHER = 16
"""Outputs that are computed together, at most."""


def hopeless(logits: Tensor) -> list[int]:
    """The first of some outputs all of which are far from the largest of every row."""
    behind = logits.max(dim=1, keepdim=True).values - 0.5 * logits.std(dim=1, keepdim=True)
    firsts = range(0, logits.shape[1] - TOGETHER + 1, TOGETHER)
    return [first for first in firsts if bool((logits[:, first : first + TOGETHER] < behind).all())]


def weights_of(model: CpuDecoder, first: int) -> Tensor:
    """Of some outputs of the head, as they are packed."""
    head, _ = parts(model)
    columns = compiled("").triolet_panel_columns()
    panel = head.weights.view(-1, head.num_in, columns)[first // columns]
    return panel[:, first % columns : first % columns + TOGETHER]


class Recorded(Both):
    """Asks for the likeliest tokens only."""

    def forward_logits(self, batch: ForwardBatch) -> Tensor:
        max_logits, tokens = self.model.forward_greedy(batch)
        self.max_logits += max_logits
        self.tokens += tokens
        return torch.zeros(len(max_logits), self.spec.vocab_size)


def test_a_head_with_a_weight_that_is_no_number_gets_no_argmax_filter_and_fails_as_it_did(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def with_a_nan(weight: Tensor, generator: torch.Generator) -> Tensor:
        weight[1234, 5] = math.nan
        return weight

    folder = make_model("llama-plain", tmp_path, vocab_size=VOCAB_SIZE)
    model = load(changed(folder, {"lm_head.weight": with_a_nan}), "", monkeypatch)
    both = Both(model)
    PagedDriver(both).once([1, 2, 3])
    assert parts(model)[1] is None
    assert all(math.isnan(max_logit) for max_logit in both.max_logits)
    assert both.tokens == [1234] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_argmax_filter_is_counted_among_the_bytes_of_the_model(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = make_model("llama-plain", tmp_path, vocab_size=VOCAB_SIZE, dtype=dtype)
    with_filter = load(folder, "", monkeypatch)
    head, filter_ = parts(with_filter)
    assert filter_ is not None
    assert filter_.weights.weights.nbytes == len(head.weights)
    monkeypatch.setattr(packing, "MAX_ARGMAX_FILTER_BYTES", VOCAB_SIZE * 64 - 1)
    without = load(folder, "", monkeypatch)
    assert parts(without)[1] is None
    assert with_filter.num_bytes - without.num_bytes == filter_.num_bytes


@pytest.mark.parametrize("shape", [(100, 6), (1, 2)])
def test_an_argmax_filter_needs_a_multiple_of_four_inputs(shape: Sequence[int]) -> None:
    assert pack_argmax_filter(compiled(""), torch.ones(*shape)) is None
    assert pack_argmax_filter(compiled(""), torch.ones(shape[0], 4)) is not None


def test_no_estimate_is_further_off_than_its_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-3, 1.0, 300.0):
        weight = heavy_tailed(torch.randn(500, 96, generator=generator) * scale, generator)
        rows = heavy_tailed(torch.randn(50, 96, generator=generator), generator)
        rounded, scales = packing._round(weight)
        bounds = packing._bounds(weight, rounded, scales)
        first, steps = packing._round(rows)
        second, rest_steps = packing._round(rows - first * steps[:, None])
        as_bytes = first.double() * steps[:, None] + second.double() * rest_steps[:, None]
        estimates = as_bytes @ (rounded.double() * scales[:, None]).T
        off = (estimates - rows.double() @ weight.double().T).abs()
        allowed = rows.double().norm(dim=1)[:, None] * bounds
        assert bool((off <= allowed).all())
        assert float((off / allowed).max()) > 0.05  # and bounds that say nothing would hold, too


def test_no_first_half_of_an_estimate_is_further_off_than_its_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-3, 1.0, 300.0):
        weight = heavy_tailed(torch.randn(500, 96, generator=generator) * scale, generator)
        rows = heavy_tailed(torch.randn(50, 96, generator=generator), generator)
        rounded, scales = packing._round(weight)
        bounds, lengths = packing._bounds(weight, rounded, scales), packing._lengths(rounded, scales)
        first, steps = packing._round(rows)
        as_bytes = first.double() * steps[:, None]
        estimates = as_bytes @ (rounded.double() * scales[:, None]).T
        off = (estimates - rows.double() @ weight.double().T).abs()
        norm, rest = rows.double().norm(dim=1), (rows.double() - as_bytes).norm(dim=1)
        allowed = norm[:, None] * bounds + rest[:, None] * lengths
        assert bool((off <= allowed).all())
        assert float((off / allowed).max()) > 0.05  # and bounds that say nothing would hold, too
        # without what the rounding errors of the rows can add the bound would not hold
        assert bool((off > norm[:, None] * bounds).any())
