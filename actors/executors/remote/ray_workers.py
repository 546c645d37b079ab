"""Workers that Ray places and starts: one actor for each, which runs an agent and so connects back to the engine.

Ray decides where a worker runs, and starts another one elsewhere when its actor, its process or its machine has ended.
It is not on the path of a step: frames go over the worker's own connection, whose end the engine knows long before Ray
does. All workers are in one placement group, on different machines where there are enough. Each has one bundle of it,
which Ray never divides over machines: so the ranks of a tensor-parallel group are together.

The program's connection to Ray is made once, and stays when the engine ends: a program has only one.
"""

from __future__ import annotations

import importlib.util
import logging
import secrets
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final

import attrs
import trio

from triolet.actors.executors.remote.agent import Agent
from triolet.actors.executors.remote.handshaking import Address
from triolet.actors.executors.remote.port import WorkerPort
from triolet.config.engine import EngineConfig
from triolet.errors import ConfigError

logger = logging.getLogger("triolet.runner")

PAUSE_S: Final = 1.0  # between two actors of one place
INIT: Final = {"include_dashboard": False, "ignore_reinit_error": True}
ELSEWHERE: Final = ("10.255.255.255", 1)  # an address of no machine in this network; nothing is sent to it


@attrs.frozen
class RayPlacement:
    """What Ray is asked to reserve."""

    bundles: tuple[Mapping[str, float], ...]
    """Amount of each resource, for each worker."""
    strategy: str
    """Where Ray puts the bundles."""


def place(num_workers: int, num_ranks: int, device: str, num_gpus: float) -> RayPlacement:
    """Return the placement of an engine's workers.

    Args:
        num_workers: one for each replica.
        num_ranks: processes of each, which need a GPU or core each and must be on one machine.
        device: of each; auto is a GPU where the cluster has enough, and else a core.
        num_gpus: of the cluster.
    """
    is_gpu = device.startswith("cuda") or (device == "auto" and num_gpus >= num_workers * num_ranks)
    bundle = {"GPU" if is_gpu else "CPU": float(num_ranks)}
    # A group of bundles has one strategy. With a bundle for each worker its ranks are packed as strictly as can be,
    # and that of the group is free to spread the workers.
    return RayPlacement((bundle,) * num_workers, "STRICT_PACK" if num_workers == 1 else "SPREAD")


class WorkerHost:
    """Actor that works for an engine; made by Ray, on the machine that Ray has chosen.

    Args:
        host: the engine's address.
        port: likewise.
        token: that the engine knows.
    """

    def __init__(self, host: str, port: int, token: str) -> None:
        self._agent = Agent(Address(host, port), token)

    def work(self) -> None:
        """Work until the engine refuses this worker, or Ray ends the actor."""
        trio.run(self._agent.run)


@attrs.define(eq=False)
class RayWorkers:
    """Workers of one engine.

    Args:
        num_workers: how many there are at a time.
        device: of each; see `place`.
        num_ranks: processes of each.
    """

    num_workers: int
    device: str
    num_ranks: int = 1
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _actors: dict[int, Any] = attrs.field(factory=dict, init=False)
    _group: Any = attrs.field(default=None, init=False)

    def start(self, address: Address, token: str) -> None:
        """Begin to place workers."""
        # A system task, since it outlives each life of an executor.
        trio.lowlevel.spawn_system_task(self._run, address, token)

    def close(self) -> None:
        """End the workers."""
        self._scope.cancel()
        if self._group is not None:
            import ray

            for actor in self._actors.values():
                ray.kill(actor)
            ray.util.remove_placement_group(self._group)

    async def _run(self, address: Address, token: str) -> None:
        with self._scope:
            while True:
                try:
                    ray, placement = await trio.to_thread.run_sync(self._reserve)
                    break
                except Exception:  # there is no cluster yet, or it is no more
                    logger.exception("Ray cannot be asked for workers; trying on")
                    await trio.sleep(PAUSE_S)
            logger.info("Ray places %d workers for the engine at %s", self.num_workers, address)
            async with trio.open_nursery() as nursery:
                for number, bundle in enumerate(placement.bundles):
                    nursery.start_soon(self._keep, ray, bundle, number, address, token)

    def _reserve(self) -> tuple[Any, RayPlacement]:
        """Reserve the places; return Ray and what each worker needs. Blocks for seconds."""
        import ray

        if not ray.is_initialized():
            _connect(ray)
        num_gpus = ray.cluster_resources().get("GPU", 0)
        placement = place(self.num_workers, self.num_ranks, self.device, num_gpus)
        bundles = [dict(bundle) for bundle in placement.bundles]
        self._group = ray.util.placement_group(bundles, strategy=placement.strategy)
        return ray, placement

    async def _keep(
        self, ray: Any, bundle: Mapping[str, float], number: int, address: Address, token: str
    ) -> None:
        """Have one worker at a place at all times."""
        while True:
            try:
                actor, work = await trio.to_thread.run_sync(self._make, ray, bundle, number, address, token)
                self._actors[number] = actor
                reason = await _end_of(work)
                logger.warning("the worker at Ray's place %d has ended: %s", number, reason)
            except Exception:
                logger.exception("the worker at Ray's place %d cannot be started", number)
            await trio.sleep(PAUSE_S)

    def _make(
        self, ray: Any, bundle: Mapping[str, float], number: int, address: Address, token: str
    ) -> tuple[Any, Future[None]]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
        options: dict[str, Any] = {f"num_{name.lower()}s": amount for name, amount in bundle.items()}
        actor = (
            ray.remote(WorkerHost)
            .options(scheduling_strategy=strategy, max_restarts=0, **options)
            .remote(address.host, address.port, token)
        )
        return actor, actor.work.remote().future()


def _connect(ray: Any) -> None:
    """Connect this program to Ray, or start Ray; blocks."""
    connected: Future[None] = Future()

    def hold() -> None:
        try:
            ray.init(**INIT)
        except BaseException as error:
            connected.set_exception(error)
        else:
            connected.set_result(None)
            threading.Event().wait()

    # The processes that Ray starts end with the thread that started them: one that stays.
    threading.Thread(target=hold, name="triolet-ray", daemon=True).start()
    connected.result()


async def _end_of(work: Future[None]) -> str:
    """Wait until a worker has ended, and return why."""
    ended, token = trio.Event(), trio.lowlevel.current_trio_token()

    def tell(_: Future[None]) -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(ended.set)

    work.add_done_callback(tell)
    await ended.wait()
    error = work.exception()
    return "its work is done" if error is None else f"{type(error).__name__}: {error}".splitlines()[0]


def port_for_ray(config: EngineConfig, num_workers: int) -> tuple[WorkerPort, RayWorkers]:
    """Return a port whose workers Ray starts; without an address and a token it has its own.

    Raises:
        ConfigError: Ray is not installed, or a field is wrong.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("runner", "used with the extra ray (pip install 'triolet[ray]')", config.runner)
    port = WorkerPort.of(
        attrs.evolve(
            config,
            worker_listen=config.worker_listen or str(Address(_address_here(), 0)),
            worker_token=config.worker_token or secrets.token_urlsafe(),
        )
    )
    return port, RayWorkers(num_workers, config.device, config.tensor_parallel_size)


def _address_here() -> str:
    """Return the address by which other machines know this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ELSEWHERE)
        except OSError:  # without a network
            return "127.0.0.1"
        return str(probe.getsockname()[0])
