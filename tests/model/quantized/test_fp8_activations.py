"""FP8 folders with inputs of linear layers in float8 as well, as a GPU computes them, on the CPU's product of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.paged import PagedDriver
from tests.model.quantized.test_quantized_folders import make_folders
from triolet.config.engine import EngineConfig
from triolet.errors import ConfigError
from triolet.model.backends.layers.scaled_linear import ScaledLinear
from triolet.model.backends.torch_decoder import Decoder
from triolet.model.loading import decoder
from triolet.model.loading.model import load_model
from triolet.model.loading.options import LoadOptions
from triolet.model.loading.runner import load_runner

FP8 = "fp8-activations"


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "can_plan", lambda *_: False)
    monkeypatch.setattr(LoadOptions, "check", lambda options: None)
    monkeypatch.setattr("triolet.model.backends.quant_method.INTEGER_DEVICES", ("cpu",))


def rounded(x: Tensor) -> Tensor:
    """Tokens as float8 stands for them, by torch's own conversion; float64."""
    scale = x.float().abs().amax(-1, keepdim=True) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn).double() * scale.double()


def decoder_of(folder: Path, **options: Any) -> Decoder:
    model = load_model(str(folder), LoadOptions(dtype="bfloat16", **options)).model
    assert isinstance(model, Decoder)
    return model


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-row"])
def test_every_layer_computes_what_its_dequantised_weight_gives_for_rounded_inputs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = make_folders(tmp_path, name)
    ids = torch.randint(0, 200, (30,), generator=torch.manual_seed(1)).tolist()
    model, unrounded = decoder_of(folder, quantization=FP8), decoder_of(folder)
    weights: dict[ScaledLinear, Tensor] = {}
    for each, as_stored in zip(model.layers, unrounded.layers, strict=True):
        for block, place in (
            ("attention", "qkv"),
            ("attention", "out"),
            ("mlp", "project_in"),
            ("mlp", "project_out"),
        ):
            scaled = getattr(getattr(each, block), place)
            parts = getattr(getattr(as_stored, block), place).parts
            weights[scaled] = torch.cat([part.dequantize() for part in parts]).double()
    assert all(isinstance(scaled, ScaledLinear) for scaled in weights)
    calls: list[tuple[ScaledLinear, Tensor, Tensor]] = []
    compute = ScaledLinear.__call__

    def note(layer: ScaledLinear, x: Tensor) -> Tensor:
        y = compute(layer, x)
        calls.append((layer, x.clone(), y.clone()))  # queries and keys are turned in place
        return y

    monkeypatch.setattr(ScaledLinear, "__call__", note)
    logits = PagedDriver(model).once(ids)
    assert {layer for layer, _, _ in calls} == weights.keys()
    for layer, x, y in calls:
        expected = rounded(x) @ weights[layer].T
        torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-4 * expected.abs().max().item())
    # three bits of the inputs are left
    difference = (logits - PagedDriver(unrounded).once(ids)).float().norm() / logits.float().norm()
    assert 0.01 < difference < 0.3


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("name", "dtype", "rule"),
    [
        ("fp8-row", "float32", "another than fp8-activations in torch.float32: it is for bfloat16"),
        (
            "fp8-block",
            "bfloat16",
            "another than fp8-activations without float8 weights that have a scale for a tensor",
        ),
        (
            "gptq-4",
            "bfloat16",
            "another than fp8-activations without float8 weights that have a scale for a tensor",
        ),
    ],
)
def test_models_that_it_is_not_for_are_refused(name: str, dtype: str, rule: str, tmp_path: Path) -> None:
    _, folder = make_folders(tmp_path, name)
    with pytest.raises(ConfigError, match=rule):
        load_model(str(folder), LoadOptions(dtype=dtype, quantization=FP8))


def test_a_cpu_is_told_what_it_needs(tmp_path: Path) -> None:
    _, folder = make_folders(tmp_path, "fp8-row")
    with pytest.raises(
        ConfigError,
        match=r"quantization must be another than fp8-activations, which needs .* compute capability 8\.9",
    ):
        load_runner(EngineConfig(model=str(folder), device="cpu", num_kv_blocks=8, quantization=FP8))
