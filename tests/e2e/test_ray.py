"""Workers that Ray places: a process, an actor or a node ends, and the streams go on with the same tokens.

`make test-ray` installs Ray beside the developers' tools.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

import triolet
from tests.e2e.test_remote_workers import FIELDS, answers_of
from tests.model.tiny import make_model
from triolet.actors.executors import registry
from triolet.config.engine import EngineConfig
from triolet.core.replicas.autoscale import AutoscalePolicy
from triolet.engine import open_engine
from triolet.errors import ConfigError

WAIT_S = 600.0  # on a busy machine a process of Ray takes minutes to start


def test_without_ray_an_engine_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with (
        pytest.raises(
            ConfigError, match=r"runner must be used with the extra ray \(pip install 'triolet\[ray\]'\)"
        ),
        registry.open_executor(EngineConfig(runner="ray")),
    ):
        pytest.fail("it is open")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of three nodes on this machine: one that computes nothing, and two with a core each."""
    if importlib.util.find_spec("ray") is None:
        pytest.fail("Ray must be installed: make test-ray")
    os.environ |= {"RAY_agent_register_timeout_ms": "900000", "RAY_raylet_start_wait_time_s": "900"}
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        made.add_node(num_cpus=1)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


ACTOR = b"ray::WorkerHost"


def command_of(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def actors() -> list[int]:
    """Return the numbers of the processes of Ray's actors, without zombies."""
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [number for number in numbers if command_of(number).startswith(ACTOR)]


def workers() -> list[int]:
    """Return the numbers of the processes that the actors have started, without zombies."""
    found: list[int] = []
    for actor in actors():
        for children in Path(f"/proc/{actor}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, children.read_text().split())
    return [number for number in found if b"triolet.workers.runner" in command_of(number)]


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(WAIT_S):
        while not condition():  # noqa: ASYNC110 - Ray does it
            await trio.sleep(0.2)


@pytest.mark.ray
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("default")
async def test_streams_go_on_when_a_process_an_actor_or_a_node_ends(cluster: Any, tmp_path: Path) -> None:
    folder = str(make_model("llama", tmp_path / "llama", with_tokenizer=True))
    async with triolet.open_engine(folder, **FIELDS) as engine:
        expected = await answers_of(engine)

    async def broken_by(end: Callable[[], Awaitable[None]]) -> None:
        """Read all streams again and again while something ends."""
        is_over = False

        async def read() -> None:
            while not is_over:
                assert await answers_of(engine) == expected

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await until(lambda: engine.statistics().num_requests_running > 0)
            await end()
            is_over = True

    async def kill(process: int) -> None:
        os.kill(process, signal.SIGKILL)
        await trio.lowlevel.checkpoint()

    async def remove_node() -> None:
        await trio.to_thread.run_sync(cluster.remove_node, cluster.list_all_nodes()[-1])

    async with triolet.open_engine(
        folder, runner="ray", worker_listen="127.0.0.1:0", replicas=2, **FIELDS
    ) as engine:
        assert await answers_of(engine) == expected
        assert len(workers()) == 2
        await broken_by(lambda: kill(workers()[0]))
        await until(lambda: len(workers()) == 2)
        await broken_by(lambda: kill(actors()[0]))
        await until(lambda: len(workers()) == 2)
        await broken_by(remove_node)
        assert len(workers()) == 1
        assert await answers_of(engine) == expected
    await until(lambda: not workers())


@pytest.mark.ray
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("default")
async def test_a_node_that_joins_is_used_while_requests_wait_and_given_back_afterwards(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_engine, "AutoscalePolicy", partial(AutoscalePolicy, grow_s=0.5, shrink_s=3.0))
    folder = str(make_model("llama", tmp_path / "llama", with_tokenizer=True))
    async with triolet.open_engine(folder, **FIELDS) as engine:
        expected = await answers_of(engine)
    async with triolet.open_engine(
        folder,
        runner="ray",
        worker_listen="127.0.0.1:0",
        autoscale=(1, 2),
        **{**FIELDS, "max_num_seqs": 2},
    ) as engine:
        is_over = False

        async def read() -> None:
            while not is_over:
                assert await answers_of(engine) == expected

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await until(lambda: engine.statistics().num_requests_waiting > 0)
            assert len(workers()) == 1
            cluster.add_node(num_cpus=1)  # which only the main thread can do
            await until(lambda: engine.statistics().replicas[1].steps > 0)
            assert len(workers()) == 2
            is_over = True
        await until(lambda: len(actors()) == 1)
        assert await answers_of(engine) == expected
        assert engine.statistics().num_restarts == 0
    await until(lambda: not workers())


@pytest.mark.ray
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("default")
async def test_the_ranks_of_a_tensor_parallel_group_are_placed_on_one_node(
    cluster: Any, tmp_path: Path
) -> None:
    cluster.add_node(num_cpus=2)  # the others have too few cores for both
    folder = str(make_model("llama", tmp_path / "llama", with_tokenizer=True))
    async with triolet.open_engine(folder, **FIELDS) as engine:
        expected = await answers_of(engine)
    async with triolet.open_engine(
        folder, runner="ray", worker_listen="127.0.0.1:0", tensor_parallel_size=2, **FIELDS
    ) as engine:
        assert await answers_of(engine) == expected
        assert len(actors()) == 1
