"""A shortage of descriptors fails the requests that need one, and the engine goes on, over and over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.model.tiny import make_model

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors as Linux does")
@pytest.mark.parametrize(
    ("num_rounds", "num_streams"), [(5, 8), pytest.param(100, 16, marks=pytest.mark.slow)]
)
def test_without_descriptors_only_the_requests_that_need_one_fail_and_later_ones_are_served(
    num_rounds: int, num_streams: int, tmp_path: Path
) -> None:
    folder = make_model("llama-plain", tmp_path / "tiny", with_tokenizer=True)
    run = subprocess.run(
        [sys.executable, "-m", "tests.e2e.shortages", str(folder), str(num_rounds), str(num_streams)],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4_000:]
    assert run.stdout.split("\n")[-2] == f"round {num_rounds - 1}"
