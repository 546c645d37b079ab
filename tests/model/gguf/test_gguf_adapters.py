"""Adapters over the weights of a GGUF file compute what transformers computes with the two merged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.kernels.cpu_variants import compiled
from tests.model.gguf.test_gguf_models import FAMILIES, PROMPT, WIDE, model_of, more_keys, with_weights_of
from tests.model.gguf.tiny_gguf import write_gguf
from tests.model.paged import PagedDriver
from tests.model.tiny_adapters import LINEAR, every_layer, make_adapter
from triolet.core.step_plan import AdapterStart
from triolet.model.backends.cpu import plan
from triolet.model.folder.adapter_files import read_adapter
from triolet.model.loading.model import load_model
from triolet.model.loading.options import AdapterLimits, LoadedFolder, LoadOptions

pytestmark = pytest.mark.usefixtures("one_thread")

PHI3 = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
LIMITS = AdapterLimits(max_loras=2, max_lora_rank=16, max_cpu_loras=2, lora_dtype="auto")


@pytest.fixture(params=["cpp", pytest.param("torch", marks=pytest.mark.slow)])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder that reads a file."""
    if request.param == "torch":
        monkeypatch.setattr(plan, "library", lambda: None)
    else:
        compiled()


def modules_of(family: str) -> list[str]:
    if "moe" in family or family == "gpt-oss":  # the experts cannot be adapted
        return every_layer(LINEAR[:4])
    return every_layer(PHI3 if family == "phi3" else LINEAR)


@torch.inference_mode()
def merge(model: Any, adapter: Path) -> None:
    """Add an adapter to transformers' own reading of the file, by the formulas of the papers."""
    stored = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    scaling = config["lora_alpha"] / config["r"]
    for name, a in stored.items():
        module, _, part = name.removeprefix("base_model.model.").partition(".lora_")
        if part == "embedding_A":
            weight = model.get_submodule(module).weight
            weight += scaling * (stored[name.removesuffix("A") + "B"] @ a).T
        if part == "A.weight":
            weight = model.get_submodule(module).weight
            weight += scaling * stored[name.replace("lora_A", "lora_B")] @ a
            if config.get("use_dora"):
                magnitude = stored[name.replace("lora_A.weight", "lora_magnitude_vector")]
                weight *= (magnitude / weight.norm(dim=1)).unsqueeze(1)


def placed(loaded: LoadedFolder, adapter: Path) -> PagedDriver:
    """A driver whose slot 1 has the adapter."""
    assert loaded.adapters is not None
    digest = read_adapter(adapter, loaded.adapters.support).digest
    loaded.adapters.place(AdapterStart(slot=1, name="mine", path=str(adapter), digest=digest))
    assert loaded.adapters.failure(1) is None
    return PagedDriver(loaded.model)


def logits(driver: PagedDriver, slots: Sequence[int]) -> list[Tensor]:
    """Logits of the prompt in rows of these slots, computed together in two chunks."""
    rows = [driver.sequence(len(PROMPT)) for _ in slots]
    chunks = [
        driver.step([(row, part) for row in rows], adapter_slots=slots) for part in (PROMPT[:11], PROMPT[11:])
    ]
    driver.free(*rows)
    return [torch.cat(row) for row in zip(*chunks, strict=True)]


@pytest.mark.parametrize(
    ("family", "kind", "fields"),
    [
        ("llama-plain", "Q8_0", {}),  # with permuted rows of queries and keys
        *(
            pytest.param(family, kind, {}, marks=pytest.mark.slow)
            for family in FAMILIES
            for kind in ("Q8_0", "Q4_0")
        ),
        pytest.param("qwen3", "Q4_K", {}, marks=pytest.mark.slow),
        pytest.param("llama-plain", "Q8_0", {"use_dora": True}, marks=pytest.mark.slow),
        pytest.param("llama-plain", "Q8_0", {"ends": True}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("decoder")
def test_an_adapter_over_a_file_gives_the_logits_of_transformers_with_both_merged(
    family: str, kind: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    sizes = WIDE if kind == "Q4_K" else {"moe_intermediate_size": 64} if "moe" in family else {}
    folder = model_of(family, tmp_path, **sizes)
    path = write_gguf(folder, tmp_path / "model.gguf", kind, metadata=more_keys(family))
    adapter = make_adapter(folder, tmp_path / "adapter", modules_of(family), **fields)
    driver = placed(load_model(str(path), LoadOptions(dtype="float32", adapter_limits=LIMITS)), adapter)
    adapted, plain, again = logits(driver, (1, -1, 1))
    model = with_weights_of(path, folder)
    assert_same(plain, model)
    merge(model, adapter)
    assert_same(adapted, model)
    assert adapted.equal(again)
    assert not adapted.allclose(plain, atol=1e-2)


@torch.inference_mode()
def assert_same(found: Tensor, model: Any) -> None:
    expected = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
