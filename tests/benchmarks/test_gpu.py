"""`make gpu`: a section that fails, crashes or hangs is told, and the others run all the same."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from tests.source_tree import ROOT

RESULT = '{"bench": "x", "case": "one", "passed": true}'
PROGRAMS = {
    "good": f"print('a line of a library'); print('{RESULT}')",
    "wrong": f"print('{RESULT}'); print('{RESULT}'.replace('one', 'two').replace('true', 'false'))",
    "crashing": f"import os, signal; print('{RESULT}', flush=True); os.kill(os.getpid(), signal.SIGKILL)",
    "silent": "pass",
    "hanging": f"import time; print('{RESULT}', flush=True); time.sleep(1000)",
}
EXPECTED = {
    "good": ("passed", 1, []),
    "wrong": ("failed", 2, ["two"]),
    "crashing": ("failed", 1, ["exit status -9"]),
    "silent": ("failed", 0, []),
    "hanging": ("timed out", 1, []),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_section_ends_with_a_clear_outcome_and_keeps_its_results(name: str) -> None:
    written: list[dict[str, Any]] = []
    limit_s = 0.5 if name == "hanging" else 60.0
    summary = gpu.run_section(
        [sys.executable, "-S", "-u", "-c", PROGRAMS[name]], dict(os.environ), limit_s, written.append
    )
    outcome, num_results, failed = EXPECTED[name]
    if name == "hanging":  # the limit may have come before the result
        num_results = len(written)
    assert summary == {"outcome": outcome, "results": num_results, "failed": failed}
    assert len(written) == num_results


def test_all_sections_run_when_one_fails_and_the_last_have_the_ceilings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands = []

    def lines_of(command: list[str], environment: dict[str, str], limit_s: float) -> Any:
        commands.append(command)
        if command[2] == "ceilings":
            yield '{"bench": "gpu_ceilings", "copy_bytes_per_s": 5.0}'
        yield 3 if command[2] == "kernels" else 0

    monkeypatch.setattr(gpu, "lines_of", lines_of)
    written: list[dict[str, Any]] = []
    options = argparse.Namespace(sections=["ceilings", "kernels", "bench"], budget=100.0, dry_run=False)
    assert not gpu.run(options, {}, written.append)
    assert [line["outcome"] for line in written if "section" in line] == ["passed", "failed", "failed"]
    assert json.loads(commands[2][commands[2].index("--ceilings") + 1]) == {"copy_bytes_per_s": 5.0}


def test_sections_that_share_no_gpu_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    def lines_of(command: list[str], environment: dict[str, str], limit_s: float) -> Any:
        both.wait(60.0)
        yield "{}"
        yield 0

    monkeypatch.setattr(gpu, "lines_of", lines_of)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    options = argparse.Namespace(sections=["kernels", "parity"], budget=100.0, dry_run=True)
    assert gpu.run(options, {}, lambda line: None)


@pytest.mark.slow
def test_the_dry_run_makes_the_table_on_a_pretended_device(tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu.py"),
        "--dry-run",
        "--sections",
        "ceilings,bench",
    ]
    done = subprocess.run([*command, "--output", str(output)], capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert done.returncode == 0, done.stderr[-3000:]
    assert {line["case"] for line in lines if "percent_of_ceiling" in line} >= {
        "decode tiny batch 1",
        "TTFT tiny",
    }
    assert {line.get("case") for line in lines} >= {
        "CUDA graphs tiny",
        "kernels compiled while serving tiny",
    }
    assert all(line["dry_run"] for line in lines)
