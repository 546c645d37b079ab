"""A model computed by two processes: its answers are those of one, also when one of the two is killed."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

import triolet
from tests.model.tiny import make_model
from tests.scale import num_cases
from triolet import Engine, EngineConfig, RequestOutputKind, SamplingParams
from triolet.errors import ConfigError, UnknownWorkerMethod

NUM_STREAMS, NUM_TOKENS = 6, 48
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")


def params_of(index: int, num_tokens: int = NUM_TOKENS) -> SamplingParams:
    """Half of them greedy, half with a seed; some need the logits of the whole vocabulary."""
    return SamplingParams(
        temperature=0.9 if index % 2 else 0.0,
        top_p=0.8 if index % 4 == 3 else 1.0,
        seed=index,
        max_tokens=num_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )


def prompt_of(index: int) -> list[int]:
    """Prompts of one to 36 tokens; every third one begins like the one before."""
    return [3, *range(5, 5 + 7 * (index % 6))] if index % 3 else [index + 1] * (7 * (index % 6) + 1)


def ranks_here() -> dict[int, int]:
    """Return a process id for each rank that computes for this process; zombies are left out."""
    found = _processes_of_ranks()
    servers = {
        process_id
        for process_id, (parent, words) in found.items()
        if parent == os.getpid() and words[-1] == b"fork"
    }
    return {
        int(words[words.index(b"triolet.workers.rank") + 1]): process_id
        for process_id, (_, words) in found.items()
        if process_id not in servers
    }


def assert_no_rank_is_left() -> None:
    """Check that neither a rank nor the fork server of one is there."""
    assert _processes_of_ranks() == {}


def _processes_of_ranks() -> dict[int, tuple[int, list[bytes]]]:
    """Return (parent, words of the command) of each process of a rank below this one, by its id."""
    found: dict[int, tuple[int, list[bytes]]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if b"triolet.workers.rank" in words:
            found[int(entry.name)] = parent, words
    return {
        process_id: (parent, words)
        for process_id, (parent, words) in found.items()
        if parent == os.getpid() or (parent in found and found[parent][0] == os.getpid())
    }


async def answers_of(
    engine: Engine,
    kill: tuple[int, int] | None = None,
    num_streams: int = NUM_STREAMS,
    num_tokens: int = NUM_TOKENS,
) -> dict[int, list[int]]:
    """Read all streams at once; send a signal to a rank, (rank, signal), after some tokens."""
    answers: dict[int, list[int]] = {}
    to_kill = [] if kill is None else [((await processes_of(engine))[kill[0]], kill[1])]

    async def read(index: int) -> None:
        answers[index] = []
        async with engine.generate(prompt_of(index), params_of(index, num_tokens)) as stream:
            async for output in stream:
                answers[index] += output.outputs[0].token_ids
                if to_kill and sum(map(len, answers.values())) > 60:
                    os.kill(*to_kill.pop())

    async with trio.open_nursery() as nursery:
        for index in range(num_streams):
            nursery.start_soon(read, index)
    return answers


def rank_of(model: Any) -> int:
    """Return the rank of a worker."""
    return int(model.group.part.rank)


def process_of(model: Any) -> int:
    """Return the process id of a worker."""
    return os.getpid()


async def processes_of(engine: Engine) -> list[int]:
    """Return the process ids of the ranks that compute the model: a standby process of a rank has its command, too."""
    found = await engine.apply_model(f"{__name__}:process_of")
    assert isinstance(found, list)
    return found


def config_of(folder: Path, size: int) -> EngineConfig:
    return EngineConfig(
        model=str(folder), device="cpu", dtype="float32", max_model_len=160, max_num_seqs=4, tensor_parallel_size=size,
        max_num_batched_tokens=24, num_kv_blocks=40,
    )  # fmt: skip


@pytest.mark.slow
async def test_two_ranks_answer_as_one_and_the_death_of_either_shows_in_no_answer(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "llama", with_tokenizer=True)
    async with triolet.open_engine(config_of(folder, 1)) as engine:
        expected = await answers_of(engine)
    async with triolet.open_engine(config_of(folder, 2)) as engine:
        assert sorted(ranks_here()) == [0, 1]
        assert await answers_of(engine) == expected
        for rank in (0, 1):
            before = engine.statistics().num_restarts
            assert await answers_of(engine, (rank, signal.SIGKILL)) == expected
            with trio.fail_after(
                300
            ):  # the answers may have been complete in the engine when their reader killed
                while engine.statistics().num_restarts == before:  # noqa: ASYNC110 - it tells of no change
                    await trio.sleep(0.01)
    assert_no_rank_is_left()


@pytest.mark.slow
async def test_calls_reach_every_rank_and_sleep_and_new_weights_are_those_of_all(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "llama", with_tokenizer=True)
    other = make_model("llama", tmp_path / "other", with_tokenizer=True, seed=9)
    expected = []
    for each in (folder, other):
        async with triolet.open_engine(config_of(each, 1)) as engine:
            expected.append(await answers_of(engine))
    assert expected[0] != expected[1]
    async with triolet.open_engine(config_of(folder, 2)) as engine:
        assert await engine.apply_model(f"{__name__}:rank_of") == [0, 1]
        with pytest.raises(UnknownWorkerMethod):
            await engine.collective_rpc("no_such_method")
        await engine.sleep()
        assert_no_rank_is_left()
        await engine.wake_up()
        assert await answers_of(engine) == expected[0]
        await engine.reload_weights(str(other))
        assert await answers_of(engine) == expected[1]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
async def test_families_answer_as_one_rank_chunked_preempted_and_with_cached_prefixes(
    tmp_path: Path, family: str
) -> None:
    folder = make_model(family, tmp_path / family, with_tokenizer=True)
    answers: list[dict[int, list[int]]] = []
    for size in (1, 2):
        # So few that also eight windows do not fit.
        config = attrs.evolve(config_of(folder, size), max_num_seqs=8, num_kv_blocks=14)
        async with triolet.open_engine(config) as engine:
            answers.append(await answers_of(engine, num_streams=24, num_tokens=96))
            statistics = engine.statistics()
            assert statistics.num_preemptions > 0, "there are fewer blocks than eight streams need"
            assert statistics.prefix_cache_hits > 0
    assert answers[0] == answers[1]


@pytest.mark.slow
async def test_kills_and_stops_of_ranks_at_any_time_change_no_answer_and_leave_no_process(
    tmp_path: Path,
) -> None:
    folder = make_model("llama", tmp_path / "llama", with_tokenizer=True)
    async with triolet.open_engine(config_of(folder, 1)) as engine:
        expected = await answers_of(engine)
    draw = random.Random(3)
    async with triolet.open_engine(config_of(folder, 2), step_timeout=5.0) as engine:
        for _ in range(num_cases(50)):
            number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
            assert await answers_of(engine, (draw.randrange(2), number)) == expected
            await trio.sleep(4.0)  # an engine that crashes more than five times in 30 s gives up
        assert sorted(ranks_here()) == [0, 1]
    assert_no_rank_is_left()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}, "3 attention heads"),
        ({"intermediate_size": 81}, "intermediate size, 81"),
        ({"vocab_size": 301}, "vocabulary, 301"),
    ],
)
async def test_a_size_that_does_not_divide_the_model_is_refused_by_name(
    tmp_path: Path, overrides: dict[str, Any], rule: str
) -> None:
    folder = make_model("llama", tmp_path / "llama", **overrides)
    with pytest.raises(ConfigError, match=rule) as caught:
        async with triolet.open_engine(config_of(folder, 2), runner="process"):
            pass
    assert caught.value.field == "tensor_parallel_size"
