"""Checks of the machine: each looks at one thing, and returns what it found in a sentence."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

import attrs

from triolet import __version__
from triolet.cli.models.hub_cache import cached_models, size_text
from triolet.config.processors import ROOT, VARIABLE, Processors, choose_threads, memory_nodes

OK: Final = "ok"
NOTE: Final = "note"
PROBLEM: Final = "problem"

MIN_DESCRIPTORS = 1024
MIN_FREE_BYTES = 1e9  # of memory and disk: below it even small models have no room
MAX_CALIBRATIONS = 3  # that are shown
CPUINFO = Path("/proc/cpuinfo")


@attrs.frozen
class Finding:
    """Result of a check.

    Args:
        subject: what was looked at, in a word.
        state: `ok`; `note`, which costs speed or a feature; or `problem`, with which triolet does not run.
        text: what was found, and what to do about it.
    """

    subject: str
    state: str
    text: str


def versions() -> Iterator[Finding]:
    """Look for every package that triolet requires."""
    from packaging.requirements import Requirement  # comes with huggingface_hub

    yield Finding(
        "triolet", OK, f"{__version__} in {Path(__file__).parents[2]}, Python {platform.python_version()}"
    )
    found = []
    for line in metadata.requires("triolet") or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield Finding(
                "packages", PROBLEM, f"{requirement.name} is not installed; triolet needs {requirement}"
            )
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield Finding(
                "packages", PROBLEM, f"{requirement.name} is {version}; triolet needs {requirement}"
            )
        found.append(f"{requirement.name} {version}")
    yield Finding("packages", OK, ", ".join(found))


def processor() -> Iterator[Finding]:
    """Name the processor, and the part of it that this process may use."""
    names = [line.partition(":")[2].strip() for line in _lines(CPUINFO) if line.startswith("model name")]
    found = Processors.read(ROOT)
    usable, cores = len(found.usable), len(found.cores)
    text = (
        f"{names[0] if names else platform.machine()}, {usable} of {os.cpu_count()} logical processors usable"
    )
    if cores < usable:
        text += f", of {cores} cores"
    if found.quota is not None and found.quota < usable:
        yield Finding("processor", NOTE, f"{text}, but the container may use {found.quota:g}")
    else:
        yield Finding("processor", OK, text)
    nodes = [node for node in memory_nodes(ROOT) if node & found.usable]
    if len(nodes) > 1:
        text = f"{len(nodes)} nodes of memory: with `--replicas {len(nodes)}` each has a replica of its own"
        yield Finding("nodes", NOTE, f"{text}, and reads no weights of another")


def threads() -> Iterator[Finding]:
    """Say how many threads compute a step on the processor, and why."""
    import torch

    chosen = choose_threads(Processors.read(ROOT), os.environ.get(VARIABLE)).within(torch.get_num_threads())
    text = f"{chosen.count} for a step on the processor: {chosen.reason}"
    if chosen.warning is not None:
        yield Finding("threads", NOTE, f"{text}; {chosen.warning}")
    else:
        yield Finding("threads", OK, text)


def memory() -> Iterator[Finding]:
    """Compare free memory with what a small model needs."""
    from triolet.model.memory.kv_cache import available_memory_bytes

    free = available_memory_bytes()
    if free < MIN_FREE_BYTES:
        yield Finding("memory", PROBLEM, f"{size_text(free)} free: too little for torch and a small model")
    else:
        yield Finding("memory", OK, f"{size_text(free)} free")


def kernels() -> Iterator[Finding]:
    """Load the CPU kernels, and say which were chosen and why not better ones."""
    from triolet.errors import ConfigError
    from triolet.kernels.cpu.build import Toolchain, shipped
    from triolet.kernels.cpu.library import SWITCH
    from triolet.kernels.cpu.library import kernels as loaded_kernels
    from triolet.kernels.cpu.targets import TARGETS, missing

    try:
        loaded = loaded_kernels()
    except ConfigError as error:
        yield Finding("kernels", PROBLEM, str(error))
        return
    if loaded is None:
        why = (
            f"{SWITCH}={os.environ[SWITCH]}"
            if os.environ.get(SWITCH) in ("0", "off")
            else "they cannot be built"
        )
        yield Finding("kernels", NOTE, f"none ({why}); torch does their work, several times slower")
        return
    origin = "from the package" if shipped(loaded.target) == loaded.path else "compiled here"
    yield Finding("kernels", OK, f"{loaded.target.name}, {origin}: {loaded.path}")
    for target in TARGETS[: TARGETS.index(loaded.target)]:
        if lacking := missing(target):
            reason = f"the processor lacks {', '.join(lacking)}"
        elif os.environ.get(SWITCH, "auto") != "auto":
            reason = f"{SWITCH}={os.environ[SWITCH]} asks for another one"
        elif not Toolchain.find().accepts(target):
            reason = "the compiler does not know it; a newer one or a wheel with kernels would"
        else:
            reason = "its library cannot be loaded here"
        yield Finding("kernels", OK, f"not {target.name}: {reason}")


def calibrations() -> Iterator[Finding]:
    """Say which choices of the CPU kernels were measured here, for the models that were calibrated last."""
    from triolet.kernels.cpu.calibration import kept_calibrations

    kept = kept_calibrations()
    if not kept:
        yield Finding(
            "calibration", OK, "no model has been measured here yet; the first load of each does it"
        )
    for path, choices in kept[: -1 - MAX_CALIBRATIONS : -1]:
        text = ", ".join(f"{name} {value}" for name, value in choices.shown().items())
        yield Finding("calibration", OK, f"{text}: {path}")
    if (num_more := len(kept) - MAX_CALIBRATIONS) > 0:
        yield Finding("calibration", OK, f"and of {num_more} more models or settings")


def gpu() -> Iterator[Finding]:
    """Name the CUDA devices that torch finds."""
    import torch

    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(number)
            text = (
                f"cuda:{number}, {facts.name}, {size_text(facts.total_memory)}, sm_{facts.major}{facts.minor}"
            )
            yield Finding("gpu", OK, text)
    elif torch.version.cuda is None and Path("/dev/nvidiactl").exists():
        text = "there is one, but torch has been built without CUDA: install a CUDA build of torch to use it"
        yield Finding("gpu", NOTE, text)
    else:
        yield Finding("gpu", OK, "none; models run on the processor")


def caches() -> Iterator[Finding]:
    """Look whether models and kernels can be stored, and how much of them is there."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from triolet.kernels.cpu.build import cache_folder

    models = cached_models()
    size = size_text(sum(model.size_bytes for model in models))
    for subject, folder, content in (
        ("models", Path(HF_HUB_CACHE), f"{len(models)} models, {size}"),
        ("cache", cache_folder(), "compiled kernels"),
    ):
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(there).free
        if not os.access(there, os.W_OK):
            yield Finding(subject, NOTE, f"{folder} cannot be written: {content}, and nothing can be added")
        elif free < MIN_FREE_BYTES:
            yield Finding(subject, NOTE, f"{folder}: {content}; only {size_text(free)} of the disk are free")
        else:
            yield Finding(subject, OK, f"{folder}: {content}; {size_text(free)} of the disk free")


def limits() -> Iterator[Finding]:
    """Compare the limits of this process with what a server needs."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A connection takes a descriptor.
    text = f"{soft} open files (at most {hard})"
    if soft < MIN_DESCRIPTORS:
        yield Finding(
            "limits", NOTE, f"{text}: a server has fewer connections than that; `ulimit -n` raises it"
        )
    else:
        yield Finding("limits", OK, text)
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        yield Finding("limits", NOTE, f"{size_text(space)} of address space: large models do not load")


def free_port(port: int) -> Iterator[Finding]:
    """Look whether a server could listen on a port of this machine."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            yield Finding(
                "port", NOTE, f"127.0.0.1:{port} cannot be had ({error.strerror}); `--port` takes another one"
            )
        else:
            yield Finding("port", OK, f"127.0.0.1:{port} is free")


def run_nano() -> Iterator[Finding]:
    """Let triolet-nano answer a prompt."""
    from triolet import SamplingParams, blocking

    began = time.monotonic()
    with blocking.open_engine() as engine:
        ready_s = time.monotonic() - began
        output = engine.complete(
            "Once upon a time", SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        )
        rate = len(output.outputs[0].token_ids) / (time.monotonic() - began - ready_s)
    yield Finding(
        "engine", OK, f"triolet-nano was ready in {ready_s:.1f} s and wrote {rate:.0f} tokens a second"
    )


def all_checks(*, port: int, runs: bool) -> tuple[tuple[str, Callable[[], Iterator[Finding]]], ...]:
    """Return the checks in their order, with what each looks at.

    Args:
        port: that a server is to have.
        runs: whether triolet-nano is to answer.
    """
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("packages", versions),
        ("processor", processor),
        ("threads", threads),
        ("memory", memory),
        ("kernels", kernels),
        ("calibration", calibrations),
        ("gpu", gpu),
        ("caches", caches),
        ("port", lambda: free_port(port)),
    ]
    if sys.platform != "win32":  # which has no such limits
        checks.insert(-1, ("limits", limits))
    if runs:
        checks.append(("engine", run_nano))
    return tuple(checks)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
