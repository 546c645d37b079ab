"""A closed engine keeps nothing: the next one may need the memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

import triolet
from tests.model.tiny import make_model
from triolet import SamplingParams
from triolet.model.runner import ModelRunner


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("runner", ["thread", "inline"])
async def test_a_closed_engine_gives_its_models_memory_back_without_a_collection(
    runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_collection: None
) -> None:
    runners: list[weakref.ref[ModelRunner]] = []
    make = ModelRunner.__init__

    def remember(self: ModelRunner, *arguments: object, **fields: object) -> None:
        runners.append(weakref.ref(self))
        make(self, *arguments, **fields)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRunner, "__init__", remember)
    folder = make_model("llama", tmp_path)
    async with triolet.open_engine(model=str(folder), runner=runner, num_kv_blocks=8) as engine:
        await engine.complete([1, 2, 3], SamplingParams(max_tokens=3))
        assert [model() is not None for model in runners] == [True]
    assert [model() for model in runners] == [None]
