"""Hidden states apart from logits: a step in two calls gives the logits of a step in one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.cpu_variants import compiled
from tests.model.paged import PagedDriver
from tests.model.tiny import VOCAB_SIZE, make_model
from triolet.model.backends.cpu import plan
from triolet.model.backends.cpu.decoder import CpuDecoder
from triolet.model.backends.torch_decoder import Decoder
from triolet.model.backends.transformers_backend import TransformersModel, load_transformers_model
from triolet.model.folder.json_fields import read_json_object
from triolet.model.interface import CausalModel, ForwardBatch, ModelSpec
from triolet.model.loading.model import load_model
from triolet.model.loading.options import LoadOptions


class InTwoCalls:
    """A model that computes every step's hidden states first, and then its logits."""

    def __init__(self, model: CausalModel) -> None:
        self.model = model
        self.shapes: list[tuple[int, ...]] = []

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self.model.forward(batch)

    def compute_logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return self.model.compute_logits(hidden, rows)

    def forward_logits(self, batch: ForwardBatch) -> Tensor:
        hidden = self.forward(batch)
        self.shapes.append((*hidden.shape, len(batch.token_ids)))
        assert hidden.dtype == self.spec.dtype
        return self.compute_logits(hidden, batch.logits_indices)


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[[CausalModel], None]:
    def compare(model: CausalModel) -> None:
        apart = InTwoCalls(model)
        ids: list[int] = torch.randint(0, VOCAB_SIZE, (30,), generator=torch.manual_seed(1)).tolist()
        one, two = PagedDriver(model), PagedDriver(apart)
        expected, got = one.once(ids), two.once(ids)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        wanted = [
            [driver.step([(driver.sequence(30), ids)], logits_indices=[3, 29])[0] for driver in (one, two)]
        ]
        torch.testing.assert_close(*wanted[0], rtol=1e-5, atol=1e-5)
        assert all(num_rows == num_tokens for num_rows, _, num_tokens in apart.shapes)

    return compare


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_the_cpu_decoder(
    quantization: str | None,
    dtype: torch.dtype,
    check: Callable[[CausalModel], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(plan, "library", compiled)
    folder = make_model("llama", tmp_path, dtype=dtype)
    model = load_model(str(folder), LoadOptions(quantization=quantization)).model
    assert isinstance(model, CpuDecoder)
    check(model)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_the_torch_decoder(
    family: str, check: Callable[[CausalModel], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plan, "library", lambda: None)
    model = load_model(str(make_model(family, tmp_path))).model
    assert isinstance(model, Decoder)
    check(model)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_transformers_with_families_that_cap_and_scale_logits_after_the_head(
    family: str, check: Callable[[CausalModel], None], tmp_path: Path
) -> None:
    folder = make_model(family, tmp_path)
    config = read_json_object(folder / "config.json")
    model = load_transformers_model(folder, config, torch.float32, "cpu", trust_remote_code=False)
    assert isinstance(model, TransformersModel)
    check(model)
    check(model)  # the module's own forward is back
