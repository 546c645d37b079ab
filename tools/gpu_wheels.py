#!/usr/bin/env python3
"""List or fetch the wheels that `make gpu` needs on a machine with torch and triton and no package index.

    python tools/gpu_wheels.py [--fetch FOLDER] [--python 3.12] [--have NAME,...]

Run it in triolet's environment: it lists triolet's own dependencies with all of theirs, in the versions installed
there, but for torch and triton and their libraries, and for the packages that `--have` names. With `--fetch` pip
downloads the wheels for that Python on x86-64 Linux into the folder; carried along, `make gpu
ARGS="--wheels FOLDER"` unpacks them (by default it looks into build/gpu-wheels).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# What a machine with a GPU has already; their needs are not followed.
THERE = frozenset({"torch", "triton", "setuptools"})
# pip takes a wheel of exactly one of the platforms that it is told.
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (5, 12, 17, 24, 26, 27, 28, 31, 34))
OLD_PLATFORMS = ("manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64")


def needed(root: str, have: frozenset[str], python: str) -> dict[str, str]:
    """Return name and version of every package that `root` needs, directly or not."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(root, "")]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        distribution = importlib.metadata.distribution(name)
        if name != root:
            found[name] = distribution.version
        for text in distribution.requires or ():
            requirement = Requirement(text)
            other = canonicalize_name(requirement.name)
            marker = requirement.marker
            environment = {"extra": extra, "python_version": python, "python_full_version": f"{python}.0"}
            if other not in have and (marker is None or marker.evaluate(environment)):
                waiting += [(other, each) for each in ("", *requirement.extras)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fetch", type=Path, metavar="FOLDER", help="download the wheels into this folder")
    parser.add_argument("--python", default="3.12", help="of the machine with the GPU")
    parser.add_argument("--have", default="", help="packages that the machine has, beside torch and triton")
    options = parser.parse_args()
    have = THERE | {canonicalize_name(name) for name in options.have.split(",") if name}
    pins = [f"{name}=={version}" for name, version in sorted(needed("triolet", have, options.python).items())]
    print("\n".join(pins))
    if options.fetch is None:
        return 0
    platforms = [f"--platform={platform}" for platform in (*PLATFORMS, *OLD_PLATFORMS)]
    target = [f"--python-version={options.python}", "--implementation=cp", *platforms]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", *target]
    return subprocess.run([*command, "--dest", str(options.fetch), *pins], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
