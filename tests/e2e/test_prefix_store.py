"""KV of prefixes outlives the engine: equal answers, no prompt computed twice, and damaged files are misses."""

from __future__ import annotations

import errno
import os
import random
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import trio

import triolet
from tests.model.tiny import make_model
from tests.model.tiny_adapters import LINEAR, every_layer, make_adapter
from tests.scale import one_in
from triolet import Engine, EngineStatistics, LoRARequest, SamplingParams
from triolet.errors import ConfigError
from triolet.model.memory import block_files
from triolet.model.memory.block_files import BlockFiles
from triolet.workers import runner as workers_runner

PROMPT = [(7 * position) % 300 + 1 for position in range(150)]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
FULL = 144  # tokens of the prompt in full blocks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3", tmp_path_factory.mktemp("models") / "tiny")


def open_engine(model: Path, store: Path | None, **fields: Any) -> Any:
    settings: dict[str, Any] = {
        "runner": "inline",
        "dtype": "float32",
        "num_kv_blocks": 64,
        "log_stats": False,
    }
    kept = {} if store is None else {"kv_store": str(store)}
    return triolet.open_engine(model=str(model), **(settings | kept | fields))


async def answer(engine: Engine, prompt: list[int] = PROMPT, **more: Any) -> tuple[int, ...]:
    output = await engine.complete(prompt, PARAMS, **more)
    return tuple(output.outputs[0].token_ids)


async def answered(
    model: Path, store: Path | None, prompt: list[int] = PROMPT, **fields: Any
) -> tuple[tuple[int, ...], EngineStatistics]:
    async with open_engine(model, store, **fields) as engine:
        return await answer(engine, prompt), engine.statistics()


def files_of(store: Path) -> list[Path]:
    return sorted(store.glob("*/*.kv"))


@pytest.mark.parametrize(
    ("runner", "budget"),
    one_in(
        3,
        [
            pytest.param("thread", None, id="thread-whole"),
            pytest.param("inline", None, id="inline-whole"),
            pytest.param("process", None, id="process-whole"),
            pytest.param("inline", 40, id="inline-chunked"),
            pytest.param("thread", 40, id="thread-chunked"),
            pytest.param("process", 40, id="process-chunked"),
        ],
    ),
)
async def test_the_next_engine_reads_the_prefix_that_the_last_one_computed(
    model: Path, tmp_path: Path, runner: str, budget: int | None
) -> None:
    expected, _ = await answered(model, None)
    fields: dict[str, Any] = {"runner": runner, "max_num_batched_tokens": budget}
    first, before = await answered(model, tmp_path / "store", **fields)
    second, after = await answered(model, tmp_path / "store", **fields)
    assert first == second == expected
    assert before.external_prefix_cache_hits == 0
    assert after.external_prefix_cache_hits == FULL  # also of the steps in which nothing else is computed


async def test_two_engines_share_a_store_and_a_longer_prompt_goes_on_from_it(
    model: Path, tmp_path: Path
) -> None:
    longer = [*PROMPT, *range(1, 60)]
    expected, _ = await answered(model, None, longer)
    async with open_engine(model, tmp_path) as one, open_engine(model, tmp_path) as other:
        await answer(one)
        with trio.fail_after(300):
            while len(files_of(tmp_path)) < FULL // 16:  # noqa: ASYNC110  # written by another thread
                await trio.sleep(0.01)
        assert await answer(other, longer) == expected
        assert other.statistics().external_prefix_cache_hits >= FULL - 1


async def test_blocks_that_the_cache_has_evicted_are_in_the_pool(model: Path) -> None:
    prompts = [[seed, *PROMPT] for seed in range(1, 6)]
    async with open_engine(model, None, num_kv_blocks=12, kv_pool_bytes=2**26, max_model_len=192) as engine:
        first = [await answer(engine, prompt) for prompt in prompts]
        assert engine.statistics().external_prefix_cache_hits == 0
        assert [await answer(engine, prompt) for prompt in prompts] == first
        assert engine.statistics().external_prefix_cache_hits >= 4 * (FULL - 1)


async def test_a_pool_takes_no_more_than_its_memory(model: Path) -> None:
    prompts = [[seed, *PROMPT] for seed in range(1, 6)]
    async with open_engine(model, None, num_kv_blocks=12, kv_pool_bytes=1, max_model_len=192) as engine:
        for prompt in prompts * 2:
            await answer(engine, prompt)
        assert engine.statistics().external_prefix_cache_hits == 0


@pytest.mark.slow
async def test_answers_after_a_crash_of_the_model_process_are_the_same(model: Path, tmp_path: Path) -> None:
    expected, _ = await answered(model, None)
    async with open_engine(model, tmp_path, runner="process") as engine:
        assert await answer(engine) == expected
        process_id = engine.model_info.process_id
        assert process_id is not None
        os.kill(process_id, 9)
        assert await answer(engine) == expected


@pytest.mark.slow
async def test_adapters_salts_and_other_models_do_not_read_each_other_s_blocks(
    model: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    adapter = make_adapter(model, tmp_path / "adapter", every_layer(LINEAR), seed=1)
    lora = LoRARequest("mine", 1, str(adapter))
    plain, _ = await answered(model, store)
    async with open_engine(model, store, enable_lora=True) as engine:
        adapted = await answer(engine, lora=lora)
        assert engine.statistics().external_prefix_cache_hits == 0
        await answer(engine, cache_salt="secret")
        assert engine.statistics().external_prefix_cache_hits == 0
        assert await answer(engine) == plain
    async with open_engine(model, store, enable_lora=True) as engine:
        assert await answer(engine, lora=lora) == adapted != plain
        assert engine.statistics().external_prefix_cache_hits >= FULL - 1
    other = make_model("qwen3", tmp_path / "other", seed=5)
    expected, _ = await answered(other, None)
    found, statistics = await answered(other, store)
    assert (found, statistics.external_prefix_cache_hits) == (expected, 0)


async def test_new_weights_do_not_read_what_the_old_ones_computed(model: Path, tmp_path: Path) -> None:
    other = make_model("qwen3", tmp_path / "other", seed=5)
    expected, _ = await answered(other, None)
    async with open_engine(model, tmp_path / "store") as engine:
        assert await answer(engine) != expected
        await engine.reload_weights(str(other))
        assert await answer(engine) == expected
        assert engine.statistics().external_prefix_cache_hits == 0


def damage(path: Path, files: list[Path], dice: random.Random) -> None:
    """Flip bits of a file, cut it, extend it, or let it take the place of another."""
    data = bytearray(path.read_bytes())
    match dice.randrange(4):
        case 0:
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        case 1:
            del data[dice.randrange(len(data)) :]
        case 2:
            data += bytes(dice.randrange(1, 100))
        case _:
            other = dice.choice([file for file in files if file != path])
            data = bytearray(other.read_bytes())
    path.write_bytes(data)


@pytest.mark.parametrize("rounds", [20, pytest.param(1000, marks=pytest.mark.slow)])
async def test_a_damaged_file_is_computed_again_and_never_read(
    model: Path, tmp_path: Path, rounds: int
) -> None:
    expected, _ = await answered(model, tmp_path)
    files = files_of(tmp_path)
    assert len(files) == FULL // 16
    kept = {path: path.read_bytes() for path in files}
    dice = random.Random(0)
    async with open_engine(model, tmp_path) as engine:
        for _ in range(rounds):
            damage(dice.choice(files), files, dice)
            before = engine.statistics().external_prefix_cache_hits
            assert await answer(engine) == expected
            assert engine.statistics().external_prefix_cache_hits - before <= FULL - 16
            assert engine.reset_prefix_cache()  # the next one reads the files again
            # What was damaged is written anew, in the background, by the computation that took its place.
            with trio.fail_after(300):
                while {path: path.read_bytes() for path in files_of(tmp_path)} != kept:  # noqa: ASYNC110 - files
                    await trio.sleep(0.001)


@pytest.mark.slow
async def test_files_make_way_when_they_take_more_than_they_may(model: Path, tmp_path: Path) -> None:
    await answered(model, tmp_path)
    size = files_of(tmp_path)[0].stat().st_size
    bound = 20 * size
    for seed in range(1, 6):
        _, statistics = await answered(model, tmp_path, [seed, *PROMPT], kv_store_bytes=bound)
        assert sum(path.stat().st_size for path in files_of(tmp_path)) <= bound
        assert statistics.num_failed_kv_saves == 0
    # What was used last is there still.
    _, statistics = await answered(model, tmp_path, [5, *PROMPT], kv_store_bytes=bound)
    assert statistics.external_prefix_cache_hits >= FULL - 1


async def test_a_full_disk_costs_one_warning_and_is_counted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    expected, _ = await answered(model, None)
    monkeypatch.setattr("triolet.model.memory.block_files.os.replace", full)
    async with open_engine(model, tmp_path) as engine:
        assert await answer(engine) == expected
        while not engine.statistics().num_failed_kv_saves:
            await answer(engine, [1, 2, 3])
        assert await answer(engine) == expected
    warnings = [record for record in caplog.records if "prefix store cannot be written" in record.message]
    assert len(warnings) == 1
    assert files_of(tmp_path) == []


@pytest.mark.slow
async def test_a_folder_that_cannot_be_used_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for store in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="kv_store must be a folder that can be written"):
            async with open_engine(model, store):
                pass
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(ConfigError, match="kv_store must be a prefix store, whose key has 32 bytes"):
        async with open_engine(model, tmp_path):
            pass
    with pytest.raises(ConfigError, match="kv_store must be left out without enable_prefix_caching"):
        async with open_engine(model, tmp_path / "new", enable_prefix_caching=False):
            pass


@pytest.mark.slow
async def test_files_of_others_are_left_alone(model: Path, tmp_path: Path) -> None:
    await answered(model, tmp_path)
    [folder] = {path.parent for path in files_of(tmp_path)}
    for name in ("notes.txt", "no hex.kv", "key.kv.bak"):
        (folder / name).write_text("mine")
    expected, _ = await answered(model, None)
    found, statistics = await answered(model, tmp_path, kv_store_bytes=2**40)
    assert (found, statistics.external_prefix_cache_hits > 0) == (expected, True)
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.parametrize(
    "runner", ["inline", *(pytest.param(one, marks=pytest.mark.slow) for one in ("thread", "process"))]
)
async def test_after_a_call_that_changes_weights_nothing_is_read_or_written(
    model: Path, tmp_path: Path, runner: str
) -> None:
    await answered(model, tmp_path)
    files = files_of(tmp_path)
    async with open_engine(model, tmp_path, runner=runner) as engine:
        await engine.collective_rpc("check_health")
        await answer(engine)
        hits = engine.statistics().external_prefix_cache_hits
        assert hits >= FULL - 1
        await engine.collective_rpc("check_health", invalidates=True)
        await answer(engine)
        await answer(engine, [1, *PROMPT])
        assert engine.statistics().external_prefix_cache_hits == hits
    assert files_of(tmp_path) == files


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"max_model_len": 256}, {"block_size": 8}, {"dtype": "bfloat16"}])
async def test_files_of_another_configuration_are_not_read(
    model: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    # A longest length decides how a model with two ranges of positions places its tokens.
    await answered(model, tmp_path)
    _, statistics = await answered(model, tmp_path, **fields)
    assert statistics.external_prefix_cache_hits == 0


def test_a_process_that_ends_in_order_waits_for_what_is_being_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Writing:
        num_flushed = 0

        def flush(self) -> None:
            self.num_flushed += 1

    def exit_(status: int) -> None:
        raise SystemExit(status)

    one = Writing()
    monkeypatch.setattr(workers_runner, "_writing", [one])
    monkeypatch.setattr("triolet.workers.runner.os._exit", exit_)
    with pytest.raises(SystemExit):
        workers_runner._leave(1)  # a restart does not wait
    assert one.num_flushed == 0
    with pytest.raises(SystemExit):
        workers_runner._leave(0)
    assert one.num_flushed == 1


def test_a_flush_waits_for_what_is_pending_and_not_for_longer_than_it_may(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path / "model", 2**20)
    keys = [bytes([number] * 16) for number in range(40)]
    for key in keys:
        files.write(key, bytearray(1000), 0)
    files.flush(30.0)
    assert len(files_of(tmp_path)) == len(keys)


@pytest.mark.parametrize("runner", ["inline", pytest.param("process", marks=pytest.mark.slow)])
async def test_a_prompt_that_is_all_an_engine_computes_is_stored(
    model: Path, tmp_path: Path, runner: str
) -> None:
    async with open_engine(model, tmp_path, runner=runner) as engine:
        await engine.complete(PROMPT, SamplingParams(max_tokens=1))
    assert len(files_of(tmp_path)) == FULL // 16


@pytest.mark.slow
async def test_the_end_of_a_prompt_makes_room_before_its_beginning(model: Path, tmp_path: Path) -> None:
    async with open_engine(model, tmp_path) as engine:
        await engine.complete(PROMPT, SamplingParams(max_tokens=1))
    for path in sorted(files_of(tmp_path), key=lambda path: path.stat().st_mtime_ns)[:5]:
        path.unlink()
    _, statistics = await answered(model, tmp_path)
    assert statistics.external_prefix_cache_hits == FULL - 5 * 16


def test_a_store_that_is_let_go_goes_on_writing_and_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    mkstemp = tempfile.mkstemp

    def slow(*args: Any, **kwargs: Any) -> tuple[int, str]:
        assert may_write.wait(30.0)
        return mkstemp(*args, **kwargs)

    monkeypatch.setattr("triolet.model.memory.block_files.tempfile.mkstemp", slow)
    files = BlockFiles(tmp_path / "model", 2**20)
    files.write(bytes(16), bytearray(1000), 0)
    monkeypatch.setattr(block_files, "_CLOSING_S", 0.01)
    del files
    may_write.set()
    block_files._write_the_rest()
    assert len(files_of(tmp_path)) == 1


@pytest.mark.slow
async def test_two_engines_together_stay_within_the_bound(model: Path, tmp_path: Path) -> None:
    await answered(model, tmp_path / "probe")
    bound = 60 * files_of(tmp_path / "probe")[0].stat().st_size
    store = tmp_path / "store"
    async with (
        open_engine(model, store, kv_store_bytes=bound) as one,
        open_engine(model, store, kv_store_bytes=bound) as other,
    ):
        for seed in range(1, 31):
            await answer(one if seed % 2 else other, [seed, *PROMPT])
            # Each may write a twentieth of the bound between two counts.
            assert len(files_of(store)) <= 66


@pytest.mark.slow
async def test_plain_engines_run_no_file_of_the_store(model: Path) -> None:
    names = ("hash_key.py", "prefix_store.py", "block_files.py")
    ran: set[str] = set()

    def called(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            ran.add(Path(frame.f_code.co_filename).name)

    sys.setprofile(called)
    try:
        await answered(model, None)
    finally:
        sys.setprofile(None)
    assert "scheduler.py" in ran
    assert not ran & set(names)
