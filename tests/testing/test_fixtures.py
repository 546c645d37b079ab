"""The fixtures of `triolet.testing` serve the tests of a foreign project, which are run here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = 'pytest_plugins = ["triolet.testing.fixtures"]\n'
TESTS = """
import anyio, pytest
from triolet import SamplingParams
from triolet.testing import ScriptedModel

FOUR = SamplingParams(max_tokens=4)

@pytest.fixture
def scripted_model():
    return ScriptedModel(lambda prompt: prompt.upper())

@pytest.mark.trio
async def test_trio(fake_engine):
    assert (await fake_engine.complete("shout")).text == "SHOUT"

@pytest.fixture(params=["trio", "asyncio"])
def anyio_backend(request):
    return request.param

@pytest.mark.anyio
async def test_anyio(fake_engine, scripted_model):
    assert (await fake_engine.complete("shout")).text == "SHOUT"
    assert scripted_model.prompts == ["shout"]

@pytest.mark.anyio
@pytest.mark.parametrize("round", [1, 2])
async def test_real_weights(triolet_engine, shared_model, round):
    assert len((await triolet_engine.complete("Once upon", FOUR)).outputs[0].token_ids) == 4

def test_blocking(fake_blocking_engine, triolet_blocking_engine):
    assert fake_blocking_engine.complete("shout").text == "SHOUT"
    assert len(triolet_blocking_engine.complete("Once upon", FOUR).outputs[0].token_ids) == 4
"""


@pytest.mark.slow
def test_a_foreign_project_has_engines_for_its_event_loop_by_naming_one_module(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_program.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        str(tmp_path),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "8 passed" in ran.stdout, ran.stdout + ran.stderr
