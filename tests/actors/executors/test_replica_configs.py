"""Each replica has a device, or cores, of its own; what several replicas do not honour is refused by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from triolet.actors.executors import replicas
from triolet.actors.executors.replicas import open_executors, replica_configs
from triolet.config.devices import cores_of
from triolet.config.engine import EngineConfig
from triolet.errors import ConfigError

CORES = frozenset(range(8))


@pytest.fixture
def _eight_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: CORES)
    monkeypatch.setattr(replicas, "ROOT", tmp_path)
    monkeypatch.setattr(replicas, "has_gpu_driver", lambda: False)


def devices_of(**fields: Any) -> list[str]:
    configs = replica_configs(EngineConfig(**fields))
    assert all((config.replicas, config.devices) == (None, ()) for config in configs)
    return [config.device for config in configs]


@pytest.mark.usefixtures("_eight_cores")
def test_devices_are_those_of_the_replicas() -> None:
    assert devices_of(devices=("cuda:1", "cuda:3")) == ["cuda:1", "cuda:3"]
    assert devices_of(devices=("cpu:0-3", "cpu:4-7"), replicas=2) == ["cpu:0-3", "cpu:4-7"]
    assert devices_of(devices=("cuda:2",)) == ["cuda:2"]
    assert devices_of() == ["auto"]


@pytest.mark.usefixtures("_eight_cores")
def test_replicas_on_a_cpu_divide_its_cores() -> None:
    found = [cores_of(device) for device in devices_of(replicas=3, device="cpu")]
    assert [len(cores or ()) for cores in found] == [3, 3, 2]
    assert frozenset().union(*filter(None, found)) == CORES
    assert {config.runner for config in replica_configs(EngineConfig(replicas=2))} == {"process"}


@pytest.mark.usefixtures("_eight_cores")
def test_replicas_on_a_cpu_have_a_node_of_memory_each(tmp_path: Path) -> None:
    for node, cores in enumerate(("0-1,4-5", "2-3,6-7")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    assert devices_of(replicas=2) == ["cpu:0-1+4-5", "cpu:2-3+6-7"]


@pytest.mark.usefixtures("_eight_cores")
def test_replicas_on_a_cpu_divide_the_quota_of_their_container(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("500000 100000\n")
    assert devices_of(replicas=2) == ["cpu:0-1", "cpu:4-5"]
    (group / "cpu.max").write_text("50000 100000\n")
    assert devices_of(replicas=2) == ["cpu:0", "cpu:4"]


@pytest.mark.usefixtures("_eight_cores")
def test_replicas_share_no_core_by_its_hyper_threads_while_there_are_enough(tmp_path: Path) -> None:
    for core in CORES:
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "core_cpus_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    assert devices_of(replicas=2) == ["cpu:0-1", "cpu:2-3"]
    assert len(devices_of(replicas=5)) == 5


def test_replicas_on_gpus_are_numbered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / str(number)).mkdir()
    monkeypatch.setattr(replicas, "GPUS", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices_of(replicas=3, device="cuda") == ["cuda:0", "cuda:1", "cuda:2"]
    with pytest.raises(ConfigError, match=r"replicas must be at most the number of GPUs \(3\); got 4"):
        devices_of(replicas=4, device="cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    with pytest.raises(ConfigError, match=r"replicas must be at most the number of GPUs \(2\); got 3"):
        devices_of(replicas=3, device="cuda")


@pytest.mark.usefixtures("_eight_cores")
@pytest.mark.parametrize("devices", [("cpu:0", "cpu:9"), ("cpu:7-9",)])
def test_devices_with_cores_that_are_not_there_are_refused_before_a_process_starts(
    devices: tuple[str, ...],
) -> None:
    with pytest.raises(
        ConfigError, match=r"^devices must be cores that this process may use, without \[.*9\]"
    ):
        devices_of(devices=devices)
    assert devices_of(devices=("cpu:9",), runner="remote") == ["cpu:9"]


@pytest.mark.usefixtures("_eight_cores")
def test_more_replicas_than_cores_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"replicas must be at most the number of usable cores \(8\); got 9"
    ):
        devices_of(replicas=9, device="cpu")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"devices": ("tpu",)},
            "devices must be names of devices, such as cpu, cpu:CORES, cuda, cuda:N; got 'tpu'",
        ),
        ({"devices": ("auto",)}, "devices must be names of devices"),
        ({"devices": ("cuda:0", "cuda:0")}, "devices must be different devices"),
        ({"devices": ("cuda:0", "cpu:1")}, "devices must be all GPUs or all cores of the CPU"),
        ({"devices": ("cpu:0-3", "cpu:3-4")}, "devices must be sets of cores that have none in common"),
        ({"devices": ("cuda:0",), "device": "cuda"}, "device must be auto with devices; got 'cuda'"),
        ({"devices": ("cuda:0",), "replicas": 2}, r"replicas must be the number of devices \(1\); got 2"),
        ({"replicas": 2, "device": "cuda:1"}, "replicas must be 1 with device 'cuda:1'; got 2"),
        ({"replicas": 2, "runner": "thread"}, "replicas must be 1 with runner 'thread'; got 2"),
        (
            {"autoscale": (1, 2)},
            r"autoscale must be given with runner 'remote' or 'ray', and not 'auto'; got \(1, 2\)",
        ),
        (
            {"autoscale": (1, 2), "runner": "remote", "replicas": 2},
            "replicas must be none with autoscale, which says how many there are; got 2",
        ),
        (
            {"autoscale": (1, 2), "runner": "remote", "enable_lora": True},
            "replicas must be 1 with enable_lora True",
        ),
        ({"replicas": 2, "tensor_parallel_size": 2}, "replicas must be 1 with tensor_parallel_size 2; got 2"),
        ({"replicas": 2, "enable_lora": True}, "replicas must be 1 with enable_lora True; got 2"),
        ({"replicas": 2, "kv_store": "there"}, "replicas must be 1 with kv_store 'there'; got 2"),
        ({"replicas": 2, "kv_pool_bytes": 9}, "replicas must be 1 with kv_pool_bytes 9; got 2"),
        ({"replicas": 2, "profile_dir": "there"}, "replicas must be 1 with profile_dir 'there'; got 2"),
        ({"replicas": 2, "sleep_after": 9.0}, "replicas must be 1 with sleep_after 9.0; got 2"),
    ],
)
def test_what_replicas_do_not_honour_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        replica_configs(EngineConfig(**fields))


@pytest.mark.parametrize("runner", ["thread", "process", "inline"])
def test_a_token_of_workers_is_warned_of_where_there_are_none(
    runner: str, caplog: pytest.LogCaptureFixture
) -> None:
    with open_executors(EngineConfig(runner=runner, worker_token="sesame")):
        assert caplog.messages == [f"worker_token has no effect with runner {runner!r}"]
    caplog.clear()
    with open_executors(EngineConfig(runner=runner)):
        assert caplog.messages == []
