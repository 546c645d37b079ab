"""Files that run with `int8-activations` compute what transformers computes from rounded inputs of linear layers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.cpu_variants import compiled
from tests.kernels.rounded_activations import rounded
from tests.model.gguf.test_gguf_models import PROMPT, WIDE, model_of, with_weights_of
from tests.model.gguf.tiny_gguf import write_gguf
from tests.model.paged import PagedDriver
from tests.model.tiny import make_model
from triolet.core.load_progress import OnProgress
from triolet.errors import ConfigError
from triolet.model.backends.cpu.decoder import CpuDecoder
from triolet.model.loading.model import load_model
from triolet.model.loading.options import LoadOptions

pytestmark = pytest.mark.usefixtures("one_thread")

PAIRS = [PROMPT[at : at + 2] for at in range(len(PROMPT) - 1)]
"""Prompts, so short that few of them meet a number half way between two integers."""


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """The kernels must be there."""
    compiled()


def round_inputs(_module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    return rounded(inputs[0])


def quantised(path: Path, on_progress: OnProgress | None = None, **options: Any) -> CpuDecoder:
    options = {"dtype": "float32", "quantization": "int8-activations", **options}
    model = load_model(str(path), LoadOptions(**options), on_progress=on_progress).model
    assert isinstance(model, CpuDecoder)
    return model


@pytest.mark.parametrize(
    ("family", "kind"),  # one type: gate and up of two would be converted, and their inputs not rounded
    [
        ("llama-plain", "Q4_K"),
        pytest.param("qwen3", "Q6_K", marks=pytest.mark.slow),
        pytest.param("qwen2", "Q8_0", marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_transformers_with_rounded_inputs(family: str, kind: str, tmp_path: Path) -> None:
    folder = model_of(family, tmp_path, **WIDE)
    path = write_gguf(folder, tmp_path / "model.gguf", kind)
    truth = with_weights_of(path, folder)
    plain = last_logits(truth)
    for module in truth.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(round_inputs)
    right = last_logits(truth)
    model = quantised(path)
    found = torch.stack([PagedDriver(model).once(pair)[-1] for pair in PAIRS])
    # Sums in another order make another integer of a number half way between two, in some prompts.
    assert ((found - right).abs().mean(1) < 1e-4).sum() >= 0.7 * len(PAIRS)
    assert ((plain - right).abs().mean(1) > 1e-3).all()
    driver = PagedDriver(model)
    whole, in_chunks = (
        driver.feed(driver.sequence(len(PROMPT)), PROMPT, chunk=chunk)[-1] for chunk in (None, 7)
    )
    assert (whole - in_chunks).abs().mean() < (plain - right).abs().mean()


@torch.inference_mode()
def last_logits(model: Any) -> Tensor:
    logits: Tensor = model(torch.tensor(PAIRS)).logits[:, -1]
    return logits


def test_the_log_and_the_cache_of_packed_weights_know_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_gguf(model_of("qwen3", tmp_path, **WIDE), tmp_path / "model.gguf", "Q4_K", other_kind="Q8_0")
    caplog.set_level(logging.INFO)
    reports: list[Any] = []
    first = PagedDriver(quantised(path, weights_cache=str(tmp_path), on_progress=reports.append)).once(PROMPT)
    assert "Q4_K, Q8_0, are kept" in caplog.text or "Q8_0, Q4_K, are kept" in caplog.text
    assert reports[-1].done_bytes == reports[-1].total_bytes
    exact = load_model(str(path), LoadOptions(dtype="float32", weights_cache=str(tmp_path))).model
    caplog.clear()
    again = PagedDriver(quantised(path, weights_cache=str(tmp_path))).once(PROMPT)
    assert "are mapped from" in caplog.text
    assert again.equal(first)
    assert not PagedDriver(exact).once(PROMPT).equal(first)


def test_a_model_without_quantised_weights_is_refused(tmp_path: Path) -> None:
    folder = make_model("llama-plain", tmp_path)
    with pytest.raises(ConfigError, match="quantised weights"):
        load_model(str(folder), LoadOptions(quantization="int8-activations"))
