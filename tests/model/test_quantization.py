"""Int8 and int4 weights: as near to the model as they can be, the same on every CPU, and refused where they cannot
be used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.kernels.cpu_variants import compiled, each_on_some_variants, on_every_cpu_variant
from tests.model.paged import PagedDriver
from tests.model.tiny import VOCAB_SIZE, make_model
from triolet.config.engine import EngineConfig
from triolet.errors import ConfigError, KernelShapeError
from triolet.kernels.cpu.gemm.packing import GROUP, pack_int4, pack_int8, round_groups
from triolet.model.backends.cpu import plan
from triolet.model.backends.cpu.decoder import CpuDecoder
from triolet.model.loading.model import load_model
from triolet.model.loading.options import LoadOptions


def tokens(count: int, seed: int = 1) -> list[int]:
    ids: list[int] = torch.randint(0, VOCAB_SIZE, (count,), generator=torch.manual_seed(seed)).tolist()
    return ids


def logits_of(folder: Path, ids: list[int], quantization: str | None, variant: str = "") -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "library", lambda: compiled(variant))
        model = load_model(str(folder), LoadOptions(quantization=quantization)).model
    assert isinstance(model, CpuDecoder)
    return PagedDriver(model).once(ids).float()


# Widths that hold whole groups, and vectors of every width that some targets have not.
GROUPED: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "head_dim": 24,
}


@pytest.mark.parametrize(("family", "variant"), each_on_some_variants(["llama", "qwen2", "phi3"]))
@pytest.mark.parametrize("num_tokens", [3, 40])
@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.1), ("int4", 0.8)])
def test_rounded_weights_are_near_to_the_whole_ones(
    quantization: str, most: float, num_tokens: int, family: str, variant: str, tmp_path: Path
) -> None:
    folder, ids = make_model(family, tmp_path), tokens(num_tokens)
    truth = logits_of(folder, ids, None, variant)
    rounded = logits_of(folder, ids, quantization, variant)
    assert 0 < (rounded - truth).norm() / truth.norm() < most


@on_every_cpu_variant
@pytest.mark.parametrize(
    ("quantization", "overrides"),
    [
        ("int8", {}),
        ("int8", {"hidden_size": 60, "intermediate_size": 76, "head_dim": 12}),
        ("int8", {"intermediate_size": 588}),  # more than is unpacked at a time
        ("int4", {}),
        ("int4", GROUPED),
    ],
)
def test_sums_of_bytes_are_the_same_whatever_computes_them(
    quantization: str, overrides: dict[str, Any], variant: str, tmp_path: Path
) -> None:
    """The products are the same integers; only what is between them differs with the width of the vectors."""
    folder, ids = make_model("llama", tmp_path, **overrides), tokens(33)
    narrow, found = (logits_of(folder, ids, quantization, name) for name in ("portable", variant))
    assert (found - narrow).norm() / narrow.norm() < 5e-3


@pytest.mark.parametrize(("num_tokens", "variant"), each_on_some_variants([1, 2, 5, 7, 13, 130]))
def test_weights_that_are_sixteen_steps_lose_nothing_but_what_the_activations_do(
    num_tokens: int, variant: str, tmp_path: Path
) -> None:
    folder, ids = make_model("llama", tmp_path, **GROUPED), tokens(num_tokens)
    tensors = load_file(folder / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith("proj.weight"):
            tensors[name] = (weight / weight.abs().max() * 8).round().clamp(-8, 7) / 128
            tensors[name][:, ::GROUP] = -8 / 128
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    truth, found = (logits_of(folder, ids, quantization, variant) for quantization in (None, "int4"))
    assert (found - truth).norm() / truth.norm() < 0.03


@on_every_cpu_variant
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_rounded_row_alone_and_in_a_batch_of_32_has_the_same_logits_bit_for_bit(
    quantization: str, variant: str, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "library", lambda: compiled(variant))
        model = load_model(str(make_model("llama", tmp_path)), LoadOptions(quantization=quantization)).model
    driver = PagedDriver(model, num_blocks=512)
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


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_row_that_is_no_numbers_stays_so(quantization: str, tmp_path: Path) -> None:
    model = load_model(str(make_model("llama", tmp_path)), LoadOptions(quantization=quantization)).model
    driver = PagedDriver(model)
    sequence = driver.sequence(8)
    driver.feed(sequence, [1, 2])
    for layer in driver.cache:
        layer.values.fill_(torch.nan)
    assert driver.step([(sequence, [3])])[0].isnan().all()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_models_that_do_not_run_as_one_step_are_refused(
    family: str, quantization: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"quantization must be none for this model.*got '{quantization}'"):
        load_model(str(make_model(family, tmp_path)), LoadOptions(quantization=quantization))


def test_widths_that_are_no_groups_of_four_are_refused(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path, intermediate_size=70)
    with pytest.raises(ConfigError, match="quantization must be none for this model"):
        load_model(str(folder), LoadOptions(quantization="int8"))
    with pytest.raises(KernelShapeError, match="groups of 4 inputs"):
        pack_int8(compiled(""), torch.zeros(8, 6))


def test_widths_that_are_no_groups_are_refused(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path, intermediate_size=80)
    with pytest.raises(ConfigError, match="quantization must be none for this model"):
        load_model(str(folder), LoadOptions(quantization="int4"))
    with pytest.raises(KernelShapeError, match="groups of inputs"):
        pack_int4(compiled(""), torch.zeros(8, 48))


def test_sixteen_steps_are_used_where_a_group_needs_them_and_nothing_stays_nothing() -> None:
    weight = torch.zeros(2, 2 * GROUP)
    weight[0, :16] = torch.arange(-8, 8) * 0.25
    weight[1, GROUP] = 3.0  # alone, and positive: step -8 of a negative size
    steps, sizes = round_groups(weight)
    assert steps[0, :16].tolist() == list(range(-8, 8)) and sizes[0].tolist() == [0.25, 0.0]
    assert (steps[1, GROUP] * sizes[1, 1]).item() == 3.0
    assert not steps[0, 16:].any() and sizes[1, 0] == 0


def test_halves_of_bytes_take_4_and_a_half_bits(tmp_path: Path) -> None:
    linear = pack_int4(compiled(""), torch.randn(256, 512))
    assert linear.num_bytes == 256 * 512 * 4.5 / 8


def test_only_what_is_known_can_be_configured() -> None:
    assert EngineConfig(quantization="int4").quantization == "int4"
    with pytest.raises(ConfigError, match="quantization must be one of none, int8, int4"):
        EngineConfig(quantization="squeezellm")
