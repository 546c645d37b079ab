"""Compile the C++ kernels on the machine that runs them: once, a few seconds, kept in the user's cache.

Compiling here rather than shipping a binary is what lets the sources choose the widest vectors at compile time, and it
needs nothing but a C++17 compiler: no torch headers, only a plain C interface. What was built is found again by a hash
of the sources, the compiler, its flags and the CPU; another CPU, or a newer triolet, builds its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

SOURCES = Path(__file__).parent
SLOW_S = 1.0  # a start-up that pauses longer than this says why
TIMEOUT_S = (
    300.0  # a compiler that hangs must not hang the engine with it; a slow machine takes tens of seconds
)

_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-Wno-psabi", "-fvisibility=hidden",
    # Nobody reads errno or floating-point traps; honouring them would forbid most vector code. NaN and infinity, and
    # the order of sums, stay as written: there is no -ffast-math.
    "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip


class BuildError(Exception):
    """The kernels can not be compiled here; the message says why."""


@attrs.frozen
class Toolchain:
    """What decides about the binary, beside the sources.

    Args:
        compiler: path of g++ or clang++.
        target: the flag that names the CPU to compile for.
        openmp: the OpenMP runtime that is loaded already, torch's own. Two of them in one process would each keep
            threads that spin for work, on the same cores. None = that of the compiler.
    """

    compiler: Path
    target: str = "-march=native"
    openmp: Path | None = None

    @classmethod
    def find(cls) -> Toolchain:
        """This machine's.

        Raises:
            BuildError: there is no compiler.
        """
        named = os.environ.get("CXX", "")
        found = next(filter(None, map(shutil.which, (named, "g++", "clang++", "c++"))), None)
        if found is None:
            raise BuildError("there is no C++ compiler (g++ or clang++, or the one that CXX names)")
        target = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
        return cls(Path(found).resolve(), target, _loaded_openmp())

    def key(self, sources: Sequence[Path]) -> str:
        """A name for what these sources become: 24 hexadecimal digits."""
        stat = self.compiler.stat()  # stands for the compiler's version, without the time to ask it
        facts = (*_FLAGS, str(self.compiler), str(stat.st_size), str(stat.st_mtime_ns), self.target)
        digest = hashlib.sha256("\0".join((*facts, str(self.openmp), _cpu())).encode())
        for source in sources:
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
        return digest.hexdigest()[:24]

    def compile(self, sources: Sequence[Path], target: Path, folder: Path) -> None:
        """Make the library `target`, with intermediate files in `folder`; all sources at once.

        Raises:
            BuildError: the compiler refused.
        """
        objects = [folder / f"{source.stem}.o" for source in sources]
        commands = [
            [str(self.compiler), *_FLAGS, self.target, "-fopenmp", "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
        _run_together(commands)
        openmp = "-fopenmp" if self.openmp is None else str(self.openmp)
        _run_together([[str(self.compiler), "-shared", *map(str, objects), "-o", str(target), openmp]])


def build(toolchain: Toolchain | None = None, *, cache: Path | None = None) -> Path:
    """The library for this machine, compiled now if it is not in the cache.

    Starts that come at once build it once: the others wait. A build that was interrupted leaves nothing behind that a
    later one could take for a library.

    Args:
        toolchain: None = what `Toolchain.find` finds.
        cache: folder to keep it in; None = `cache_folder()`.

    Returns:
        Path of a shared library.

    Raises:
        BuildError: there is no compiler, it failed, or the cache can not be written.
    """
    toolchain = toolchain or Toolchain.find()
    cache = cache or cache_folder()
    sources = sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])
    library = cache / f"kernels-{toolchain.key(sources)}.so"
    if library.exists():
        return library
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _lock(library.with_suffix(".lock")):
            if not library.exists():  # another process may have built it while this one waited
                _compile_into(library, toolchain, [source for source in sources if source.suffix == ".cpp"])
    except OSError as error:
        raise BuildError(f"{error}; XDG_CACHE_HOME names the folder that compiled kernels go to") from error
    return library


def cache_folder() -> Path:
    """Where compiled kernels are kept: triolet's folder in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "triolet"


def _compile_into(library: Path, toolchain: Toolchain, sources: Sequence[Path]) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        toolchain.compile(sources, made, Path(folder))
        made.replace(library)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock between processes; it ends with the process that holds it."""
    try:
        import fcntl
    except ImportError as error:
        raise BuildError("compiling needs POSIX file locks") from error
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run_together(commands: Sequence[Sequence[str]]) -> None:
    """Run commands side by side; after a second, say what takes so long."""
    running = [
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for command in commands
    ]
    try:
        began, announced = time.monotonic(), False
        for command, process in zip(commands, running, strict=True):
            announced = _wait(process, began, announced)
            if process.returncode:
                said = process.stdout.read().decode(errors="replace") if process.stdout else ""
                first = next((line for line in said.splitlines() if "error" in line), said[:200])
                raise BuildError(f"{Path(command[0]).name} failed with {process.returncode}: {first.strip()}")
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.communicate()


def _wait(process: subprocess.Popen[bytes], began: float, announced: bool) -> bool:
    while process.poll() is None:
        waited = time.monotonic() - began
        if waited > SLOW_S and not announced:
            sys.stderr.write("triolet: compiling the CPU kernels for this machine; this happens once\n")
            announced = True
        if waited > TIMEOUT_S:
            raise BuildError(f"the compiler took more than {TIMEOUT_S:.0f} s")
        time.sleep(0.02)
    return announced


def _loaded_openmp() -> Path | None:
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    found = re.search(r"(/\S*/lib(?:gomp|iomp5|omp)\b[^/\s]*\.so[^/\s]*)$", mapped, re.MULTILINE)
    return Path(found[1]) if found else None


def _cpu() -> str:
    """What the CPU can do, in words that change when it does."""
    try:
        processor = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kept = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return "\n".join(line for line in processor.splitlines() if line.startswith(kept))
