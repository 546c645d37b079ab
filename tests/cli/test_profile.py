"""`triolet profile`: the table of a trace, and the command as a whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.core.test_profile import recorded
from triolet.cli import main
from triolet.cli.profile.report import figures, table
from triolet.core.profile import PHASES, chrome_events, phase_sums


def test_the_table_shows_every_phase_with_its_share() -> None:
    recorder, steps = recorded()
    sums = phase_sums(chrome_events(recorder, steps, 1, 10.0, 0.0))
    lines = table(sums)
    assert [line[:12].strip() for line in lines[1:]] == [
        *("plan", "compute", "hand over", "prepare", "forward", "sample", "deliver", "step", "detokenize")
    ]
    assert " 3,200.00 " in lines[-2]
    assert "100.0%" in lines[-2]
    assert sum(figures(sums)[name]["share"] for name in PHASES) == pytest.approx(1.0, abs=0.001)


@pytest.mark.slow
def test_the_command_writes_a_trace_and_prints_where_the_time_goes(tmp_path: Path) -> None:
    work = ["--num-prompts", "2", "--input-len", "8", "--output-len", "4", "--num-kv-blocks", "64"]
    called = CliRunner().invoke(main, ["profile", *work, "--profile-dir", str(tmp_path), "--json"])
    assert called.exit_code == 0, called.output
    found = json.loads(called.stdout.strip().splitlines()[-1])
    assert [str(path) for path in tmp_path.iterdir()] == [found["trace"]]
    assert found["steps"] >= 4
    assert sum(found["phases"][name]["share"] for name in PHASES) == pytest.approx(1.0, abs=0.05)
