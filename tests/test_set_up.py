"""The set-up of `make` shows what pip does: a few lines for large downloads, and everything when pip fails.

What it installs, to the version, runs on every Python that triolet runs on.
"""

from __future__ import annotations

import io
import re
import runpy
import tomllib
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from typing import Any, TextIO

import pytest
from packaging.specifiers import SpecifierSet

from tests.source_tree import ROOT

PROGRAM = runpy.run_path(str(ROOT / "tools" / "pip_install.py"))
stages: Callable[[Iterable[str]], Iterator[tuple[str, bool]]] = PROGRAM["stages"]
show: Callable[[Iterable[tuple[str, bool]], TextIO], None] = PROGRAM["show"]
main: Callable[[list[str]], int] = PROGRAM["main"]

PIP_SAYS = """\
Obtaining file:///clone
  Preparing editable metadata (pyproject.toml): started
Collecting torch==2.13.0
  Downloading torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (29 kB)
Collecting click>=8.1
Downloading torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl (191.2 MB)
Downloading click-8.5.1-py3-none-any.whl (111 kB)
Installing collected packages: torch, click
Successfully installed click-8.5.1 torch-2.13.0
"""


def test_a_large_download_and_the_installation_each_keep_a_line() -> None:
    kept = [text for text, keep in stages(PIP_SAYS.splitlines()) if keep]
    assert kept == ["downloading torch 2.13.0+cpu (191 MB)", "installing 2 packages"]


def test_what_passes_is_shown_on_a_terminal_only() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    plain, terminal = io.StringIO(), Terminal()
    show(stages(PIP_SAYS.splitlines()), plain)
    show(stages(PIP_SAYS.splitlines()), terminal)
    assert "2 packages found" not in plain.getvalue()
    assert "2 packages found, looking at click>=8.1" in terminal.getvalue()
    assert "\r" not in plain.getvalue()


def test_a_pip_that_fails_is_quoted_and_its_status_returned(capfd: pytest.CaptureFixture[Any]) -> None:
    assert main(["--no-index", "no-such-distribution"]) != 0
    assert "No matching distribution found for no-such-distribution" in capfd.readouterr().err


def test_each_package_of_the_set_up_allows_the_oldest_python_that_triolet_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = project["requires-python"].removeprefix(">=") + ".0"
    pins = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    required = {
        name: str(found.metadata.json.get("requires_python", ""))
        for name, version in pins
        for found in metadata.distributions(name=name)
        if found.version == version
    }
    assert len(required) > 50
    assert [name for name, allowed in required.items() if oldest not in SpecifierSet(allowed)] == []
