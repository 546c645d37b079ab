"""Devices that fail: at the start, at the capture of graphs, and with a kernel that cannot be compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.cuda.fake_graph import FakeDevice
from tests.model.cuda.histories import SIZES, DeviceModel, play
from tests.model.test_runner import make_runner
from tests.model.tiny import make_model
from triolet.config.engine import EngineConfig
from triolet.errors import ModelError
from triolet.kernels import _triton
from triolet.kernels._triton import KernelCompileError, KernelVariant, has_failed_kernels, run_or_reference
from triolet.kernels.rms_norm import _rms_norm_kernel, rms_norm_reference, rms_norm_triton
from triolet.model.cuda import steps
from triolet.model.cuda.step_device import Graph, Mark
from triolet.model.cuda.warm_up import can_compute_steps
from triolet.model.loading import decoder, runner
from triolet.model.loading.runner import load_runner

CAPTURE_ERROR = "CUDA error: operation failed due to a previous error during capture"
LOST = "CUDA error: an illegal memory access was encountered"


class NoGraphs(FakeDevice):
    """Cannot capture; if it is `lost`, it can do nothing afterwards."""

    def __init__(self, *, is_lost: bool = False) -> None:
        super().__init__()
        self.is_lost = is_lost
        self.num_captures = 0

    def capture(self, work: Callable[[], None]) -> Graph:
        work()
        self.num_captures += 1
        raise RuntimeError(CAPTURE_ERROR)

    def mark(self) -> Mark:
        if self.is_lost:
            raise RuntimeError(LOST)
        return super().mark()


def test_steps_without_their_graphs_are_launched_and_give_the_same_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = NoGraphs()
    runner = make_runner(DeviceModel(), **SIZES, max_num_batched_tokens=17, step_device=device)
    assert not runner.capture_graphs()
    play(1, runner.execute, lambda: None).check()
    assert device.num_captures == 2
    assert [record.getMessage() for record in caplog.records] == [
        f"a graph of 17 tokens cannot be captured, kernels are launched: {CAPTURE_ERROR}",
        f"a graph of 6 rows cannot be captured, kernels are launched: {CAPTURE_ERROR}",
    ]


def test_a_device_that_a_capture_has_lost_is_not_used() -> None:
    runner = make_runner(DeviceModel(), **SIZES, step_device=NoGraphs(is_lost=True))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        runner.capture_graphs()


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> NoGraphs:
    """Loads compute on this device, with the decoder in torch."""
    device = NoGraphs()
    monkeypatch.setattr(decoder, "can_plan", lambda *_: False)
    monkeypatch.setattr(runner, "_device_for_steps", lambda *_: device)
    monkeypatch.setattr(runner, "announce_warm", lambda: None)
    return device


def load_tiny(folder: Path) -> Any:
    return load_runner(EngineConfig(model=str(make_model("llama", folder)), device="cpu", num_kv_blocks=8))[0]


def test_a_load_goes_on_without_graphs(tmp_path: Path, on_device: NoGraphs) -> None:
    runner = load_tiny(tmp_path)
    assert on_device.num_captures == 2, "steps with prompts, and decodes"
    assert len(runner._steps.graphs) == 0


def test_a_driver_that_fails_while_the_model_is_loaded_is_named(tmp_path: Path, on_device: NoGraphs) -> None:
    on_device.is_lost = True
    with pytest.raises(ModelError, match=f"the GPU's driver failed while the model was loaded: {LOST}"):
        load_tiny(tmp_path)


def test_a_driver_that_does_not_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mem_get_info(device: torch.device) -> None:
        raise RuntimeError("CUDA driver initialization failed, you might not have a CUDA gpu.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    with pytest.raises(ModelError, match="CUDA driver initialization failed"):
        load_runner(EngineConfig(model=str(tmp_path), device="cuda"))


def test_a_load_with_step_kernels_that_do_not_compile_keeps_its_rows_on_the_host(
    tmp_path: Path, on_device: NoGraphs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def apply_writes(*_: object) -> None:
        raise KernelCompileError("_writes_kernel cannot be compiled: no ptxas")

    monkeypatch.setattr(steps, "apply_writes", apply_writes)
    runner = load_tiny(tmp_path)
    assert runner._steps is None
    assert on_device.num_captures == 0
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == [
        "_writes_kernel cannot be compiled: no ptxas; rows stay in the host's memory, which makes steps slower"
    ]


def test_steps_that_compile_are_computed_on_the_device() -> None:
    assert can_compute_steps(DeviceModel(), FakeDevice(), block_size=4, logprobs_mode="processed_logprobs")


class FakeDriver:
    """The part of Triton's driver that a launch asks before it compiles."""

    def get_current_device(self) -> int:
        return 0


def test_a_reference_takes_over_from_a_kernel_that_does_not_compile_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled: list[KernelVariant] = []

    def compile_variant(variant: KernelVariant, target: Any = None) -> Any:
        compiled.append(variant)
        raise ValueError("ptxas: no such instruction")

    monkeypatch.setattr(KernelVariant, "compile", compile_variant)
    monkeypatch.setattr(_triton, "INTERPRETING", False)
    monkeypatch.setattr(_triton, "_driver", FakeDriver)
    monkeypatch.setattr(_triton._state, "failed", {})
    monkeypatch.setattr(_rms_norm_kernel, "_loaded", {})
    assert not has_failed_kernels()
    x, weight = torch.randn(3, 8), torch.randn(8)
    expected = x / x.pow(2).mean(-1, keepdim=True).sqrt() * weight
    for _ in range(3):
        normed, _ = run_or_reference(
            rms_norm_triton, rms_norm_reference, x, weight, 0.0, residual=None, weight_offset=0.0
        )
        torch.testing.assert_close(normed, expected)
    assert len(compiled) == 1
    assert has_failed_kernels(), "and with it no graphs are captured"
    said = "_rms_norm_kernel cannot be compiled: ValueError: ptxas: no such instruction"
    assert [record.getMessage() for record in caplog.records] == [
        f"{said}; torch computes in its place, slower and without graphs"
    ]
