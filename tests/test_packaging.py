"""Wheel and sdist hold each file once, and a wheel made from the sdist is the one made from the tree."""

from __future__ import annotations

import tarfile
import tomllib
import zipfile
from collections import Counter
from itertools import chain
from pathlib import Path

import attrs
import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.source_tree import PACKAGE_FOLDERS, ROOT, SRC


@attrs.frozen
class Archives:
    """Names in the archives, relative to the archive's own top folder."""

    wheel: list[str]
    sdist: list[str]
    wheel_from_sdist: list[str]
    metadata: str
    entry_points: str


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Archives:
    folder = tmp_path_factory.mktemp("archives")
    wheel = build(WheelBuilder, ROOT, folder / "wheel")
    sdist = build(SdistBuilder, ROOT, folder / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
        sdist_names = [name.partition("/")[2] for name in archive.getnames()]
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    with (
        zipfile.ZipFile(wheel) as archive,
        zipfile.ZipFile(build(WheelBuilder, unpacked, folder / "again")) as again,
    ):
        information = next(name for name in archive.namelist() if name.endswith("METADATA")).removesuffix(
            "METADATA"
        )
        return Archives(
            wheel=archive.namelist(),
            sdist=sdist_names,
            wheel_from_sdist=again.namelist(),
            metadata=archive.read(information + "METADATA").decode(),
            entry_points=archive.read(information + "entry_points.txt").decode(),
        )


def build(builder: type[WheelBuilder | SdistBuilder], root: Path, target: Path) -> Path:
    (artifact,) = builder(str(root)).build(directory=str(target), versions=["standard"])
    return Path(artifact)


def files_of_the_package() -> set[str]:
    return {
        "/".join([package.replace(".", "/"), *path.relative_to(folder).parts])
        for package, folder in PACKAGE_FOLDERS.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
        if folder != SRC / "triolet" or path.relative_to(folder).parts[0] not in ("actors", "kernels")
    }


def test_the_wheel_holds_every_file_of_the_package_once(archives: Archives) -> None:
    inside = Counter(name for name in archives.wheel if ".dist-info/" not in name)
    assert inside == Counter(files_of_the_package())


def test_the_linked_folders_are_in_the_wheel_as_packages(archives: Archives) -> None:
    assert {"triolet/actors/__init__.py", "triolet/kernels/__init__.py", "triolet/py.typed"} <= set(
        archives.wheel
    )


def test_the_sdist_holds_the_linked_folders_once_and_at_the_top(archives: Archives) -> None:
    assert {"actors/__init__.py", "kernels/__init__.py", "README.md", "LICENSE", "pyproject.toml"} <= set(
        archives.sdist
    )
    assert [
        name for name in archives.sdist if name.startswith(("src/triolet/actors", "src/triolet/kernels"))
    ] == []
    assert len(archives.sdist) == len(set(archives.sdist))


def test_a_wheel_made_from_the_sdist_is_the_wheel_made_from_the_tree(archives: Archives) -> None:
    assert sorted(archives.wheel_from_sdist) == sorted(archives.wheel)


def test_the_command_and_the_licence_are_declared(archives: Archives) -> None:
    assert "triolet = triolet.cli:main" in archives.entry_points
    assert "License-Expression: Apache-2.0" in archives.metadata
    assert "Requires-Python: >=3.11" in archives.metadata


def test_the_links_lead_to_the_folders_at_the_top() -> None:
    links = {name: SRC / "triolet" / name for name in ("actors", "kernels")}
    assert all(link.is_symlink() and link.resolve() == ROOT / name for name, link in links.items())


def test_every_direct_dependency_is_pinned_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    for requirement in map(Requirement, asked):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement
