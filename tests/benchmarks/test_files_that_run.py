from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_tree import ROOT, SRC

# Files that run today. The program's targets are lower for two: a request of a WebSocket has the rendering of its chat
# beside the rest, in threads that were once not counted, and a crash the standby process.
REACHED = {"generate": 40, "websocket": 68, "break": 10, "crash": 31}


@pytest.mark.slow
def test_no_operation_runs_more_files_than_it_did(tmp_path: Path) -> None:
    """A count, not a time: a busy machine does not change it."""
    program, found = ROOT / "benchmarks" / "files_that_run.py", tmp_path / "files.jsonl"
    environ = {**os.environ, "PYTHONPATH": str(SRC)}
    # A file that runs now and then, by a timer on a busy machine, is not in all of many rounds.
    command = [sys.executable, str(program), "--rounds", "10", "--output", str(found)]
    subprocess.run(command, env=environ, check=True)
    counts = {line["case"]: line["files"] for line in map(json.loads, found.read_text().splitlines())}
    assert counts.keys() == REACHED.keys()
    assert {case: files for case, files in counts.items() if not 0 < files <= REACHED[case]} == {}
