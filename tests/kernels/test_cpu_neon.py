"""What the kernels do with 64-bit Arm's own instructions is what plain C++ does: on an Arm, or emulated by QEMU."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from triolet.kernels.cpu.build import SOURCES, Toolchain
from triolet.kernels.cpu.targets import ARM64_TARGETS, Target, missing

IS_ARM = platform.machine() == "aarch64"
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs a 64-bit Arm, or {CROSS_COMPILER} and {EMULATOR}")
    return found


@pytest.fixture
def compiler() -> Path:
    return Toolchain.find().compiler if IS_ARM else Path(tool(CROSS_COMPILER))


@pytest.fixture
def emulator() -> list[str]:
    # Also on an Arm, if it is there: the Arm may be emulated itself, and its system can run no program for one.
    found = shutil.which(EMULATOR)
    return [found] if found else [] if IS_ARM else [tool(EMULATOR)]


on_every_arm = pytest.mark.parametrize("target", ARM64_TARGETS, ids=lambda target: target.name)


@on_every_arm
def test_instructions_of_arm_give_what_plain_code_gives(
    target: Target, compiler: Path, emulator: list[str], tmp_path: Path
) -> None:
    if IS_ARM and missing(target):
        pytest.skip(f"needs a CPU with {', '.join(missing(target))}")
    program, source = tmp_path / "neon", Path(__file__).with_name("neon.cpp")
    # No contraction: the numbers compared with are rounded at every step.
    flags = ("-std=c++17", "-O2", "-Wno-psabi", "-ffp-contract=off", "-static")
    subprocess.run(
        [str(compiler), *flags, *target.flags, f"-I{SOURCES}", str(source), "-o", str(program)], check=True
    )
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0)


@pytest.mark.slow
def test_the_kernels_compile_for_every_arm(compiler: Path, tmp_path: Path) -> None:
    libraries = [(target, tmp_path / f"{target.library}.so") for target in ARM64_TARGETS]
    Toolchain(compiler).compile(libraries, tmp_path)
    assert all(b"triolet_step" in library.read_bytes() for _, library in libraries)
