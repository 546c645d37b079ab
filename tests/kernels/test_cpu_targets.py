"""Which kernels are loaded: the best that the machine can run, from the package or from a compiler, or those named."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import pytest

from triolet.errors import ConfigError
from triolet.kernels.cpu import build as builder
from triolet.kernels.cpu import targets
from triolet.kernels.cpu.build import SHIPPED, BuildError, Toolchain, build, build_shipped, shipped
from triolet.kernels.cpu.library import Kernels, kernels
from triolet.kernels.cpu.targets import ARM64_TARGETS, NATIVE, TARGETS, X86_TARGETS, Target, missing, runnable

on_x86 = pytest.mark.skipif(TARGETS != X86_TARGETS, reason="needs x86-64 Linux")
with_targets = pytest.mark.skipif(NATIVE in TARGETS, reason="needs Linux on x86-64 or 64-bit Arm")

SOURCE = """
#define EXPORT extern "C" __attribute__((visibility("default")))
static int tiles = -1;
EXPORT int triolet_use_amx(int wanted) { return tiles = wanted; }
EXPORT void triolet_use_threads(void*) {}
EXPORT int uses_tiles() { return tiles; }
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with kernels that compile in no time, in the place of the real ones; and an empty cache."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "tiny.cpp").write_text(SOURCE)
    monkeypatch.setattr(builder, "SOURCES", folder)
    monkeypatch.setattr("triolet.kernels.cpu.library.check_layouts", lambda _: None)  # they have no structs
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TRIOLET_CPU_TARGET", raising=False)
    try:
        Toolchain.find()
    except BuildError as error:
        pytest.skip(str(error))
    return folder


def pretend_cpu(monkeypatch: pytest.MonkeyPatch, features: frozenset[str]) -> None:
    monkeypatch.setattr(targets, "_features", lambda: features)


def chosen() -> Kernels:
    found = kernels.__wrapped__()
    assert found is not None
    return found


def named(name: str) -> Target:
    return next(target for target in TARGETS if target.name == name)


@pytest.mark.parametrize("best", TARGETS, ids=lambda target: target.name)
def test_a_cpu_runs_the_targets_with_features_that_it_has(
    best: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_cpu(monkeypatch, best.features)
    assert runnable() == TARGETS[TARGETS.index(best) :]
    assert missing(best) == ()


@pytest.mark.parametrize(
    ("features", "names"),
    [("fp asimd cpuid", ["neon"]), ("fp asimd crc32 atomics asimdrdm dcpop asimddp", ["dotprod", "neon"])],
    ids=["Cortex-A72", "Neoverse N1"],
)
def test_an_arm_runs_the_targets_with_features_that_its_system_names(
    features: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = ("Features\t: " + features, "CPU implementer\t: 0x41")
    monkeypatch.setattr(targets, "cpu_facts", lambda: facts)
    monkeypatch.setattr(targets, "_features", targets._features.__wrapped__)
    assert [target.name for target in ARM64_TARGETS if not missing(target)] == names


def test_no_kernels_are_compiled_ahead_of_time_for_a_machine_without_kinds_of_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "TARGETS", (NATIVE,))
    with pytest.raises(BuildError, match="on Linux for x86-64 and 64-bit Arm only"):
        build_shipped(tmp_path)


@with_targets
def test_the_best_target_is_compiled_once_and_then_found(
    sources: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="triolet.kernels.cpu.library"):
        first = chosen()
    assert first.target == runnable()[0]
    assert caplog.messages == [f"the CPU kernels are those for {first.target.name}, {first.path}"]
    monkeypatch.setattr(Toolchain, "compile", lambda *_: pytest.fail("it was built twice"))
    assert chosen().path == first.path


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_target_can_be_named(target: Target, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIOLET_CPU_TARGET", target.name)
    if missing(target):
        with pytest.raises(ConfigError, match=f"which has no .*; got '{target.name}'"):
            kernels.__wrapped__()
    else:
        found = chosen()
        assert (found.target, found.cpp.uses_tiles()) == (target, target.tiles)


@on_x86
def test_a_target_that_this_machine_can_not_run_is_refused_and_says_what_it_lacks(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_cpu(monkeypatch, named("avx512_bf16").features - {"avx512vl"})
    monkeypatch.setenv("TRIOLET_CPU_TARGET", "amx")
    with pytest.raises(
        ConfigError,
        match="TRIOLET_CPU_TARGET must be what this CPU can run, which has no amx_bf16, amx_int8, amx_tile, avx512vl",
    ):
        kernels.__wrapped__()
    monkeypatch.delenv("TRIOLET_CPU_TARGET")
    assert chosen().target.name == "avx2"


def test_an_unknown_target_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIOLET_CPU_TARGET", "mmx")
    with pytest.raises(ConfigError, match=r"TRIOLET_CPU_TARGET must be one of auto, off, .*; got 'mmx'"):
        kernels.__wrapped__()


def test_a_target_that_is_named_and_can_not_be_compiled_is_an_error(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIOLET_CPU_TARGET", TARGETS[-1].name)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"can be used here \(there is no C"):
        kernels.__wrapped__()


@on_x86
def test_a_system_that_does_not_lend_tiles_gets_the_same_library_without_them(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sources / "tiny.cpp").write_text(SOURCE.replace("tiles = wanted;", "tiles = 0;"))
    pretend_cpu(monkeypatch, named("avx512_bf16").features | named("amx").features)
    found = chosen()
    assert (found.target.name, found.cpp.uses_tiles()) == ("avx512_bf16", 0)
    monkeypatch.setenv("TRIOLET_CPU_TARGET", "amx")
    with pytest.raises(ConfigError, match="does not let this process use AMX"):
        kernels.__wrapped__()


@with_targets
def test_a_compiler_that_is_older_than_the_cpu_compiles_what_it_knows(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Toolchain, "accepts", lambda self, target: target == TARGETS[-1])
    assert chosen().target == TARGETS[-1]


@with_targets
def test_what_a_wheel_brings_is_used_without_a_compiler(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sources / SHIPPED).mkdir()
    made = build_shipped(sources / SHIPPED)
    assert len(made) == len({target.library for target in TARGETS}) == len(set(made))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = chosen()
    assert found.target == runnable()[0] and found.path in made
    assert not (tmp_path / "cache").exists()


@with_targets
def test_what_a_wheel_brings_and_can_not_be_loaded_is_compiled(sources: Path) -> None:
    (sources / SHIPPED).mkdir()
    for path in build_shipped(sources / SHIPPED):
        path.write_bytes(b"for another C library")
    assert chosen().path.parent == builder.cache_folder()


@with_targets
def test_what_was_shipped_for_other_sources_is_left_alone(sources: Path) -> None:
    target = TARGETS[-1]
    (sources / SHIPPED).mkdir()
    build_shipped(sources / SHIPPED)
    assert shipped(target) is not None
    (sources / "tiny.cpp").write_text(SOURCE + "// changed")
    assert shipped(target) is None
    assert chosen().path.parent == builder.cache_folder()


@with_targets
def test_a_library_needs_nothing_but_the_c_library(sources: Path, tmp_path: Path) -> None:
    more = "#include <vector>\nEXPORT int size() { return (new std::vector<int>(9))->size(); }"
    (sources / "tiny.cpp").write_text(SOURCE + more)
    library = build(TARGETS[-1], cache=tmp_path / "cache")
    assert ctypes.CDLL(str(library)).size() == 9
    assert b"libstdc++.so" not in library.read_bytes() and b"libgomp" not in library.read_bytes()
