"""Files that are there as a whole, or as they were before."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from triolet.config.whole_file import write_file


def test_the_file_is_whole_and_for_its_user_only(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_text("of an earlier one")
    path.chmod(0o644)
    write_file(path, b"what is asked and answered")
    assert path.read_bytes() == b"what is asked and answered"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["kept"]


def test_a_file_that_could_not_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "kept"
    path.write_text("of an earlier one")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_file(path, b"what is asked and answered")
    assert path.read_text() == "of an earlier one" and os.listdir(tmp_path) == ["kept"]
