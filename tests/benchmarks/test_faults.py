"""The program that plants hangs and shortages in real processes finds each of its cases healed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.source_tree import ROOT, SRC

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="takes resources as Linux counts them"),
]


def line_of(case: str, folder: Path, *flags: str) -> Any:
    """Run a case; return what came of it."""
    found = folder / "faults.jsonl"
    command = [sys.executable, str(ROOT / "benchmarks" / "faults.py"), "--only", case, *flags]
    environ = {**os.environ, "PYTHONPATH": str(SRC)}
    ran = subprocess.run([*command, "--output", str(found)], env=environ, check=False, timeout=600)
    [line] = map(json.loads, found.read_text().splitlines())
    if line.get("error") == "cannot mount a tmpfs":
        pytest.skip("the right to mount a tmpfs is missing")
    assert (ran.returncode == 0) == line["is_good"]
    return line


@pytest.mark.parametrize(
    "case",
    ["step", "idle", "loading", "scheduler", "detokenizer", "tokenizer", "guidance", "grammar processes"],
)
def test_after_a_hang_in_any_actor_and_phase_the_streams_are_exact_and_the_engine_serves(
    case: str, tmp_path: Path
) -> None:
    # The limit only ends a hang that is not healed at all: how long it takes is no matter of a busy machine.
    line = line_of(case, tmp_path, "--streams", "4", "--heal", "100")
    assert line["is_good"], json.dumps(line)
    assert line["streams_exact"]
    assert line["served_afterwards"]
    assert line["failures"] == {}
    assert line["restarts"] >= 1


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("descriptors", "ResourceShortage"),
        ("processes", "ResourceShortage"),
        ("memory", "ResourceShortage"),
        ("model memory", None),  # steps become smaller, or the process is replaced
        ("disk", "ModelFileError"),
    ],
)
def test_a_shortage_fails_only_the_requests_that_need_the_resource_and_the_engine_serves_afterwards(
    case: str, error: str | None, tmp_path: Path
) -> None:
    """Ten rounds; the program itself has a hundred."""
    if "memory" in case and shutil.which("cc") is None:
        pytest.skip("no compiler for the library that counts allocations")
    line = line_of(case, tmp_path, "--rounds", "10")
    assert line["is_good"], json.dumps(line)
    assert (line["rounds"], line["streams"]) == (10, 16)
    assert line["streams_exact"]
    assert line["served_afterwards"]
    assert set(line["failures"]) == ({error} if error else set())
