"""New weights in engines with real ones: what they answer is what a fresh engine on these weights answers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import triolet
from triolet import SamplingParams
from triolet.errors import WeightsMismatch
from triolet.nano import PATH

PROMPT = [100, 200, 300, 400, 500]
FIELDS = {"dtype": "float32", "num_kv_blocks": 64}
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
CHANGED = "model.layers.0.mlp.down_proj.weight"


def other_weights(folder: Path) -> torch.Tensor:
    """Make a folder of triolet-nano with one tensor changed; return that."""
    shutil.copytree(PATH, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[CHANGED] = -tensors[CHANGED]
    save_file(tensors, folder / "model.safetensors")
    return tensors[CHANGED]


async def answer(engine: triolet.Engine) -> tuple[int, ...]:
    [completion] = (await engine.complete(PROMPT, PARAMS)).outputs
    assert completion.weight_version == engine.weight_version
    return tuple(completion.token_ids)


@pytest.mark.parametrize("runner", ["thread", pytest.param("process", marks=pytest.mark.slow)])
async def test_new_weights_answer_as_a_fresh_engine_on_them(runner: str, tmp_path: Path) -> None:
    other, short = tmp_path / "other", tmp_path / "short"
    changed = other_weights(other)
    shutil.copytree(PATH, short)
    tensors = load_file(short / "model.safetensors")
    del tensors[CHANGED]
    save_file(tensors, short / "model.safetensors")
    async with triolet.open_engine(str(other), **FIELDS) as fresh:  # type: ignore[arg-type]
        expected = await answer(fresh)
    async with triolet.open_engine(runner=runner, **FIELDS) as engine:  # type: ignore[arg-type]
        first = await answer(engine)
        assert first != expected
        with pytest.raises(WeightsMismatch, match=CHANGED):
            await engine.reload_weights(str(short))
        with pytest.raises(WeightsMismatch, match=CHANGED):
            await engine.update_weights({CHANGED: changed.float()})
        assert await answer(engine) == first
        async with engine.generate(PROMPT, PARAMS) as stream:
            await stream.__anext__()
            assert await engine.reload_weights(str(other)) == 1
            async for output in stream:
                tokens = output.outputs[0].token_ids
        assert len(tokens) == 24
        assert await answer(engine) == expected
        assert await engine.update_weights({CHANGED: -changed}) == 2
        former = Path(engine.weights_folder)
        assert await answer(engine) == first
        assert await engine.update_weights([(CHANGED, changed)]) == 3
        assert await answer(engine) == expected
        assert engine.statistics().num_restarts == 0
        latest = Path(engine.weights_folder)
        assert latest.parent == former.parent
        assert os.listdir(latest.parent) == [latest.name]
    assert latest.parent.name not in os.listdir(latest.parent.parent)
