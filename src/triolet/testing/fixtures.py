"""Fixtures of pytest: name this module in `pytest_plugins` of a conftest.py.

Tests under pytest-trio, AnyIO's plugin and pytest-asyncio (in its mode `auto`) get an engine for their event loop.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Generator

import pytest

from triolet.blocking import BlockingEngine
from triolet.engine.engine import Engine
from triolet.testing.engines import SharedModel, open_fake_blocking_engine, open_fake_engine
from triolet.testing.scripted_model import ScriptedModel

MODEL_VARIABLE = "TRIOLET_TEST_MODEL"


@pytest.fixture
def scripted_model() -> ScriptedModel:
    """Model of the fake engines; override this fixture for other answers."""
    return ScriptedModel()


@pytest.fixture
async def fake_engine(scripted_model: ScriptedModel) -> AsyncGenerator[Engine]:
    """Engine whose model is `scripted_model`."""
    async with open_fake_engine(scripted_model) as engine:
        yield engine


@pytest.fixture
def fake_blocking_engine(scripted_model: ScriptedModel) -> Generator[BlockingEngine]:
    """Engine whose model is `scripted_model`, for tests without an event loop."""
    with open_fake_blocking_engine(scripted_model) as engine:
        yield engine


@pytest.fixture(scope="session")
def shared_model() -> Generator[SharedModel]:
    """Model that the variable TRIOLET_TEST_MODEL names, by default triolet-nano; loaded once for all tests."""
    with SharedModel(os.environ.get(MODEL_VARIABLE)) as model:
        yield model


@pytest.fixture
async def triolet_engine(shared_model: SharedModel) -> AsyncGenerator[Engine]:
    """Engine of a test's own over `shared_model`."""
    async with shared_model.open_engine() as engine:
        yield engine


@pytest.fixture
def triolet_blocking_engine(shared_model: SharedModel) -> Generator[BlockingEngine]:
    """Engine of a test's own over `shared_model`, for tests without an event loop."""
    with shared_model.open_blocking_engine() as engine:
        yield engine
