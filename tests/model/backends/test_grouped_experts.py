"""All experts of a layer at once give what each of them gives alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.model.paged import PagedDriver
from tests.model.tiny import make_model
from triolet.kernels.linear import grouped
from triolet.model.backends.layers import mixture_of_experts
from triolet.model.backends.torch_decoder import Decoder
from triolet.model.loading import decoder
from triolet.model.loading.model import load_model
from triolet.model.loading.options import LoadOptions


@pytest.mark.slow
@pytest.mark.parametrize("in_triton", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_logits_are_those_of_one_expert_after_the_other(
    family: str, in_triton: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "can_plan", lambda *_: False)  # the decoder of a GPU
    folder = str(make_model(family, tmp_path))
    ids = torch.randint(0, 200, (9,), generator=torch.manual_seed(1)).tolist()
    expected = PagedDriver(load_model(folder, LoadOptions(dtype="float32")).model).once(ids)
    monkeypatch.setattr(mixture_of_experts, "GROUPED_DEVICES", ("cpu",))
    if in_triton:
        pytest.importorskip("triton")
        monkeypatch.setattr(grouped, "grouped_linear_reference", grouped.grouped_linear_triton)
    model = load_model(folder, LoadOptions(dtype="float32")).model
    assert isinstance(model, Decoder)
    assert model.is_capturable
    torch.testing.assert_close(PagedDriver(model).once(ids), expected, rtol=1e-4, atol=1e-5)
