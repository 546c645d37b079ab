"""`triolet doctor` finds what stands in the way of triolet, and says what to do about it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from triolet.cli import main
from triolet.cli.doctor import checks, report
from triolet.kernels.cpu.library import SWITCH
from triolet.kernels.cpu.library import kernels as loaded_kernels
from triolet.model.memory import kv_cache


def found(check: object) -> dict[str, tuple[str, str]]:
    """The last finding of each subject."""
    return {one.subject: (one.state, one.text) for one in check}  # type: ignore[attr-defined]


def test_on_this_machine_there_is_no_problem_and_nano_answers() -> None:
    ran = CliRunner().invoke(main, ["doctor", "--json"])
    findings = [json.loads(line) for line in ran.output.splitlines()]
    assert (ran.exit_code, [one for one in findings if one["state"] == "problem"]) == (0, [])
    assert {one["subject"] for one in findings} >= {
        "packages",
        "processor",
        "memory",
        "gpu",
        "models",
        "limits",
    }
    assert findings[-1]["text"].startswith("triolet-nano was ready in ")


def test_a_package_that_is_missing_or_too_old_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "rich":
            raise metadata.PackageNotFoundError(name)
        return "0.1" if name == "trio" else "99"

    monkeypatch.setattr(
        metadata, "requires", lambda name: ["rich>=13", "trio>=0.35", "gpu>1; extra == 'gpu'"]
    )
    monkeypatch.setattr(metadata, "version", version)
    problems = [one.text for one in checks.versions() if one.state == checks.PROBLEM]
    assert problems == [
        "rich is not installed; triolet needs rich>=13",
        "trio is 0.1; triolet needs trio>=0.35",
    ]


@pytest.mark.parametrize(
    ("quota", "state"), [("max 100000", "ok"), ("50000 100000", "note"), ("9900000 100000", "ok")]
)
def test_a_container_that_gives_less_than_its_processors_is_noted(
    quota: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert found(checks.processor())["processor"][0] == state


@pytest.mark.parametrize(
    ("asked", "state", "text"),
    [
        (None, "ok", "2 for a step on the processor: one for each core, of whose hyper-threads 4 are usable"),
        ("3", "ok", "3 for a step on the processor: OMP_NUM_THREADS is 3"),
        ("5", "note", "4 for a step on the processor: OMP_NUM_THREADS is 5; OMP_NUM_THREADS must be at most"),
    ],
)
def test_the_number_of_threads_is_told_with_its_reason(
    asked: str | None, state: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    machine(tmp_path, monkeypatch)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    if asked is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    finding = found(checks.threads())["threads"]
    assert (finding[0], finding[1][: len(text)]) == (state, text)


def test_nodes_of_memory_are_noted_with_the_replicas_that_use_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(tmp_path, monkeypatch)
    assert "4 of" in found(checks.processor())["processor"][1]
    state, text = found(checks.processor())["nodes"]
    assert (state, "--replicas 2" in text) == ("note", True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2})
    assert "nodes" not in found(checks.processor())


def machine(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of two cores, each with two hyper-threads and a node of memory."""
    for core in (0, 1):
        topologies = [f"cpu/cpu{number}/topology/core_cpus_list" for number in (core, core + 2)]
        for name in (*topologies, f"node/node{core}/cpulist"):
            path = root / "sys/devices/system" / name
            path.parent.mkdir(parents=True)
            path.write_text(f"{core},{core + 2}\n")
    monkeypatch.setattr(checks, "ROOT", root)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})


@pytest.mark.parametrize(("free", "state"), [(10**8, "problem"), (10**10, "ok")])
def test_too_little_memory_is_a_problem(free: int, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_memory_bytes", lambda: free)
    assert found(checks.memory())["memory"][0] == state


@pytest.mark.parametrize(
    ("value", "state", "text"),
    [("off", "note", f"none ({SWITCH}=off)"), ("fast", "problem", "must be one of auto")],
)
def test_kernels_that_are_switched_off_or_named_wrongly_are_told(
    value: str, state: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, value)
    loaded_kernels.cache_clear()
    try:
        finding = found(checks.kernels())["kernels"]
    finally:
        loaded_kernels.cache_clear()
    assert (finding[0], text in finding[1]) == (state, True)


def test_the_last_calibrations_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "no model has been measured" in found(checks.calibrations())["calibration"][1]
    (tmp_path / "triolet").mkdir()
    for number, rows in enumerate((1, 2, 4, 8, 2**31 - 1)):
        path = tmp_path / "triolet" / f"calibration-{number}.json"
        path.write_text(json.dumps({"key": {}, "choices": {"argmax_filter_rows": rows, "few_rows": 2}}))
        os.utime(path, (number, number))
    (tmp_path / "triolet" / "calibration-damaged.json").write_text("{")
    texts = [finding.text for finding in checks.calibrations()]
    assert [text.partition(":")[0] for text in texts] == [
        "argmax_filter_rows any, few_rows 2",
        "argmax_filter_rows 8, few_rows 2",
        "argmax_filter_rows 4, few_rows 2",
        "and of 2 more models or settings",
    ]


def test_a_gpu_that_torch_cannot_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    facts = SimpleNamespace(name="H100", total_memory=80 * 10**9, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: facts)
    assert found(checks.gpu()) == {"gpu": ("ok", "cuda:0, H100, 80.0 GB, sm_90")}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(Path, "exists", lambda path: True)
    assert found(checks.gpu())["gpu"][0] == "note"


def test_a_cache_that_cannot_be_written_or_a_full_disk_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert {state for state, _ in found(checks.caches()).values()} == {"note"}
    monkeypatch.setattr(os, "access", lambda *_: True)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    assert "only 1.0 MB of the disk are free" in found(checks.caches())["cache"][1]


def test_few_open_files_and_a_limit_of_memory_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {resource.RLIMIT_NOFILE: (256, 4096), resource.RLIMIT_AS: (10**10, 10**10)}
    monkeypatch.setattr(resource, "getrlimit", few.__getitem__)
    texts = [one.text for one in checks.limits() if one.state == checks.NOTE]
    assert ["ulimit -n" in texts[0], texts[1][:7]] == [True, "10.0 GB"]


def test_a_port_that_is_taken_is_noted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert found(checks.free_port(port))["port"][0] == "note"
    assert found(checks.free_port(port))["port"][0] == "ok"


def test_a_check_that_fails_is_a_problem_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("no such thing")

    monkeypatch.setattr(
        report, "all_checks", lambda **_: (("gpu", broken), ("port", lambda: checks.free_port(1)))
    )
    ran = CliRunner().invoke(main, ["doctor"])
    first, second = ran.output.splitlines()
    assert (ran.exit_code, first.split()) == (1, ["problem", "gpu", "OSError:", "no", "such", "thing"])
    assert "port" in second
