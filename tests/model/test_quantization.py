"""Weights as bytes: as near to the model as bytes can be, the same on every CPU, and refused where they can not be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cpu_variants import compiled, on_every_cpu_variant
from tests.model.paged import PagedDriver
from tests.model.tiny import VOCAB_SIZE, make_model
from triolet.config import EngineConfig
from triolet.errors import ConfigError, KernelShapeError
from triolet.kernels.cpu.decoder import pack_bytes
from triolet.model import cpu_plan
from triolet.model.cpu_plan import CpuDecoder
from triolet.model.load import load_model


def tokens(count: int, seed: int = 1) -> list[int]:
    ids: list[int] = torch.randint(0, VOCAB_SIZE, (count,), generator=torch.manual_seed(seed)).tolist()
    return ids


def logits_of(folder: Path, ids: list[int], quantization: str | None, variant: str = "") -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_plan, "library", lambda: compiled(variant))
        model = load_model(str(folder), quantization=quantization).model
    assert isinstance(model, CpuDecoder)
    return PagedDriver(model).once(ids).float()


@on_every_cpu_variant
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
@pytest.mark.parametrize("num_tokens", [3, 40])
def test_bytes_are_near_to_the_whole_weights(
    num_tokens: int, family: str, variant: str, tmp_path: Path
) -> None:
    folder, ids = make_model(family, tmp_path), tokens(num_tokens)
    truth = logits_of(folder, ids, None, variant)
    rounded = logits_of(folder, ids, "int8", variant)
    assert 0 < (rounded - truth).norm() / truth.norm() < 0.1


@pytest.mark.parametrize("overrides", [{}, {"hidden_size": 60, "intermediate_size": 76, "head_dim": 12}])
def test_sums_of_bytes_are_the_same_whatever_computes_them(overrides: dict[str, Any], tmp_path: Path) -> None:
    """The products are the same integers; only what is between them differs with the width of the vectors."""
    folder, ids = make_model("llama", tmp_path, **overrides), tokens(33)
    truth, narrow = (logits_of(folder, ids, "int8", variant) for variant in ("", "-march=x86-64"))
    assert (narrow - truth).norm() / truth.norm() < 5e-3


def test_a_row_of_bytes_alone_and_in_a_batch_of_32_has_the_same_logits_bit_for_bit(tmp_path: Path) -> None:
    driver = PagedDriver(
        load_model(str(make_model("llama", tmp_path)), quantization="int8").model, num_blocks=512
    )
    prompts = [tokens(5 + row % 9, seed=row) for row in range(32)]

    def decodes(rows: list[int]) -> list[Tensor]:
        sequences = [driver.sequence(16) for _ in rows]
        for sequence, row in zip(sequences, rows, strict=True):
            driver.feed(sequence, prompts[row])
        logits = driver.step([(sequence, [7]) for sequence in sequences])
        driver.free(*sequences)
        return [each[-1] for each in logits]

    together = decodes(list(range(32)))
    for row in (0, 13, 31):
        assert decodes([row])[0].equal(together[row])


def test_a_row_that_is_no_numbers_stays_so(tmp_path: Path) -> None:
    model = load_model(str(make_model("llama", tmp_path)), quantization="int8").model
    driver = PagedDriver(model)
    sequence = driver.sequence(8)
    driver.feed(sequence, [1, 2])
    for layer in driver.cache:
        layer.values.fill_(torch.nan)
    assert driver.step([(sequence, [3])])[0].isnan().all()


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "mixtral"])
def test_models_that_do_not_run_as_one_step_are_refused(family: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantization must be none for this model"):
        load_model(str(make_model(family, tmp_path)), quantization="int8")


def test_widths_that_are_no_fours_are_refused(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path, intermediate_size=70)
    with pytest.raises(ConfigError, match="quantization must be none for this model"):
        load_model(str(folder), quantization="int8")
    with pytest.raises(KernelShapeError, match="fours of inputs"):
        pack_bytes(compiled(""), torch.zeros(8, 6))


def test_only_what_is_known_can_be_configured() -> None:
    assert EngineConfig(quantization="int8").quantization == "int8"
    with pytest.raises(ConfigError, match="quantization must be one of none, int8"):
        EngineConfig(quantization="awq")
