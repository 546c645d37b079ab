"""The program that plants hangs and shortages in real processes finds each of its cases healed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_tree import ROOT, SRC


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="takes resources as Linux counts them")
@pytest.mark.parametrize("case", ["step", "tokenizer", "guidance", "descriptors"])
def test_after_a_hang_or_a_shortage_the_streams_are_exact_and_the_engine_serves(
    case: str, tmp_path: Path
) -> None:
    found = tmp_path / "faults.jsonl"
    # The limit only ends a hang that is not healed at all: how long it takes is no matter of a busy machine.
    limits = ["--rounds", "3", "--streams", "4", "--heal", "100"]
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "faults.py"),
        *limits,
        "--only",
        case,
        "--output",
        str(found),
    ]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(SRC)}, check=True, timeout=600)
    [line] = map(json.loads, found.read_text().splitlines())
    assert line["streams_exact"]
    assert line["served_afterwards"]
    assert set(line["failures"]) <= {"ResourceShortage"}
