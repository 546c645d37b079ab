"""Health and metrics of an engine with several replicas tell of each of them."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from tests.actors.harness import STEP_S
from tests.actors.test_replicas import LOAD_S, MortalExecutor, ask, killed, prompt_of, replicated_engine
from tests.server.routes.harness import Scene
from triolet.server.routes.app import create_app


async def test_health_and_metrics_tell_of_each_replica(autojump_clock: MockClock) -> None:
    executors = [MortalExecutor(), MortalExecutor()]
    async with replicated_engine(executors) as engine, trio.open_nursery() as nursery:
        scene = Scene(engine, create_app(engine), None)
        assert [each["status"] for each in (await scene.get("/health")).json["replicas"]] == ["ok", "ok"]
        for number in range(2):
            nursery.start_soon(ask, engine, number, prompt_of(number), 40)
        await trio.sleep(5.5 * STEP_S)
        executors[0].death = killed()
        await trio.sleep(2 * STEP_S)
        health = (await scene.get("/health")).json
        assert (health["status"], health["restarting"]) == ("restarting", ["model_runner.0", "scheduler.0"])
        assert [each["status"] for each in health["replicas"]] == ["restarting", "ok"]
        assert [each["running"] for each in health["replicas"]] == [0, 2]
        assert (await scene.get("/health/ready")).status == 200, "the other one computes new requests"
        executors[1].death = killed()
        await trio.sleep(2 * STEP_S)
        assert (await scene.get("/health/ready")).error[:2] == (503, "restarting")
        await trio.sleep(2 * LOAD_S)
        assert (await scene.get("/health")).json["status"] == "ok"
        metrics = (await scene.get("/metrics")).body.decode()
    lines = [
        line for line in metrics.splitlines() if line.startswith(("triolet:replica_up", "triolet:moved"))
    ]
    # the first one moved to replica 1, and the second to replica 0; in two steps that were killed, the first one waits
    assert [line.rpartition(" ")[2] for line in lines if "_created" not in line] == ["2.0", "1.0", "1.0"]
    assert 'replica="1"} 1.0' in metrics
