from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_tree import ROOT, SRC


@pytest.mark.slow
def test_no_operation_runs_more_files_than_a_reader_can_follow(tmp_path: Path) -> None:
    """A count, not a time: a busy machine does not change it."""
    program, found = ROOT / "benchmarks" / "files_that_run.py", tmp_path / "files.jsonl"
    environ = {**os.environ, "PYTHONPATH": str(SRC)}
    # A file that runs now and then, by a timer on a busy machine, is not in all of many rounds.
    command = [sys.executable, str(program), "--rounds", "10", "--output", str(found)]
    subprocess.run(command, env=environ, check=True)
    counts = {
        line["case"]: (line["files"], line["target"])
        for line in map(json.loads, found.read_text().splitlines())
    }
    assert counts.keys() == {"generate", "websocket", "break", "crash"}
    assert {case: files for case, (files, target) in counts.items() if not 0 < files <= target} == {}
