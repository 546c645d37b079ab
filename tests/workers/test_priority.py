"""The priority of a process whose work can wait, where the system lets it be lowered and where it does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from triolet.workers import priority
from triolet.workers.priority import lower_priority


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of this process's session, as if it led one; its own priority stays."""
    file = tmp_path / "autogroup"
    file.touch()
    monkeypatch.setattr(priority, "_AUTOGROUP", str(file))
    monkeypatch.setattr(os, "nice", lambda niceness: niceness)
    monkeypatch.setattr(os, "getsid", lambda process_id: os.getpid())
    return file


@pytest.mark.parametrize(("num_refused", "written"), [(0, "10"), (2, "10"), (1000, "")])
def test_the_niceness_of_a_session_is_written_again_while_those_of_others_are_being_changed(
    num_refused: int, written: str, group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, pauses_s, num_writes = os.write, list[float](), 0

    def write_at_last(file: int, data: bytes) -> int:
        nonlocal num_writes
        num_writes += 1
        if num_writes <= num_refused:
            raise BlockingIOError
        return write(file, data)

    monkeypatch.setattr(os, "write", write_at_last)
    monkeypatch.setattr("time.sleep", pauses_s.append)
    lower_priority(10)
    assert group.read_text() == written
    # One change in 100 ms for all users but root: Linux, kernel/sched/autogroup.c.
    assert pauses_s == [0.1] * min(num_refused, num_writes - 1) and num_writes <= 10


def test_a_system_without_groups_of_sessions_is_no_error(group: Path) -> None:
    group.unlink()
    lower_priority(10)
    assert not group.exists()
