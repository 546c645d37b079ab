"""Benchmarks that kill processes of a model: they find the processes that they mean, and every answer is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_tree import ROOT, SRC

FEW = ("--kills", "1", "--streams", "4", "--tokens", "24")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("crash_recovery.py", ()),
        ("crash_recovery.py", ("--tensor-parallel-size", "2")),
        ("replica_recovery.py", ()),
    ],
    ids=["one process", "two ranks", "two replicas"],
)
def test_a_kill_is_one_restart_and_no_answer_is_wrong(
    script: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    found = tmp_path / "found.jsonl"
    subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *FEW, *options, "--output", str(found)],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        check=True,
    )
    outcome = json.loads(found.read_text().splitlines()[-1])
    assert (outcome["kills"], outcome["restarts"], outcome["wrong_answers"]) == (1, 1, 0)
    assert outcome["answers"] >= 4
