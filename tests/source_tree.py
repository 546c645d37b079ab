"""The project's own files, for the tests that read them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"

# Where each part of the package lies. The links in src/triolet are left out, so that a file is read once.
PACKAGE_FOLDERS = {
    "triolet": SRC / "triolet",
    "triolet.actors": ROOT / "actors",
    "triolet.kernels": ROOT / "kernels",
}


def python_files(*folders: Path) -> list[Path]:
    """Every Python file below `folders`, not through symbolic links, in a stable order."""
    return sorted(
        path for folder in folders for path in folder.rglob("*.py") if not _through_a_link(path, folder)
    )


def _through_a_link(path: Path, folder: Path) -> bool:
    return any(
        parent.is_symlink() for parent in path.parents if parent.is_relative_to(folder) and parent != folder
    )


def package_modules() -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module of the package."""
    for package, folder in PACKAGE_FOLDERS.items():
        for path in python_files(folder):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join([package, *(part for part in parts if part != "__init__")]), path


def package_files() -> list[Path]:
    """Every Python file that is part of the package."""
    return [path for _, path in package_modules()]


@cache
def parse(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def where(path: Path, node: ast.AST) -> str:
    """`file:line`, relative to the repository."""
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
