"""Wheel and sdist hold each file once, and a wheel made from the sdist is the one made from the tree."""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import tarfile
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from itertools import chain
from pathlib import Path

import attrs
import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import triolet
from tests.source_tree import PACKAGE_FOLDERS, ROOT, SRC
from triolet.kernels.cpu.targets import NATIVE, TARGETS


@attrs.frozen
class Archives:
    """Names in the archives, relative to the archive's own top folder."""

    wheel: list[str]
    sdist: list[str]
    wheel_from_sdist: list[str]
    metadata: str
    entry_points: str
    tags: str


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Archives]:
    """Without compiled kernels, which take most of a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIOLET_PURE_WHEEL", "1")
        yield pack(tmp_path_factory.mktemp("archives"))


def pack(folder: Path) -> Archives:
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
            tags=archive.read(information + "WHEEL").decode(),
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


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package_once(archives: Archives) -> None:
    inside = Counter(name for name in archives.wheel if ".dist-info/" not in name)
    assert inside == Counter(files_of_the_package())


def test_the_linked_folders_are_in_the_wheel_as_packages(archives: Archives) -> None:
    assert {"triolet/actors/__init__.py", "triolet/kernels/__init__.py", "triolet/py.typed"} <= set(
        archives.wheel
    )


def test_the_sdist_holds_the_linked_folders_once_and_at_the_top(archives: Archives) -> None:
    assert {
        "actors/__init__.py",
        "kernels/__init__.py",
        "hatch_build.py",
        "kernels/cpu/decoder.cpp",
        "README.md",
        "LICENSE",
        "pyproject.toml",
    } <= set(archives.sdist)
    assert [
        name for name in archives.sdist if name.startswith(("src/triolet/actors", "src/triolet/kernels"))
    ] == []
    assert len(archives.sdist) == len(set(archives.sdist))


def test_a_wheel_made_from_the_sdist_is_the_wheel_made_from_the_tree(archives: Archives) -> None:
    assert sorted(archives.wheel_from_sdist) == sorted(archives.wheel)


def test_the_version_is_that_of_the_package_and_of_a_dated_entry_of_the_changelog(archives: Archives) -> None:
    version = triolet.__version__
    assert f"\nVersion: {version}\n" in archives.metadata
    entries = re.findall(r"^## \[(.+?)\](.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert entries[0] == ("Unreleased", "")
    assert entries[1][0] == version and re.fullmatch(r" - 20\d\d-[01]\d-[0-3]\d", entries[1][1])


def test_the_command_and_the_licence_are_declared(archives: Archives) -> None:
    assert "triolet = triolet.cli:main" in archives.entry_points
    assert "License-Expression: Apache-2.0" in archives.metadata
    assert "Requires-Python: >=3.11" in archives.metadata


def test_a_wheel_without_compiled_kernels_is_for_every_platform(archives: Archives) -> None:
    assert [name for name in archives.wheel if name.endswith(".so")] == []
    assert "Root-Is-Purelib: true" in archives.tags and "Tag: py3-none-any" in archives.tags


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project with a kernel that compiles in no time, and none of the engine."""
    monkeypatch.delenv("TRIOLET_PURE_WHEEL", raising=False)
    folder = tmp_path / "tree"
    names = ["pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "CHANGELOG.md"]
    names += [
        f"kernels/{name}" for name in ("__init__.py", "cpu/__init__.py", "cpu/build.py", "cpu/targets.py")
    ]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "kernels/cpu/tiny.cpp").write_text(
        'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'
    )
    (folder / "src/triolet").mkdir(parents=True)
    (folder / "src/triolet/__init__.py").touch()
    (folder / "actors").mkdir()
    return folder


with_targets = pytest.mark.skipif(
    NATIVE in TARGETS, reason="kernels are compiled ahead on Linux for x86-64 and 64-bit Arm"
)


@with_targets
def test_a_wheel_brings_a_library_for_each_kind_of_cpu_and_is_for_its_platform(
    tree: Path, tmp_path: Path
) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no compiler")
    wheel = build(WheelBuilder, tree, tmp_path / "dist")
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    with zipfile.ZipFile(wheel) as archive:
        brought = [name for name in archive.namelist() if name.endswith(".so")]
        archive.extractall(tmp_path / "site")
    kinds = {name.removeprefix("triolet/kernels/cpu/shipped/kernels-").rpartition("-")[0] for name in brought}
    assert kinds == {target.library for target in TARGETS} and len(brought) == len(kinds)
    for_all = next(name for name in brought if f"-{TARGETS[-1].library}-" in name)
    assert ctypes.CDLL(str(tmp_path / "site" / for_all)).answer() == 42
    assert not (tree / "kernels/cpu/shipped").exists()


@with_targets
def test_a_wheel_made_without_a_compiler_is_for_every_platform_or_refused(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert build(WheelBuilder, tree, tmp_path / "dist").name.endswith("-py3-none-any.whl")
    monkeypatch.setenv("TRIOLET_PURE_WHEEL", "0")
    with pytest.raises(RuntimeError, match="TRIOLET_PURE_WHEEL is 0: there is no C"):
        build(WheelBuilder, tree, tmp_path / "again")


def test_the_links_lead_to_the_folders_at_the_top() -> None:
    links = {name: SRC / "triolet" / name for name in ("actors", "kernels")}
    assert all(link.is_symlink() and link.resolve() == ROOT / name for name, link in links.items())


def test_every_direct_dependency_is_pinned_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    versions = pins()
    for requirement in map(Requirement, asked):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    named = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {str(canonicalize_name(name)): version for name, version in named.items()}


def locked() -> dict[str, tuple[Requirement, list[str]]]:
    """Return requirement and hashes of each package in the lock file."""
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / "requirements.lock").read_text())
    found = {}
    for entry in text.replace("\\\n", " ").splitlines():
        line, *hashes = entry.split(" --hash=")
        requirement = Requirement(line.strip())
        found[str(canonicalize_name(requirement.name))] = requirement, [one.strip() for one in hashes]
    return found


def test_every_package_of_the_lock_file_has_its_pinned_version_and_hashes() -> None:
    pinned = pins()
    for name, (requirement, hashes) in locked().items():
        # What only other systems need was never installed here, so that it has no pin.
        if requirement.marker is None or requirement.marker.evaluate():
            assert str(requirement.specifier) == f"=={pinned[name]}", requirement
        assert str(requirement.specifier).startswith("=="), requirement
        assert hashes and all(re.fullmatch("sha256:[0-9a-f]{64}", one) for one in hashes), requirement


def test_the_lock_file_has_everything_that_triolet_and_its_packages_ask_for() -> None:
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    left, needed = [Requirement(line) for line in asked], set()
    while left:
        requirement = left.pop()
        name = str(canonicalize_name(requirement.name))
        extras = requirement.extras or {""}
        if (name, *sorted(extras)) in needed:
            continue
        needed.add((name, *sorted(extras)))
        for one in map(Requirement, metadata.requires(name) or []):
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras):
                left.append(one)
    # torch is chosen by machine; CUDA's libraries and Triton come with a build for GPUs.
    by_torch = {"torch", "triton"}
    names = {
        name for name, *_ in needed if name not in by_torch and not name.startswith(("nvidia-", "cuda-"))
    }
    assert len(names) > 30
    assert names - set(locked()) == set()
    assert not by_torch & set(locked())
