"""Sleep of engines with real models: the memory is free, and the answers are those of engines that never slept."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel

import triolet
from tests.model.tiny import make_model
from triolet import SamplingParams

NUM_STREAMS = 8
NUM_TOKENS = 12
LAYERS, HIDDEN, BLOCKS, BLOCK_SIZE = 5, 1024, 32, 16
PATIENCE_S = 30  # for memory that is given back late; what is asserted is bytes
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


def resident_bytes() -> int:
    """Of this process and of all that descend from it."""
    parents, pages = dict[int, int](), dict[int, int]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            pages[int(folder.name)] = int((folder / "statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    family = {os.getpid()}
    while grown := {child for child, parent in parents.items() if parent in family} - family:
        family |= grown
    return sum(pages[one] for one in family) * os.sysconf("SC_PAGE_SIZE")


async def until(holds: Callable[[], bool]) -> None:
    with trio.move_on_after(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - the system tells of no event
            await trio.sleep(0.05)


async def read(engine: triolet.Engine, number: int, answers: dict[int, tuple[int, ...]]) -> None:
    prompt = [100 + number, *range(number, number + 20)]
    answers[number] = tuple((await engine.complete(prompt, PARAMS)).outputs[0].token_ids)


async def read_all(engine: triolet.Engine) -> dict[int, tuple[int, ...]]:
    answers = dict[int, tuple[int, ...]]()
    async with trio.open_nursery() as nursery:
        for number in range(NUM_STREAMS):
            nursery.start_soon(read, engine, number, answers)
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["process", "thread"])
async def test_a_sleep_gives_back_nine_tenths_of_weights_and_kv(runner: str, tmp_path: Path) -> None:
    folder = make_model(
        "llama",
        tmp_path / "model",
        hidden_size=HIDDEN,
        intermediate_size=2816,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=64,
    )
    weights = (folder / "model.safetensors").stat().st_size
    kv = BLOCKS * BLOCK_SIZE * LAYERS * 2 * HIDDEN * 4
    assert weights > 200_000_000
    fields: dict[str, Any] = {"runner": runner, "dtype": "float32", "num_kv_blocks": BLOCKS}
    async with triolet.open_engine(str(folder), block_size=BLOCK_SIZE, **fields) as engine:
        before = await read_all(engine)
        awake = resident_bytes()
        await engine.sleep(1)
        await until(lambda: awake - resident_bytes() >= 0.9 * (weights + kv))
        assert awake - resident_bytes() >= 0.9 * (weights + kv)
        await engine.sleep(1)  # again
        assert await engine.wake_up()
        assert await read_all(engine) == before
        assert engine.statistics().num_restarts == 0


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["process", "thread"])
async def test_eight_streams_that_are_kept_have_the_same_tokens_after_a_sleep_at_any_step(
    runner: str,
) -> None:
    async with triolet.open_engine(runner=runner, dtype="float32", num_kv_blocks=128) as engine:
        undisturbed = await read_all(engine)
        for step in range(NUM_TOKENS):
            answers = dict[int, tuple[int, ...]]()
            done = engine.statistics().steps
            async with trio.open_nursery() as nursery:
                for number in range(NUM_STREAMS):
                    nursery.start_soon(read, engine, number, answers)
                while engine.statistics().steps <= done + step and len(answers) < NUM_STREAMS:
                    await trio.lowlevel.checkpoint()
                await engine.sleep(1, "keep")
                assert engine.is_sleeping and engine.statistics().kv_blocks_in_use == 0
                assert await engine.wake_up()
            assert answers == undisturbed, f"in step {step}"
        assert engine.statistics().num_restarts == 0
