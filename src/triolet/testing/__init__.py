"""Engines for the tests of programs that embed triolet: scripted answers, planted faults, weights loaded once.

    async def test_a_story_is_shown():
        async with triolet.testing.open_fake_engine("Once upon a time.") as engine:
            assert await my_program.story(engine) == "Once upon a time."

A fake engine is the real one but for the model: requests are queued, scheduled, streamed, cancelled and recovered by
the actors of production, and only the tokens come from a `ScriptedModel`. It opens in milliseconds and needs no torch.
A `SharedModel` is the other half: real weights that are loaded once, with an engine of its own for each test.

`triolet.testing.fixtures` has both as pytest fixtures: `pytest_plugins = ["triolet.testing.fixtures"]` in conftest.py.
"""

from __future__ import annotations

from triolet.testing.engines import SharedModel, open_fake_blocking_engine, open_fake_engine
from triolet.testing.scripted_model import Answers, ScriptedModel

__all__ = ["Answers", "ScriptedModel", "SharedModel", "open_fake_blocking_engine", "open_fake_engine"]
