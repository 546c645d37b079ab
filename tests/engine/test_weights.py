"""An exchange of weights: no stream is lost, no token is of another version than the one that its output names."""

from __future__ import annotations

import errno
import itertools
import shutil
import tempfile
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.actors.harness import (
    STEP_S,
    VOCAB,
    FakeExecutor,
    assert_all_blocks_back,
    fake_engine,
    weights_of,
)
from tests.core.fake_model import WEIGHTS, next_token
from triolet import SamplingParams
from triolet.core.load_progress import OnProgress
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.params import RequestOutputKind
from triolet.engine import weights
from triolet.engine.engine import Engine
from triolet.errors import EngineClosed, InvalidRequest, ModelFileError, RunnerDied

NUM_TOKENS = 24

Versions = dict[int, list[tuple[int, int]]]
"""By client, each token with the version that its output names."""


class Weighed(FakeExecutor):
    """A fake executor whose loads take some time, and fail where that is planted."""

    def __init__(self) -> None:
        super().__init__(64, 4)
        self.faults: list[Exception] = []

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        await trio.sleep(3 * STEP_S)
        if self.faults and weights_of(self.folder):
            raise self.faults.pop(0)
        return await super().start(on_progress)


@pytest.fixture(autouse=True)
def _any_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """No files are looked at: the fake model's weights are the number at the end of the name of a folder."""
    monkeypatch.setattr(weights, "check_folder", lambda current, new: None)


async def read_all(engine: Engine, versions: Versions, number: int) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=number, output_kind=RequestOutputKind.DELTA)
    versions[number] = []
    async with engine.generate([number + 1, 2, 3, 4, 5], params) as stream:
        async for output in stream:
            [answer] = output.outputs
            versions[number] += [(token_id, answer.weight_version) for token_id in answer.token_ids]


def assert_right(versions: Versions) -> None:
    """Every token is what the weights of the version that it bears say after the tokens before it."""
    for number, answer in versions.items():
        tokens = [number + 1, 2, 3, 4, 5]
        for token_id, version in answer:
            seen = [one + WEIGHTS * version for one in tokens]
            assert token_id == next_token(seen, number, VOCAB), f"token {len(tokens)} of client {number}"
            tokens.append(token_id)
        assert len(answer) == NUM_TOKENS
        assert [version for _, version in answer] == sorted(version for _, version in answer)


async def test_kept_streams_go_on_with_the_new_weights_also_through_crashes(
    autojump_clock: MockClock,
) -> None:
    executor, versions = Weighed(), Versions()

    def crash(plan: object) -> None:
        executor.before_step = lambda plan: None
        raise RunnerDied("killed", -9)

    async with fake_engine(executor, num_scheduler_steps=4) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(read_all, engine, versions, number)
            for version in range(1, 8):
                await trio.sleep(4.5 * STEP_S)
                if version % 3 == 0:
                    executor.before_step = crash  # in the step in flight when the exchange is asked for
                if version % 3 == 1:
                    executor.faults = [RunnerDied("killed", -9)]  # in the load of the new weights
                assert await engine.reload_weights(f"/new-{version}") == engine.weight_version == version
                engine.check_health()
                assert engine.weights_folder == f"/new-{version}"
        assert_right(versions)
        assert {version for answer in versions.values() for _, version in answer} >= {0, 1, 2, 3}
        assert_all_blocks_back(engine)
        # Only crashes count as restarts: an exchange is none.
        assert engine.statistics().num_restarts == 5
        executor.before_step = crash
        [first] = (await engine.complete([1], SamplingParams(max_tokens=1, seed=0))).outputs
        assert (first.weight_version, first.token_ids) == (7, (next_token([1 + 7 * WEIGHTS], 0, VOCAB),))


@asynccontextmanager
async def three_streams_half_read(engine: Engine, versions: Versions) -> AsyncGenerator[None]:
    """Three requests are in the middle of their answers; at the end of the scope they are read to their ends."""
    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(read_all, engine, versions, number)
        await trio.sleep(6.5 * STEP_S)
        yield


async def test_a_refused_load_leaves_the_old_weights_serving(autojump_clock: MockClock) -> None:
    executor, versions = Weighed(), Versions()
    async with fake_engine(executor) as engine:
        async with three_streams_half_read(engine, versions):
            for faults in ([ModelFileError("/new-9", "is gone")], [RunnerDied("dead", -9)] * 2):
                executor.faults = list(faults)
                with pytest.raises(type(faults[0])):
                    await engine.reload_weights("/new-9")
                assert (engine.weight_version, engine.weights_folder) == (0, "/nowhere")
        assert_right(versions)
        assert engine.statistics().num_restarts == 1  # of the first death; the refusals are none
        assert_all_blocks_back(engine)


async def test_an_update_for_which_no_folder_can_be_made_fails_alone(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/weights")

    monkeypatch.setattr(tempfile, "mkdtemp", fail)
    executor, versions = Weighed(), Versions()
    async with fake_engine(executor) as engine:
        async with three_streams_half_read(engine, versions):
            with pytest.raises(ModelFileError, match="cannot be written: No space left on device"):
                await engine.update_weights({"a": 1})
        assert_right(versions)
        assert (executor.num_lives, engine.weight_version) == (1, 0)


async def test_the_folders_of_updates_are_deleted_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of the first update, and that of all of them when the engine ends."""
    deleted: list[tuple[str, bool]] = []

    def delete(folder: Path, *, ignore_errors: bool) -> None:
        deleted.append((folder.name, threading.current_thread() is threading.main_thread()))
        shutil.rmtree(folder, ignore_errors=ignore_errors)

    monkeypatch.setattr(weights, "shutil", SimpleNamespace(rmtree=delete))
    monkeypatch.setattr(weights, "write_update", lambda current, new, updates: new.mkdir())
    async with fake_engine(Weighed(), runner="thread") as engine:
        engine._update_numbers = iter(("new-1", "new-2"))  # type: ignore[assignment]
        for version in (1, 2):
            assert await engine.update_weights({"a": version}) == version
        updates = Path(engine.weights_folder).parent
        assert [path.name for path in updates.iterdir()] == ["new-2"]
    assert deleted == [("new-1", False), (updates.name, False)]
    assert not updates.exists()


async def test_updates_of_a_sleeping_engine_leave_only_the_folders_that_are_in_use(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "write_update", lambda current, new, updates: new.mkdir())
    async with fake_engine(Weighed()) as engine:
        engine._update_numbers = (f"new-{number}" for number in itertools.count(1))  # type: ignore[assignment]
        assert await engine.update_weights({"a": 1}) == 1
        updates = Path(engine.weights_folder).parent
        await engine.sleep(2)
        for _ in range(3):
            await engine.update_weights({"a": 1})
            names = {path.name for path in updates.iterdir()}
            assert len(names) == 2 and "new-1" in names
        await engine.wake_up()
        assert engine.weights_folder == str(updates / "new-4")
        assert await engine.update_weights({"a": 1}) == 3
        assert [path.name for path in updates.iterdir()] == ["new-5"]


async def test_weights_that_do_not_fit_change_nothing(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(current: Path, new: Path) -> None:
        raise ModelFileError(new, "is truncated")

    monkeypatch.setattr(weights, "check_folder", refuse)
    executor = Weighed()
    async with fake_engine(executor) as engine:
        with pytest.raises(ModelFileError, match="truncated"):
            await engine.reload_weights("/new-1")
        for path, mode in ((1, "keep"), ("/new-1", "later")):
            with pytest.raises(InvalidRequest):
                await engine.reload_weights(path, mode=mode)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="tensors"):
            await engine.update_weights({})
        assert (executor.num_lives, engine.weight_version) == (1, 0)


async def test_the_live_ones_finish_with_the_old_weights_or_end_if_that_is_asked(
    autojump_clock: MockClock,
) -> None:
    executor, versions = Weighed(), Versions()
    async with fake_engine(executor) as engine, trio.open_nursery() as nursery:
        for number in range(2):
            nursery.start_soon(read_all, engine, versions, number)
        await trio.sleep(2.5 * STEP_S)
        nursery.start_soon(read_all, engine, versions, 2)
        nursery.start_soon(engine.reload_weights, "/new-1")
        with trio.move_on_after(STEP_S) as scope:  # behind the other one
            await engine.reload_weights("/new-2", mode="wait")
        assert scope.cancelled_caught
        await trio.sleep(10 * STEP_S)
        await engine.reload_weights("/new-2", mode="wait")
        await wait_all_tasks_blocked()
        assert_right(versions)
        assert {answer[-1][1] for answer in versions.values()} == {1}

        def crash(plan: object) -> None:
            executor.before_step = lambda plan: None
            raise RunnerDied("killed", -9)

        nursery.start_soon(read_all, engine, versions, 3)
        await trio.sleep(4.5 * STEP_S)
        nursery.start_soon(partial_reload, engine)
        await trio.sleep(STEP_S)
        executor.before_step = crash  # the runner starts again, for those that finish with the old weights
        await trio.sleep(100 * STEP_S)
        assert [version for _, version in versions[3]] == [2] * NUM_TOKENS
        assert engine.weight_version == 3
        nursery.start_soon(read_some, engine)
        await trio.sleep(4.5 * STEP_S)
        assert await engine.reload_weights("/new-4", mode="abort") == 4


async def partial_reload(engine: Engine) -> None:
    await engine.reload_weights("/new-3", mode="wait")


async def read_some(engine: Engine) -> None:
    output = await engine.complete([1], SamplingParams(max_tokens=200))
    assert output.finish_reason == "abort" and output.outputs[0].weight_version == 3


async def test_a_cancelled_exchange_that_has_not_begun_changes_nothing(autojump_clock: MockClock) -> None:
    executor, versions = Weighed(), Versions()
    async with fake_engine(executor) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_all, engine, versions, 0)
            await trio.sleep(2.5 * STEP_S)
            with trio.move_on_after(3 * STEP_S):
                await engine.reload_weights("/new-1", mode="wait")
        assert_right(versions)
        assert (executor.num_lives, engine.weight_version) == (1, 0)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.drain, trio.current_time() + 1)
                await trio.sleep(STEP_S)
                with pytest.raises(EngineClosed):
                    await engine.reload_weights("/new-1")
                scope.cancel()
