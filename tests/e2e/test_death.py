"""A program whose engine dies says why, and exits with an error."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.source_tree import SRC

PROGRAM = """
import logging, sys
from triolet.cli import main
from triolet.model.runner import ModelRunner

def crash(self, plan):
    raise FloatingPointError("the device has gone mad")

logging.disable()
ModelRunner.execute = crash
sys.argv = ["triolet", "generate", "--prompt", "Hello!", "--max-tokens", "3"]
sys.exit(main())
"""


@pytest.mark.slow
def test_a_runner_that_can_compute_nothing_ends_the_program_with_the_real_cause() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "the device has gone mad" in done.stderr
