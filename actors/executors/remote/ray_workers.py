"""Workers that Ray places and starts: one actor for each, which runs an agent and so connects back to the engine.

Ray decides where a worker runs, and starts another one elsewhere when its actor, its process or its machine has ended.
It is not on the path of a step: frames go over the worker's own connection, whose end the engine knows long before Ray
does. All workers are in one placement group, on different machines where there are enough. Each has one bundle of it,
which Ray never divides over machines: so the ranks of a tensor-parallel group are together. Where the number of workers
changes, each is in a group of its own, so that its place can be given back; one for which there is no room yet is
started on the machine that joins.

The program's connection to Ray is made once, and stays when the engine ends: a program has only one.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Final

import attrs
import trio

from triolet.actors.executors.remote.agent import Agent
from triolet.actors.executors.remote.port import WorkerPort
from triolet.actors.executors.threads import clean_up_in_thread
from triolet.config.address import Address
from triolet.config.engine import EngineConfig
from triolet.errors import ConfigError

logger = logging.getLogger("triolet.runner")

GIVING_BACK: Final = "giving places back to Ray"
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


def placement_of(num_workers: int, num_ranks: int, device: str, num_gpus: float) -> RayPlacement:
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
        label: that the name of the worker begins with.
    """

    def __init__(self, host: str, port: int, token: str, label: str) -> None:
        self._agent = Agent(Address(host, port), token, name=label + socket.gethostname())

    def work(self) -> None:
        """Work until the engine refuses this worker, or Ray ends the actor."""
        trio.run(self._agent.run)


@attrs.define(eq=False)
class Place:
    """Place of one worker in the cluster."""

    number: int
    group: Any
    index: int  # of its bundle in the group
    bundle: Mapping[str, float]
    actor: Any = None
    is_left: bool = False

    @property
    def label(self) -> str:
        """Beginning of the name of its worker."""
        return f"Ray's place {self.number} on "


@attrs.define(eq=False)
class RayWorkers:
    """Workers of one engine.

    Args:
        has_taken: whether a worker with a name that begins so computes; see `WorkerPort.has_taken`.
        num_workers: how many there are at first.
        device: of each; see `placement_of`.
        num_ranks: processes of each.
        may_change: whether their number does.
    """

    has_taken: Callable[[str], bool]
    num_workers: int
    device: str
    num_ranks: int = 1
    may_change: bool = False
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _places: list[Place] = attrs.field(factory=list, init=False)
    _changed: trio.Event = attrs.field(factory=trio.Event, init=False)
    _numbers: Iterator[int] = attrs.field(factory=itertools.count, init=False)

    def start(self, address: Address, token: str) -> None:
        """Begin to place workers."""
        # A system task, since it outlives each life of an executor.
        trio.lowlevel.spawn_system_task(self._run, address, token)

    def want(self, num_workers: int) -> None:
        """Have more places, or give back those beyond this number at which no worker computes."""
        if num_workers != self.num_workers or len(self._places) > num_workers:
            self.num_workers = num_workers
            self._changed.set()

    def close(self) -> None:
        """End the workers."""
        self._scope.cancel()
        if self._places:
            _leave(self._places)

    async def _run(self, address: Address, token: str) -> None:
        with self._scope:
            first = await self._try_on(self._reserve_first)
            logger.info("Ray places %d workers for the engine at %s", len(first), address)
            async with trio.open_nursery() as nursery:
                new = first
                while True:
                    for place in new:
                        nursery.start_soon(self._keep, place, address, token)
                    await self._changed.wait()
                    self._changed = trio.Event()
                    new = []
                    if (num_more := self.num_workers - len(self._places)) > 0:
                        logger.info("Ray is asked for %d more workers", num_more)
                        new = await self._try_on(partial(self._reserve_alone, num_more, first[0].bundle))
                    elif num_more < 0:
                        await self._give_back(-num_more)

    async def _give_back(self, number: int) -> None:
        """Give back at most so many places at which no worker computes."""
        free = [place for place in self._places if not self.has_taken(place.label)][:number]
        for place in free:
            place.is_left = True
            self._places.remove(place)
        if free:
            logger.info("Ray gets back the places of %d workers, which are not needed now", len(free))
            await clean_up_in_thread(partial(_leave, free), GIVING_BACK)

    async def _try_on(self, reserve: Callable[[], list[Place]]) -> list[Place]:
        """Reserve places; try again until that succeeds."""
        while True:
            try:
                places = await trio.to_thread.run_sync(reserve)
            except Exception:  # there is no cluster yet, or it is no more
                logger.exception("Ray cannot be asked for workers; trying on")
                await trio.sleep(PAUSE_S)
            else:
                if self._scope.cancel_called:  # the engine has closed meanwhile
                    await clean_up_in_thread(partial(_leave, places), GIVING_BACK)
                else:
                    self._places += places
                return places

    def _reserve_first(self) -> list[Place]:
        """Reserve the places that there are at first. Blocks for seconds."""
        import ray

        if not ray.is_initialized():
            _connect(ray)
        num_gpus = ray.cluster_resources().get("GPU", 0)
        if self.may_change:
            [bundle] = placement_of(1, self.num_ranks, self.device, num_gpus).bundles
            return self._reserve_alone(self.num_workers, bundle)
        placement = placement_of(self.num_workers, self.num_ranks, self.device, num_gpus)
        group = ray.util.placement_group(
            [dict(bundle) for bundle in placement.bundles], strategy=placement.strategy
        )
        return [
            Place(next(self._numbers), group, index, bundle) for index, bundle in enumerate(placement.bundles)
        ]

    def _reserve_alone(self, number: int, bundle: Mapping[str, float]) -> list[Place]:
        """Reserve places that can be given back one by one. Blocks."""
        import ray

        groups = [ray.util.placement_group([dict(bundle)], strategy="STRICT_PACK") for _ in range(number)]
        return [Place(next(self._numbers), group, 0, bundle) for group in groups]

    async def _keep(self, place: Place, address: Address, token: str) -> None:
        """Have one worker at a place until the place is given back."""
        while not place.is_left:
            try:
                work = await trio.to_thread.run_sync(_work_at, place, address, token)
                reason = await _end_of(work)
                if not place.is_left:
                    logger.warning("the worker at Ray's place %d has ended: %s", place.number, reason)
            except Exception:
                logger.exception("the worker at Ray's place %d cannot be started", place.number)
            await trio.sleep(PAUSE_S)


def _work_at(place: Place, address: Address, token: str) -> Future[None]:
    """Have Ray start an actor at a place; return the future of its work. Blocks."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(place.group, placement_group_bundle_index=place.index)
    options: dict[str, Any] = {f"num_{name.lower()}s": amount for name, amount in place.bundle.items()}
    place.actor = (
        ray.remote(WorkerHost)
        .options(scheduling_strategy=strategy, max_restarts=0, **options)
        .remote(address.host, address.port, token, place.label)
    )
    work: Future[None] = place.actor.work.remote().future()
    return work


def _leave(places: Sequence[Place]) -> None:
    """End the actors at places, and give the places back to Ray, as far as it takes them. Blocks."""
    import ray

    try:
        # All are called, also after an error; what comes last is called first.
        with ExitStack() as calls:
            for group in {id(place.group): place.group for place in places}.values():
                calls.callback(ray.util.remove_placement_group, group)
            for place in places:
                if place.actor is not None:
                    calls.callback(ray.kill, place.actor)
    except Exception:  # there is no cluster any more
        logger.exception("Ray cannot take back places")


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


def port_for_ray(
    config: EngineConfig, num_workers: int, *, may_change: bool
) -> tuple[WorkerPort, RayWorkers]:
    """Return a port whose workers Ray starts; without an address and a token it has its own.

    Args:
        config: of one replica.
        num_workers: how many there are at first.
        may_change: whether their number does.
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
    workers = RayWorkers(
        port.has_taken, num_workers, config.device, config.tensor_parallel_size, may_change=may_change
    )
    port.on_start, port.on_want = workers.start, workers.want
    return port, workers


def _address_here() -> str:
    """Return the address by which other machines know this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ELSEWHERE)
        except OSError:  # without a network
            return "127.0.0.1"
        return str(probe.getsockname()[0])
