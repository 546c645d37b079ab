"""Which engines of a fleet get requests, by what they tell of their health and their models."""

from __future__ import annotations

import logging

import pytest
import trio
import trio.testing

from tests.router.fake_fleet import FakeEngine, error_answer, open_fleet


async def test_an_engine_that_was_started_with_another_model_comes_up_when_it_serves_that_of_the_fleet(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: trio.testing.MockClock,
) -> None:
    right, wrong = FakeEngine(), FakeEngine(is_there=False, models=("other",))
    async with open_fleet(monkeypatch, right, wrong) as fleet:
        wrong.is_there = True
        await trio.sleep(10)
        assert fleet.states() == ["up", "down"]
        sentences = [one.message for one in caplog.records if one.levelno == logging.WARNING]
        assert sentences == ["engine http://engine:2/v1 serves other, the fleet serves m: it gets nothing"]
        wrong.models = ("m",)
        await trio.sleep(3)
        assert fleet.states() == ["up", "up"]


@pytest.mark.parametrize("away_s", [0.8, 10])
async def test_an_engine_that_comes_back_with_another_model_gets_nothing(
    away_s: float, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    engines = FakeEngine(), FakeEngine()
    async with open_fleet(monkeypatch, *engines) as fleet:
        await trio.sleep(0.5)
        engines[0].is_there = False
        await trio.sleep(away_s)
        engines[0].models, engines[0].is_there = ("other",), True
        await trio.sleep(2)
        assert fleet.states() == ["down", "up"]


async def test_an_engine_that_broke_a_connection_is_asked_for_its_models_before_it_gets_requests_again(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_fleet(monkeypatch, FakeEngine(), restarted := FakeEngine()) as fleet:
        await trio.sleep(0.5)
        restarted.models = ("other",)
        fleet.router.engines.note_lost(fleet.router.engines.all[1])
        await trio.sleep(5)
        assert (fleet.states(), restarted.num_asked("/v1/models") > 1) == (["up", "down"], True)


async def test_models_are_not_asked_for_again_while_an_engine_is_up(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_fleet(monkeypatch, engine := FakeEngine()):
        await trio.sleep(20)
        assert engine.num_asked("/health/ready") > 15
        assert engine.num_asked("/v1/models") == 1


async def test_a_router_without_a_key_asks_engines_with_keys_for_models_once_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_fleet(monkeypatch, engine := FakeEngine(key="secret")) as fleet:
        await trio.sleep(20)
        assert fleet.states() == ["up"]
        assert engine.num_asked("/v1/models") == 1
        assert caplog.text.count("keeps its models from a router without a valid key") == 1
        engine.is_there = False
        await trio.sleep(5)
        engine.is_there = True
        await trio.sleep(5)
        assert engine.num_asked("/v1/models") == 2


async def test_a_server_that_lists_no_models_is_down_and_the_router_goes_on(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_fleet(monkeypatch, FakeEngine(listing=b"[1]"), FakeEngine()) as fleet:
        await trio.sleep(5)
        assert fleet.states() == ["down", "up"]


async def test_an_engine_that_sleeps_keeps_its_models(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_fleet(monkeypatch, engine := FakeEngine()) as fleet:
        awake, engine.health = engine.health, error_answer(503, "sleeping")
        await trio.sleep(3)
        assert fleet.states() == ["draining"]
        engine.health = awake
        await trio.sleep(3)
        assert (fleet.states(), engine.num_asked("/v1/models")) == (["up"], 1)
