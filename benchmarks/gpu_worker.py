"""Model runner's process that makes an illegal access to the GPU's memory when it gets SIGUSR1.

For the section `faults` of `gpu_sections.py`. The process is that of `triolet.workers.runner` otherwise. Without a GPU
the step raises the error that CUDA would.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

import torch

from triolet.config.engine import EngineConfig
from triolet.core.load_progress import OnProgress
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import StepPlan, StepResult, StepRunner, SubmittedStep, SubmittingRunner
from triolet.kernels._triton import kernel
from triolet.workers.runner import FdTransport, load_model, serve

FAR_AWAY = 2**40  # elements behind a tensor of one element


@kernel
def _stray_write(pointer, OFFSET: tl.constexpr):  # type: ignore[no-untyped-def,name-defined]  # noqa: F821, N803
    tl.store(pointer + OFFSET, 1.0)  # type: ignore[name-defined]  # noqa: F821  # bound when the kernel is compiled


class FaultyRunner:
    """Runner whose next step goes wrong after the signal."""

    def __init__(self, runner: SubmittingRunner) -> None:
        self._runner = runner
        self._is_armed = False
        signal.signal(signal.SIGUSR1, self._arm)

    def _arm(self, *_: object) -> None:
        self._is_armed = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def submit(self, plan: StepPlan) -> SubmittedStep:
        if self._is_armed:
            if not torch.cuda.is_available():
                raise RuntimeError("CUDA error: an illegal memory access was encountered (planted)")
            _stray_write[1,](torch.zeros(1, device="cuda"), OFFSET=FAR_AWAY)
        return self._runner.submit(plan)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.submit(plan).result()


def load(config: EngineConfig, on_progress: OnProgress) -> tuple[StepRunner, ModelInfo]:
    """Load the model of a configuration."""
    runner, info = load_model(config, on_progress)
    assert isinstance(runner, SubmittingRunner)
    return FaultyRunner(runner), info


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # too early for a step
    sys.path.pop(0)  # the folder of this file is nowhere to look for modules
    serve(load, FdTransport.take_over_standard_streams())
