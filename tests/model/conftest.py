"""What the tests of models have in common: choices of the CPU kernels that do not depend on the machine."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from triolet.kernels.cpu.abi import ModelStruct
from triolet.kernels.cpu.calibration import Calibration, calibrate
from triolet.model.backends.cpu import plan


@pytest.fixture(scope="module", autouse=True)
def fixed_choices() -> Iterator[None]:
    """Let models take the fixed choices of the kernels, of which no bit depends.

    A thousand small models have almost as many shapes. To measure them takes time, and what is kept of them would push
    out of the user's cache what was measured for models in use.
    """

    def calibrate_not(
        cpp: ctypes.CDLL, model: ModelStruct, dtype: torch.dtype, mode: str = "auto"
    ) -> Calibration:
        return calibrate(cpp, model, dtype, "off" if mode == "auto" else mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "calibrate", calibrate_not)
        yield
