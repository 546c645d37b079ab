from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import attrs
import pytest

from tests.kernels.targets import PagedCase
from triolet.kernels import paged_attention
from triolet.kernels.cpu import build as builder
from triolet.kernels.cpu.build import BuildError, Toolchain, build, cache_folder
from triolet.kernels.cpu.library import Kernels, kernels, library
from triolet.kernels.cpu.targets import TARGETS

NARROW = TARGETS[-1]  # which every machine of this kind runs
SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a kernel that compiles in no time, in the place of the real ones."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.cpp").write_text(SOURCE)
    monkeypatch.setattr(builder, "SOURCES", folder)
    try:
        Toolchain.find()
    except BuildError as error:
        pytest.skip(str(error))
    return folder


def fake_compiler(folder: Path, script: str) -> Path:
    path = folder / "g++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_what_was_built_is_found_again(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(NARROW, cache=tmp_path / "cache")
    assert ctypes.CDLL(str(built)).answer() == 42
    monkeypatch.setattr(Toolchain, "compile", lambda *_: pytest.fail("it was built twice"))
    assert build(NARROW, cache=tmp_path / "cache") == built


def test_other_sources_flags_or_headers_are_another_library(sources: Path) -> None:
    toolchain = Toolchain.find()
    keys = {toolchain.key(NARROW), toolchain.key(attrs.evolve(NARROW, flags=("-O1",)))}
    (sources / "answer.h").write_text("// a remark")
    keys.add(toolchain.key(NARROW))
    (sources / "answer.cpp").write_text(SOURCE.replace("42", "43"))
    keys.add(toolchain.key(NARROW))
    assert len(keys) == 4


def test_starts_at_the_same_time_build_it_once(sources: Path, tmp_path: Path) -> None:
    compiler = Toolchain.find().compiler
    log = tmp_path / "log"
    logging_compiler = fake_compiler(tmp_path, f'echo run >> {log}; sleep 0.2; exec {compiler} "$@"')
    toolchain = attrs.evolve(Toolchain.find(), compiler=logging_compiler)
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(3, mp_context=fork) as pool:
        jobs = [pool.submit(build, NARROW, toolchain, cache=tmp_path / "cache") for _ in range(3)]
        paths = {job.result() for job in jobs}
    assert len(paths) == 1 and ctypes.CDLL(str(paths.pop())).answer() == 42
    assert log.read_text().count("run") == 2  # to compile, and to link


def test_a_failed_build_says_what_the_compiler_said_and_leaves_no_library(
    sources: Path, tmp_path: Path
) -> None:
    (sources / "broken.cpp").write_text("int answer() { return nothing; }\n")
    with pytest.raises(BuildError, match=r"failed with 1: .*nothing"):
        build(NARROW, cache=tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_build_that_takes_long_says_so(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(builder, "SLOW_S", 0.0)
    build(NARROW, cache=tmp_path / "cache")
    assert capsys.readouterr().err.count("compiling the CPU kernels") >= 1


def test_a_compiler_that_hangs_is_stopped(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "TIMEOUT_S", 0.1)
    toolchain = Toolchain(fake_compiler(tmp_path, "exec sleep 60"))
    with pytest.raises(BuildError, match="took more than"):
        build(NARROW, toolchain, cache=tmp_path / "cache")


def test_what_a_build_that_was_killed_has_left_is_deleted_by_the_next_one(
    sources: Path, tmp_path: Path
) -> None:
    cache, was_killed = tmp_path / "cache", tmp_path / "killed"
    script = (
        f'test -e {was_killed} && exec {Toolchain.find().compiler} "$@"; touch {was_killed}; kill -9 $PPID'
    )
    toolchain = Toolchain(fake_compiler(tmp_path, script))
    killed = multiprocessing.get_context("fork").Process(
        target=build, args=(NARROW, toolchain), kwargs={"cache": cache}
    )
    killed.start()
    killed.join()
    assert sorted(path.is_dir() for path in cache.iterdir()) == [False, True]
    build(NARROW, toolchain, cache=cache)
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".so"]


def test_a_cache_that_can_not_be_written_is_named(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(BuildError, match="XDG_CACHE_HOME"):
        build(NARROW, cache=tmp_path / "cache")


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "triolet"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the standard says to ignore it
    assert cache_folder() == Path.home() / ".cache" / "triolet"


def test_without_a_compiler_torch_does_the_work_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found: list[Kernels | None] = []
    monkeypatch.setattr(
        paged_attention, "library", lambda: found[0] if found else found.append(kernels.__wrapped__())
    )
    case = PagedCase.make([(3, 5), (1, 9)])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            out = paged_attention.paged_attention(
                case.query, case.keys, case.values, case.metadata, scale=case.scale
            )
    assert found == [None]
    (warning,) = caplog.messages
    assert warning.startswith(
        "the CPU kernels could not be built, torch's slower ones do their work: there is no"
    )
    assert out.isfinite().all()


@pytest.mark.parametrize("wish", ["0", "off"])
def test_the_kernels_can_be_switched_off(wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIOLET_CPU_TARGET", wish)
    assert kernels.__wrapped__() is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_kernels_bring_no_openmp_threads_of_their_own() -> None:
    if library() is None:
        pytest.skip("the kernels are not built here")
    maps = Path("/proc/self/maps").read_text().splitlines()
    runtimes = {os.path.realpath(line.split()[-1]) for line in maps if "/libgomp" in line or "omp5" in line}
    assert len(runtimes) == 1
