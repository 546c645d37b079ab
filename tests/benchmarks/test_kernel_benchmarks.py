"""The benchmarks of the CPU kernels run on a decoder of random weights, and print what their tables are made of."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.source_tree import ROOT, SRC
from triolet.kernels.cpu.library import SWITCH
from triolet.kernels.cpu.targets import runnable


@pytest.mark.slow
def test_the_calibrated_choice_is_compared_with_the_best_fixed_one() -> None:
    program = ROOT / "benchmarks" / "calibration.py"
    options = ["--model", "llama-15m", "--dtype", "float32", "--rows", "1", "3", "--rounds", "1"]
    environ = {**os.environ, "PYTHONPATH": str(SRC), SWITCH: runnable()[0].name}
    ran = subprocess.run(
        [sys.executable, str(program), *options], env=environ, check=True, capture_output=True, text=True
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [(line["rows"], line["cpu_target"]) for line in lines] == [
        (1, environ[SWITCH]),
        (3, environ[SWITCH]),
    ]
    for line in lines:
        assert 0 < line["best_us"] <= line["worst_us"]
        assert line["ratio"] == pytest.approx(line["calibrated_us"] / line["best_us"], abs=0.01)
