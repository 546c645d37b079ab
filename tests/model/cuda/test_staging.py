"""Weights go to the device through two pinned buffers in turn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.model.cuda.fake_graph import FakeDevice
from triolet.model.architectures.tensor_plans import TensorPlan
from triolet.model.architectures.weight_map import WeightReader
from triolet.model.cuda import staging
from triolet.model.cuda.staging import PinnedStaging
from triolet.model.folder.checkpoint import Checkpoint


@pytest.mark.parametrize("max_bytes", [staging.MAX_BYTES, 100])
def test_weights_are_those_of_the_file_and_a_buffer_is_waited_for_when_it_is_used_again(
    max_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "MAX_BYTES", max_bytes)
    tensors = {
        "a": torch.randn(6, 5).half(),
        "b": torch.randn(3, 5).half(),
        "c": torch.randn(7, 5),
        "d": torch.randn(2, 9).half(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    plans = {"ab": ("a", "b"), "c": ("c",), "mixed": ("a", "c"), "b": ("b",), "d": ("d",)}
    plan_of = {
        name: TensorPlan(tuple((source, tuple(tensors[source].shape)) for source in sources))
        for name, sources in plans.items()
    }
    device = FakeDevice()
    reader = WeightReader(
        Checkpoint.open(tmp_path), plan_of, torch.float32, device.device, None, PinnedStaging(device)
    )
    read = {name: reader[name] for name in plans}  # all are kept, as those of a model are
    for name, sources in plans.items():
        assert read[name].equal(torch.cat([tensors[source].float() for source in sources]))
    assert reader.read_float32("d").equal(tensors["d"].float())
    # Of 2 bytes each but c; what is too large, or of several dtypes, goes without.
    num_sent = 5 if max_bytes > 100 else 4
    assert (device.num_marks, device.num_waits) == (num_sent, num_sent - 2)
