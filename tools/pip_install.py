#!/usr/bin/env python3
"""Run `pip install` and show its progress in a few lines, for the set-up in the Makefile.

    python tools/pip_install.py ARGUMENTS OF PIP INSTALL

pip has two forms of output: a line for each of 150 packages, or nothing for minutes. This program prints one line for
each large download and one for the installation. On a terminal it also shows, in a line that is overwritten, what
pip works at. When pip fails, everything that it said is printed, and its exit status is returned.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import TextIO
from urllib.parse import unquote

LARGE_MB = 20

_COLLECTING = re.compile(r"^Collecting (\S+)")
_DOWNLOADING = re.compile(r"^Downloading (\S+) \(([\d.]+) ([kMG])B\)")
_INSTALLING = re.compile(r"^Installing collected packages: (.+)")
_BUILDING = re.compile(r"^(Building|Preparing) \S+ for (\S+)")
_MEGABYTES = {"k": 0.001, "M": 1.0, "G": 1000.0}


def stages(lines: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Turn pip's lines into (text, keep): a line to keep, or a passing state that the next one overwrites."""
    num_packages = 0
    for line in map(str.strip, lines):
        if collecting := _COLLECTING.match(line):
            num_packages += 1
            yield f"{num_packages} packages found, looking at {collecting[1]}", False
        elif downloading := _DOWNLOADING.match(line):
            name, size_mb = _distribution(downloading[1]), float(downloading[2]) * _MEGABYTES[downloading[3]]
            yield f"downloading {name} ({size_mb:.0f} MB)", size_mb >= LARGE_MB
        elif building := _BUILDING.match(line):
            yield f"{building[1].lower()} {building[2]}", False
        elif installing := _INSTALLING.match(line):
            yield f"installing {len(installing[1].split(','))} packages", True


def _distribution(file: str) -> str:
    """`torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl` is torch 2.13.0."""
    return " ".join(unquote(file).rpartition("/")[2].removesuffix(".metadata").split("-")[:2])


def show(shown: Iterable[tuple[str, bool]], out: TextIO) -> None:
    """Print the stages: all of them in place on a terminal, elsewhere only the lines to keep."""
    width = shutil.get_terminal_size().columns - 1
    clear = f"\r{' ' * width}\r" if out.isatty() else ""
    for text, keep in shown:
        if keep or clear:
            print(f"{clear}  {text}"[: len(clear) + width], end="\n" if keep else "", file=out, flush=True)
    print(clear, end="", file=out, flush=True)


def main(arguments: list[str]) -> int:
    """Run pip with `arguments` and return its exit status."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *arguments]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    said: list[str] = []
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as pip:
        assert pip.stdout is not None
        show(stages(_kept(pip.stdout, said)), sys.stdout)
    if pip.returncode:
        sys.stderr.writelines(said)
    return pip.returncode


def _kept(lines: Iterable[str], said: list[str]) -> Iterator[str]:
    for line in lines:
        said.append(line)
        yield line


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
