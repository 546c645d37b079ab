"""Compile the C++ kernels: ahead of time, into a wheel; or at first use, half a minute, kept in the user's cache.

It needs nothing but a C++17 compiler: no torch headers, only a plain C interface, and no library but the C library.
A library is compiled for one kind of CPU (targets.py). What a wheel brings is found by a hash of the sources that lie
beside it, so that sources which were changed are compiled; what was compiled here, by one that has the compiler and its
flags in it as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from triolet.kernels.cpu.targets import NATIVE, TARGETS, Target, cpu_facts

SOURCES = Path(__file__).parent
SHIPPED = "shipped"  # folder beside the sources, in wheels only
SLOW_S = 1.0  # a start-up that pauses longer than this says why
# A compiler that hangs must not hang the engine with it. A usual machine takes half a minute for a target; one whose
# neighbours take its caches has been seen to take 20 times as long, and a wheel has four libraries.
TIMEOUT_S = 3600.0

_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-Wno-psabi", "-fvisibility=hidden",
    # No code reads errno or floating-point traps; honouring them would forbid most vector code. NaN and infinity, and
    # the order of sums, stay as written: there is no -ffast-math.
    "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
# The C++ library goes in, and does not show: what a wheel brings runs beside whichever one a machine has.
_LINK_FLAGS = ("-shared", "-pthread", "-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL")


class BuildError(Exception):
    """Error of a build; the message says why the kernels cannot be compiled here."""


@attrs.frozen
class Toolchain:
    """A C++ compiler."""

    compiler: Path  # path of g++ or clang++

    @classmethod
    def find(cls) -> Toolchain:
        """Find this machine's compiler.

        Raises:
            BuildError: there is no compiler.
        """
        named = os.environ.get("CXX", "")
        found = next(filter(None, map(shutil.which, (named, "g++", "clang++", "c++"))), None)
        if found is None:
            raise BuildError("there is no C++ compiler (g++ or clang++, or the one that CXX names)")
        return cls(Path(found).resolve())

    def accepts(self, target: Target) -> bool:
        """Tell whether the compiler knows the target's flags; one that is older than the CPU may not."""
        command = [str(self.compiler), *target.flags, "-E", "-x", "c++", os.devnull]
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
        return done.returncode == 0

    def key(self, target: Target) -> str:
        """Return 24 hexadecimal digits that change with sources, compiler and flags."""
        stat = self.compiler.stat()  # stands for the compiler's version, without the time to ask it
        facts = [*_FLAGS, *_LINK_FLAGS, str(self.compiler), str(stat.st_size), str(stat.st_mtime_ns)]
        facts += target.flags
        if target == NATIVE:
            facts += cpu_facts()
        return sources_hash("\0".join(facts))

    def compile(self, targets: Sequence[tuple[Target, Path]], folder: Path) -> None:
        """Make a library for each target at the path beside it, with intermediate files in `folder`.

        Raises:
            BuildError: the compiler refused.
        """
        compiler, sources = str(self.compiler), sorted(SOURCES.rglob("*.cpp"))
        compiles, links = [], []
        for number, (target, library) in enumerate(targets):
            objects = [str(folder / f"{number}-{place}.o") for place in range(len(sources))]
            for source, made in zip(sources, objects, strict=True):
                # not among _FLAGS: where the sources lie does not change what they become
                include = f"-I{SOURCES}"
                compiles.append([compiler, *_FLAGS, *target.flags, include, "-c", str(source), "-o", made])
            links.append([compiler, *objects, "-o", str(library), *_link_flags()])
        _run_all(compiles)
        _run_all(links)


def build(target: Target, toolchain: Toolchain | None = None, *, cache: Path | None = None) -> Path:
    """Return the library for a target, compiled now if it is not in the cache.

    Starts that come at once build it once: the others wait. A build that was interrupted leaves nothing behind that a
    later one could take for a library.

    Args:
        target: what to compile for.
        toolchain: None = what `Toolchain.find` finds.
        cache: folder to keep it in; None = `cache_folder()`.

    Returns:
        Path of a shared library.

    Raises:
        BuildError: there is no compiler, it failed, or the cache cannot be written.
    """
    toolchain = toolchain or Toolchain.find()
    cache = cache or cache_folder()
    library = cache / f"kernels-{target.library}-{toolchain.key(target)}.so"
    if library.exists():
        return library
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _lock(library.with_suffix(".lock")):
            if not library.exists():  # another process may have built it while this one waited
                _compile_into(library, target, toolchain)
    except OSError as error:
        raise BuildError(f"{error}; XDG_CACHE_HOME names the folder that compiled kernels go to") from error
    return library


def shipped(target: Target) -> Path | None:
    """Return the library that a wheel has brought for a target; None if it has none, or one of other sources."""
    path = SOURCES / SHIPPED / _shipped_name(target)
    return path if path.exists() else None


def build_shipped(folder: Path) -> list[Path]:
    """Compile what a wheel brings: a library for every kind of CPU that has this machine's instruction set.

    Args:
        folder: where to put them.

    Raises:
        BuildError: there is no compiler, or it failed, or the machine is not one that wheels bring kernels for.
    """
    if NATIVE in TARGETS:
        raise BuildError("kernels are compiled ahead of time on Linux for x86-64 and 64-bit Arm only")
    libraries = {target.library: (target, folder / _shipped_name(target)) for target in TARGETS}
    with tempfile.TemporaryDirectory() as scratch:
        Toolchain.find().compile(tuple(libraries.values()), Path(scratch))
    return [path for _, path in libraries.values()]


def cache_folder() -> Path:
    """Return the folder of compiled kernels: triolet's in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "triolet"


def _shipped_name(target: Target) -> str:
    return f"kernels-{target.library}-{sources_hash()}.so"


def sources_hash(facts: str = "") -> str:
    """Return 24 hexadecimal digits that change with the sources of the kernels, or with `facts`."""
    digest = hashlib.sha256(facts.encode())
    for source in sorted([*SOURCES.rglob("*.cpp"), *SOURCES.rglob("*.h")]):
        name = source.relative_to(SOURCES).as_posix()
        digest.update(name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _link_flags() -> tuple[str, ...]:
    return _LINK_FLAGS if sys.platform == "linux" else ("-shared", "-pthread")


def _compile_into(library: Path, target: Target, toolchain: Toolchain) -> None:
    """Compile a library, under its lock; what an earlier build has left that was killed is deleted."""
    for left in library.parent.glob(f"{library.stem}-*/"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=f"{library.stem}-") as folder:
        made = Path(folder) / library.name
        toolchain.compile([(target, made)], Path(folder))
        made.replace(library)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    # flock: the system releases it when the process ends, also by a crash
    try:
        import fcntl
    except ImportError as error:
        raise BuildError("compiling needs POSIX file locks") from error
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run_all(commands: Sequence[Sequence[str]]) -> None:
    """Run commands side by side, as many as there are processors; after a second, say what takes so long."""
    waiting, running = list(commands), list[subprocess.Popen[bytes]]()
    began, announced = time.monotonic(), False
    try:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                running.append(_start(waiting.pop(0)))
            announced = _say_what_takes_long(began, announced)
            for process in [process for process in running if process.poll() is not None]:
                running.remove(process)
                _check(process)
            time.sleep(0.02)
    finally:
        for process in running:
            process.kill()
            process.communicate()


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def _check(process: subprocess.Popen[bytes]) -> None:
    """Raise `BuildError` if a process that has ended failed."""
    said = process.communicate()[0].decode(errors="replace")
    if process.returncode:
        first = next((line for line in said.splitlines() if "error" in line), said[:200])
        raise BuildError(f"the compiler failed with {process.returncode}: {first.strip()}")


def _say_what_takes_long(began: float, announced: bool) -> bool:
    waited = time.monotonic() - began
    if waited > SLOW_S and not announced:
        sys.stderr.write("triolet: compiling the CPU kernels for this machine; this happens once\n")
        announced = True
    if waited > TIMEOUT_S:
        raise BuildError(f"the compiler took more than {TIMEOUT_S:.0f} s")
    return announced
