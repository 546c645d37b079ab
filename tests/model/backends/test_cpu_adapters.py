"""The C++ decoder adds to a step what the torch decoder adds, whatever adapters its rows have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cpu_variants import compiled, on_every_cpu_variant
from tests.model.paged import PagedDriver
from tests.model.tiny import VOCAB_SIZE, make_model
from tests.model.tiny_adapters import ATTENTION, LINEAR, every_layer, make_adapter
from triolet.core.step_plan import AdapterStart
from triolet.model.backends.cpu import plan
from triolet.model.backends.cpu.decoder import CpuDecoder
from triolet.model.backends.torch_decoder import Decoder
from triolet.model.folder.adapter_files import read_adapter
from triolet.model.loading.model import load_model
from triolet.model.loading.options import AdapterLimits, LoadOptions

PHI3 = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
SLOTS = (2, -1, 0, 1, 3, 0)
PROMPTS = [
    torch.randint(0, VOCAB_SIZE, (3 + 5 * row,), generator=torch.manual_seed(row)).tolist()
    for row in range(len(SLOTS))
]

Load = Callable[..., PagedDriver]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a model with adapters in its slots, with the kernels of a variant or in torch."""

    def load(folder: Path, adapters: Sequence[Path], variant: str | None, **settings: Any) -> PagedDriver:
        cpp = None if variant is None else compiled(variant)
        monkeypatch.setattr(plan, "library", lambda: cpp)
        limits = AdapterLimits(max_loras=4, max_lora_rank=64, max_cpu_loras=4, lora_dtype="auto")
        loaded = load_model(str(folder), LoadOptions(adapter_limits=limits, **settings))
        assert isinstance(loaded.model, Decoder if variant is None else CpuDecoder)
        assert loaded.adapters is not None
        for slot, path in enumerate(adapters):
            digest = read_adapter(path, loaded.adapters.support).digest
            loaded.adapters.place(AdapterStart(slot=slot, name=path.name, path=str(path), digest=digest))
            assert loaded.adapters.failure(slot) is None
        return PagedDriver(loaded.model, num_blocks=512)

    return load


def make_adapters(base: Path, root: Path) -> list[Path]:
    """Adapters of ranks that fill vectors and that do not, one with DoRA, one of the embedding and the head."""
    linear = every_layer(
        {"phi3": PHI3, "mixtral": ATTENTION}.get(base.name, LINEAR)
    )  # experts are not adapted
    few = every_layer(PHI3[:1] if base.name == "phi3" else ("self_attn.q_proj", "self_attn.v_proj"))
    return [
        make_adapter(base, root / "all", linear, rank=16, seed=1),
        make_adapter(base, root / "odd", linear, rank=3, seed=2, lora_bias=True),
        make_adapter(base, root / "dora", few, rank=9, seed=3, use_dora=True),
        make_adapter(base, root / "ends", few, rank=1, seed=4, ends=True),
    ]


def answers(driver: PagedDriver, rows: Sequence[int], slots: Sequence[int] = SLOTS) -> list[Tensor]:
    """Logits of the prompts of rows that are computed together, in two chunks, and of two tokens after them."""
    sequences = [driver.sequence(40) for _ in rows]
    chunks = [[PROMPTS[row][:2] for row in rows], [PROMPTS[row][2:] for row in rows]]
    chunks += [[[row] for row in rows], [[7] for _ in rows]]
    steps = [
        driver.step(list(zip(sequences, chunk, strict=True)), adapter_slots=[slots[row] for row in rows])
        for chunk in chunks
    ]
    driver.free(*sequences)
    return [torch.cat(row) for row in zip(*steps, strict=True)]


@on_every_cpu_variant
@pytest.mark.parametrize(
    "family",
    [
        "llama-biased",
        "mixtral",
        *(
            pytest.param(family, marks=pytest.mark.slow)
            for family in ("qwen3", "phi3", "gemma2", "cohere2", "granite", "olmo2")
        ),
    ],
)
def test_rows_of_all_adapters_and_of_none_get_the_logits_of_the_torch_decoder(
    family: str, variant: str, load: Load, tmp_path: Path
) -> None:
    base = make_model(family, tmp_path / family)
    adapters = make_adapters(base, tmp_path)
    packed, in_torch = (load(base, adapters, kind) for kind in (variant, None))
    rows = range(len(SLOTS))
    for found, expected in zip(answers(packed, rows), answers(in_torch, rows), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)
    plain = answers(packed, rows, [-1] * len(SLOTS))
    changed = [
        not one.allclose(other, atol=1e-2) for one, other in zip(answers(packed, rows), plain, strict=True)
    ]
    assert changed == [slot >= 0 for slot in SLOTS]


@on_every_cpu_variant
@pytest.mark.parametrize("family", ["llama-biased", "cohere2"])
def test_rows_with_adapters_have_the_same_logits_whatever_rows_they_are_asked_for_with(
    family: str, variant: str, load: Load, tmp_path: Path
) -> None:
    base = make_model(family, tmp_path / family)
    driver = load(base, make_adapters(base, tmp_path), variant)

    def logits_of(rows: Sequence[int]) -> Tensor:
        sequences = [driver.sequence(len(prompt)) for prompt in PROMPTS]
        chunks = list(zip(sequences, PROMPTS, strict=True))
        [logits] = driver.step(chunks, logits_indices=rows, adapter_slots=SLOTS)
        driver.free(*sequences)
        return logits

    ends = torch.tensor([len(prompt) for prompt in PROMPTS]).cumsum(0)
    every = logits_of(range(int(ends[-1])))
    for rows in ([int(end) - 1 for end in ends], [int(ends[3]) - 1], []):
        assert logits_of(rows).equal(every[rows])


@on_every_cpu_variant
@pytest.mark.parametrize(
    "settings",
    [
        {},
        *(
            pytest.param(settings, marks=pytest.mark.slow)
            for settings in ({"quantization": "int8"}, {"quantization": "int4"})
        ),
    ],
)
def test_a_row_alone_and_beside_other_adapters_has_the_same_bits(
    settings: dict[str, Any], variant: str, load: Load, tmp_path: Path
) -> None:
    base = make_model("llama-biased", tmp_path / "llama-biased")
    driver = load(base, make_adapters(base, tmp_path), variant, **settings)
    together = answers(driver, range(len(SLOTS)))
    for row in range(len(SLOTS)):
        assert answers(driver, [row])[0].equal(together[row])


@on_every_cpu_variant
@pytest.mark.slow
def test_the_adapters_of_other_rows_change_no_bit_of_a_bfloat16_row(
    variant: str, load: Load, tmp_path: Path
) -> None:
    # In bfloat16 tiles and vectors round differently, so that the number of rows is kept.
    base = make_model("llama-biased", tmp_path / "llama-biased")
    driver = load(base, make_adapters(base, tmp_path), variant, dtype="bfloat16")
    rows = range(len(SLOTS))
    expected = answers(driver, rows)
    for row in rows:
        for others in (-1, 0, 1, 2, 3):
            slots = [SLOTS[row] if other == row else others for other in rows]
            assert answers(driver, rows, slots)[row].equal(expected[row])


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_adapters_of_quantised_weights_add_no_error_of_their_own(
    quantization: str, load: Load, tmp_path: Path
) -> None:
    base = make_model("llama-biased", tmp_path / "llama-biased")
    adapters = make_adapters(base, tmp_path)
    quantised, in_torch = load(base, adapters, "", quantization=quantization), load(base, adapters, None)

    def error(slots: Sequence[int]) -> float:
        pairs = [answers(driver, range(len(SLOTS)), slots) for driver in (quantised, in_torch)]
        found, expected = map(torch.cat, pairs)
        return float((found - expected).norm() / expected.norm())

    assert error(SLOTS) < 1.5 * error([-1] * len(SLOTS))
