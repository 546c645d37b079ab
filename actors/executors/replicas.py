"""Executors of the replicas of one engine: which device, or which cores, each of them computes on."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs

from triolet.actors.executors.contract import Executor
from triolet.actors.executors.registry import REMOTE, has_gpu_driver, open_executor, open_remote_executors
from triolet.config.devices import (
    DEVICE_NAMES,
    cores_of,
    device_of_cores,
    is_device,
    kind_of,
    split_cores,
)
from triolet.config.engine import EngineConfig
from triolet.config.processors import ROOT, Processors, memory_nodes
from triolet.errors import ConfigError

logger = logging.getLogger(__name__)

GPUS = Path("/proc/driver/nvidia/gpus")


@contextmanager
def open_executors(config: EngineConfig) -> Iterator[tuple[Executor, ...]]:
    """Open an executor for each replica of an engine.

    Raises:
        ConfigError: more replicas than devices, or a field that several replicas do not honour.
    """
    if config.runner not in REMOTE and config.worker_token is not None:
        # Not refused: the variable may be there for a `triolet worker` on this machine.
        logger.warning("worker_token has no effect with runner %r", config.runner)
    if config.runner in REMOTE and config.num_replicas > 1:
        _check_honoured(config)
        one = attrs.evolve(config, replicas=None, autoscale=None)
        with open_remote_executors(one, config.num_replicas, config.num_first_replicas) as executors:
            yield executors
        return
    with ExitStack() as stack:
        yield tuple(stack.enter_context(open_executor(one)) for one in replica_configs(config))


def replica_configs(config: EngineConfig) -> tuple[EngineConfig, ...]:
    """Return the configuration of each replica.

    Raises:
        ConfigError: see `open_executors`.
    """
    if config.devices:
        _check_devices(config)
    if config.num_replicas == 1:
        device = config.devices[0] if config.devices else config.device
        return (attrs.evolve(config, device=device, devices=(), replicas=None),)
    _check_honoured(config)
    devices = config.devices or _devices(config)
    runner = "process" if config.runner == "auto" else config.runner
    return tuple(
        attrs.evolve(config, device=device, devices=(), replicas=None, runner=runner) for device in devices
    )


def _check_autoscale(config: EngineConfig) -> None:
    if config.runner not in REMOTE:
        rule = f"given with runner 'remote' or 'ray', and not {config.runner!r}"
        raise ConfigError("autoscale", rule, config.autoscale)
    if config.replicas is not None:
        raise ConfigError("replicas", "none with autoscale, which says how many there are", config.replicas)


def _check_devices(config: EngineConfig) -> None:
    devices = config.devices
    for device in devices:
        if not is_device(device) or device == "auto":
            raise ConfigError(
                "devices", f"names of devices, such as {DEVICE_NAMES.removeprefix('auto, ')}", device
            )
    if len(set(devices)) < len(devices):
        raise ConfigError("devices", "different devices", devices)
    if len({kind_of(device) for device in devices}) > 1:
        # a token may differ between the two, and a request may go from one to the other
        raise ConfigError("devices", "all GPUs or all cores of the CPU", devices)
    cores = [core for device in devices for core in cores_of(device) or ()]
    if len(set(cores)) < len(cores):
        raise ConfigError("devices", "sets of cores that have none in common", devices)
    # Those of a worker are another machine's.
    if config.runner not in REMOTE and (missing := set(cores) - Processors.read(ROOT).usable):
        raise ConfigError("devices", f"cores that this process may use, without {sorted(missing)}", devices)
    if config.device != "auto":
        raise ConfigError("device", "auto with devices", config.device)
    if config.replicas is not None and config.replicas != len(devices):
        raise ConfigError("replicas", f"the number of devices ({len(devices)})", config.replicas)


def _check_honoured(config: EngineConfig) -> None:
    if config.autoscale is not None:
        _check_autoscale(config)
    for field, is_wrong in (
        ("runner", config.runner == "thread"),  # a process has one pool of compute threads
        ("tensor_parallel_size", config.tensor_parallel_size > 1 and config.runner not in REMOTE),
        ("enable_lora", config.enable_lora),
        ("kv_store", config.kv_store is not None),
        ("kv_pool_bytes", config.kv_pool_bytes > 0),
        ("profile_dir", config.profile_dir is not None),
        ("sleep_after", config.sleep_after is not None),
        ("devices", config.runner in REMOTE and bool(config.devices)),  # each worker has its own
        ("device", not config.devices and ":" in config.device),  # each replica has a device of its own
    ):
        if is_wrong:
            rule = f"1 with {field} {getattr(config, field)!r}"
            raise ConfigError("replicas", rule, config.num_replicas)


def _devices(config: EngineConfig) -> tuple[str, ...]:
    num_replicas = config.num_replicas
    if config.runner == "inline":
        return (config.device,) * num_replicas
    if config.device == "cuda" or (config.device == "auto" and has_gpu_driver()):
        if GPUS.is_dir() and (count := _num_gpus()) < num_replicas:
            raise ConfigError("replicas", f"at most the number of GPUs ({count})", num_replicas)
        return tuple(f"cuda:{number}" for number in range(num_replicas))
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError(
            "replicas", "1 on the CPU of a system that cannot bind processes to cores", num_replicas
        )
    processors = Processors.read(ROOT)
    usable, cores = processors.usable, processors.cores
    if len(usable) < num_replicas:
        raise ConfigError("replicas", f"at most the number of usable cores ({len(usable)})", num_replicas)
    # Two replicas on the hyper-threads of one core would be in each other's way, and the front has the others.
    chosen = cores if len(cores) >= num_replicas else usable
    parts = split_cores(chosen, memory_nodes(ROOT), num_replicas)
    if processors.quota is not None:  # a replica has a thread for each of its cores
        most = max(1, int(processors.quota / num_replicas))
        parts = tuple(frozenset(sorted(part)[:most]) for part in parts)
    return tuple(map(device_of_cores, parts))


def _num_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    return len(list(GPUS.iterdir()))
