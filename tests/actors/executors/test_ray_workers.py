"""What Ray is asked for, by a stand-in for the part of Ray that is used: places, actors, and their ends."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import pytest
import trio

from triolet.actors.executors.registry import open_remote_executors
from triolet.actors.executors.remote import ray_workers
from triolet.actors.executors.remote.executor import RemoteExecutor
from triolet.actors.executors.remote.ray_workers import RayPlacement, RayWorkers, WorkerHost, placement_of
from triolet.config.address import Address
from triolet.config.engine import EngineConfig

SOON_S = 300.0
ENGINE = Address("127.0.0.1", 7340)


@pytest.mark.parametrize(
    ("num_workers", "num_ranks", "device", "num_gpus", "placement"),
    [
        (1, 1, "auto", 0, RayPlacement(({"CPU": 1},), "STRICT_PACK")),
        (1, 4, "cuda", 0, RayPlacement(({"GPU": 4},), "STRICT_PACK")),
        (3, 1, "cuda", 0, RayPlacement(({"GPU": 1},) * 3, "SPREAD")),
        (3, 2, "cpu", 8, RayPlacement(({"CPU": 2},) * 3, "SPREAD")),
        (2, 2, "auto", 4, RayPlacement(({"GPU": 2},) * 2, "SPREAD")),
        (2, 2, "auto", 3, RayPlacement(({"CPU": 2},) * 2, "SPREAD")),
    ],
)
def test_the_ranks_of_a_replica_are_on_one_machine_and_the_replicas_on_different_ones(
    num_workers: int, num_ranks: int, device: str, num_gpus: float, placement: RayPlacement
) -> None:
    assert placement_of(num_workers, num_ranks, device, num_gpus) == placement


class WatchedFuture(Future[None]):
    """Future that says whether its end is waited for."""

    is_watched = False

    def add_done_callback(self, fn: Callable[[Future[None]], object]) -> None:
        super().add_done_callback(fn)
        self.is_watched = True


@attrs.define(eq=False)
class FakeActor:
    """An actor of Ray's whose work ends when the test says so."""

    strategy: SimpleNamespace
    options: dict[str, Any]
    arguments: tuple[object, ...]
    ended: WatchedFuture = attrs.field(factory=WatchedFuture)

    @property
    def work(self) -> Any:
        return SimpleNamespace(remote=lambda: SimpleNamespace(future=lambda: self.ended))


class FakeRay(ModuleType):
    """A cluster with some GPUs."""

    def __init__(self, num_gpus: int) -> None:
        super().__init__("ray")
        self.num_gpus = num_gpus
        self.groups: list[SimpleNamespace] = []
        self.actors: list[FakeActor] = []
        self.killed: list[FakeActor] = []
        self.removed: list[SimpleNamespace] = []
        self.util = SimpleNamespace(placement_group=self._reserve, remove_placement_group=self.removed.append)
        self.kill = self.killed.append

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 8.0, "GPU": float(self.num_gpus)} if self.num_gpus else {"CPU": 8.0}

    def _reserve(self, bundles: list[dict[str, float]], strategy: str) -> SimpleNamespace:
        self.groups.append(SimpleNamespace(bundles=bundles, strategy=strategy))
        return self.groups[-1]

    def remote(self, kind: type) -> Any:
        assert kind is WorkerHost

        def options(*, scheduling_strategy: SimpleNamespace, **given: Any) -> SimpleNamespace:
            def make(*arguments: object) -> FakeActor:
                self.actors.append(FakeActor(scheduling_strategy, given, arguments))
                return self.actors[-1]

            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=options)


def strategy(group: SimpleNamespace, placement_group_bundle_index: int) -> SimpleNamespace:
    return SimpleNamespace(group=group, bundle=placement_group_bundle_index)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake, strategies = FakeRay(num_gpus=4), ModuleType("ray.util.scheduling_strategies")
    strategies.PlacementGroupSchedulingStrategy = strategy  # type: ignore[attr-defined]
    for name, module in (("ray", fake), ("ray.util.scheduling_strategies", strategies)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "ray.util", ModuleType("ray.util"))
    monkeypatch.setattr(ray_workers, "PAUSE_S", 0.0)
    return fake


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(SOON_S):
        while not condition():  # noqa: ASYNC110 - threads make it true
            await trio.sleep(0.01)


async def until_there_are(ray: FakeRay, number: int) -> None:
    """Wait until so many actors were made and each is known to the engine."""
    await until(lambda: sum(actor.ended.is_watched for actor in ray.actors) >= number)


async def test_each_replica_is_an_actor_in_a_bundle_of_its_own_with_a_device_for_each_rank(
    ray: FakeRay,
) -> None:
    workers = RayWorkers(bool, 2, "auto", num_ranks=2)
    workers.start(ENGINE, "token")
    await until_there_are(ray, 2)
    workers.close()
    [group] = ray.groups
    assert (group.bundles, group.strategy) == ([{"GPU": 2}, {"GPU": 2}], "SPREAD")
    assert sorted(actor.strategy.bundle for actor in ray.actors) == [0, 1]
    for actor in ray.actors:
        assert actor.strategy.group is group
        assert actor.options == {"num_gpus": 2, "max_restarts": 0}
        assert actor.arguments[:3] == (ENGINE.host, ENGINE.port, "token")
    assert len({actor.arguments[3] for actor in ray.actors}) == 2


async def test_an_actor_that_ends_is_followed_by_one_in_its_place_until_the_engine_closes(
    ray: FakeRay,
) -> None:
    workers = RayWorkers(bool, 2, "cpu")
    workers.start(ENGINE, "token")
    await until_there_are(ray, 2)
    dead, other = ray.actors
    dead.ended.set_exception(RuntimeError("its node is gone"))
    await until_there_are(ray, 3)
    assert ray.actors[2].strategy.bundle == dead.strategy.bundle
    workers.close()
    assert {*ray.killed} == {other, ray.actors[2]}
    assert ray.removed == ray.groups
    ray.actors[2].ended.set_result(None)
    await trio.sleep(0.1)
    assert len(ray.actors) == 3


async def test_a_further_worker_is_asked_for_when_it_is_wanted_and_its_place_is_given_back_afterwards(
    ray: FakeRay,
) -> None:
    computing = set[str]()
    workers = RayWorkers(computing.__contains__, 1, "auto", num_ranks=2, may_change=True)
    workers.start(ENGINE, "token")
    await until_there_are(ray, 1)
    workers.want(1)
    await trio.sleep(0.1)
    assert len(ray.actors) == 1
    workers.want(3)
    await until_there_are(ray, 3)
    assert [(group.bundles, group.strategy) for group in ray.groups] == [([{"GPU": 2}], "STRICT_PACK")] * 3
    assert len({id(actor.strategy.group) for actor in ray.actors}) == 3
    computing |= {str(actor.arguments[3]) for actor in ray.actors if actor is not ray.actors[1]}
    workers.want(1)
    await until(lambda: len(ray.removed) == 1)
    [idle] = ray.killed
    assert idle is ray.actors[1]
    assert ray.removed == [idle.strategy.group]
    idle.ended.set_exception(RuntimeError("it was killed"))
    workers.want(1)
    await trio.sleep(0.1)
    assert len(ray.removed) == 1, "both others compute"
    assert len(ray.actors) == 3, "nothing comes after a worker that was given back"
    computing.clear()
    workers.want(1)
    await until(lambda: len(ray.removed) == 2)
    workers.close()
    assert len(ray.removed) == 3
    assert {*map(id, ray.killed)} == {*map(id, ray.actors)}


async def test_a_cluster_that_is_gone_keeps_no_port_of_an_engine_open_and_no_place_that_it_takes_back(
    ray: FakeRay, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(*_: object) -> None:
        raise ConnectionError("planted")

    ray.__spec__ = ModuleSpec("ray", None)
    ray.kill = gone
    config = EngineConfig(
        model="nowhere", tokenizer="nowhere", runner="ray", device="cpu", worker_listen="127.0.0.1:0"
    )
    with open_remote_executors(config, 1, 1) as [executor]:
        assert isinstance(executor, RemoteExecutor)
        port = executor._port
        port.start()
        await until_there_are(ray, 1)
    with trio.fail_after(SOON_S):
        await port.closed.wait()
    assert ray.removed == ray.groups != []
    assert "Ray cannot take back places" in caplog.text and "planted" in caplog.text


async def test_places_that_ray_reserves_while_the_engine_closes_are_given_back(ray: FakeRay) -> None:
    workers = RayWorkers(bool, 2, "cpu")
    is_asked, may_answer = threading.Event(), threading.Event()
    reserve = ray.util.placement_group

    def slowly(*arguments: Any, **named: Any) -> SimpleNamespace:
        is_asked.set()
        assert may_answer.wait(SOON_S)
        group: SimpleNamespace = reserve(*arguments, **named)
        return group

    ray.util.placement_group = slowly
    workers.start(ENGINE, "token")
    await until(is_asked.is_set)
    workers.close()
    may_answer.set()
    await until(lambda: ray.removed == ray.groups != [])
    assert ray.actors == []
