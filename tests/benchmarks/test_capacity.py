"""The model of the capacity in docs/scale.md is what the simulation of the dispatcher does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_tree import ROOT, SRC


@pytest.mark.slow
def test_simulated_replicas_are_as_busy_as_the_model_says_and_saturate_where_it_says(tmp_path: Path) -> None:
    found = tmp_path / "capacity.jsonl"
    command = [sys.executable, str(ROOT / "benchmarks" / "capacity.py"), "--replicas", "1", "8"]
    subprocess.run(
        [*command, "--output", str(found)],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        check=True,
        timeout=600,
    )
    one, eight = map(json.loads, found.read_text().splitlines())
    assert one["holds"]
    assert eight["holds"]
    # by hand: 0.4 x (1 + 4 x / 64) = 1
    assert one["requests_per_s"] == pytest.approx(2.2, abs=0.05)
    assert eight["requests_per_s"] == pytest.approx(8 * 2.198, abs=0.05)
