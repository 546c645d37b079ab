"""Profiles of an engine: one at a time, only where a folder is configured, and a trace of every step."""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock

import triolet
from tests.actors.harness import FakeExecutor, fake_engine
from triolet.compat import LLM
from triolet.core.profile import PHASES, phase_sums
from triolet.core.worker_call import WorkerCall, WorkerOutcome
from triolet.errors import ConfigError, EngineClosed, InvalidRequest, ProfileConflict, UnsupportedFeature


class ProfiledExecutor(FakeExecutor):
    """Notes the calls of a profile."""

    def __init__(self) -> None:
        super().__init__(64, 4)
        self.calls: list[WorkerCall] = []
        self.is_lost = False

    async def call(self, call: WorkerCall, limit_s: float | None) -> WorkerOutcome:
        await trio.lowlevel.checkpoint()
        self.calls.append(call)
        return WorkerOutcome(not self.is_lost)


async def test_one_profile_is_recorded_at_a_time(autojump_clock: MockClock) -> None:
    executor = ProfiledExecutor()
    async with fake_engine(executor, profile_dir="traces") as engine:
        with pytest.raises(ProfileConflict, match="no profile is being recorded"):
            await engine.stop_profile()
        for wrong in ("", "a/b", "\u00e9", "x" * 101, 5):
            with pytest.raises(InvalidRequest, match="prefix must be"):
                await engine.start_profile(wrong)  # type: ignore[arg-type]
        await engine.start_profile("mine")
        with pytest.raises(ProfileConflict, match="a profile is being recorded"):
            await engine.start_profile()
        await engine.complete([1, 2, 3], triolet.SamplingParams(max_tokens=5, seed=1))
        path = await engine.stop_profile()
        assert Path(path).parent == Path.cwd() / "traces"
        assert Path(path).name.startswith("mine-")
        assert [call.name for call in executor.calls] == ["start_profile", "stop_profile", "write_profile"]
        plans, applied, texts = executor.calls[-1].args[0]
        assert len(applied) == len(executor.plans) == 5  # a run of several steps has one plan
        assert {step_id for step_id, *_ in applied} == {step_id for step_id, _ in plans}
        assert texts
        await engine.start_profile()
        executor.is_lost = True
        with pytest.raises(ProfileConflict, match="was lost"):
            await engine.stop_profile()
        await engine.start_profile()  # the lost one is over


@pytest.mark.parametrize("ends", [False, True])
async def test_the_end_of_a_profile_sleeps_until_the_scheduler_goes_on_or_the_engine_ends(
    ends: bool, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler hangs, as the inbox says, until the next request, and is looked at a few times meanwhile."""
    num_looks, is_over = 0, False

    async def stop() -> None:
        with pytest.raises(EngineClosed) if ends else nullcontext():
            await engine.stop_profile()

    async with fake_engine(ProfiledExecutor(), profile_dir="traces") as engine:
        await engine.start_profile()
        inbox = engine._channels.scheduler_inbox
        genuine = inbox.statistics()

        def statistics() -> trio.MemoryChannelStatistics:
            nonlocal num_looks
            num_looks += 1
            assert num_looks < 100
            return attrs.evolve(genuine, current_buffer_used=0 if is_over else 1)

        monkeypatch.setattr(inbox, "statistics", statistics)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop)
            await trio.sleep(10.0)
            if ends:
                engine.shut_down()
            else:
                is_over = True
                await engine.complete([1, 2, 3], triolet.SamplingParams(max_tokens=5, seed=1))
    assert num_looks > 0


async def test_without_a_folder_there_are_no_profiles(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        for method in (engine.start_profile, engine.stop_profile):
            with pytest.raises(UnsupportedFeature, match="profile_dir is not set"):
                await method()


def check_trace(path: Path, num_steps: int) -> None:
    """One file, with torch's events, every step, and phases that add up to the steps within 5 percent."""
    assert sorted(path.parent.iterdir()) == [path]
    events = json.loads(path.read_text())["traceEvents"]
    assert any(event.get("cat") == "cpu_op" for event in events)
    sums = {one.name: one for one in phase_sums(events)}
    assert sums["step"].count >= num_steps
    assert sum(sums[name].total_us for name in PHASES) == pytest.approx(sums["step"].total_us, rel=0.05)
    by_step = defaultdict[tuple[int, int], dict[str, float]](dict)
    for event in events:
        if event.get("cat") == "triolet" and event["name"] in ("step", *PHASES):
            by_step[event["args"]["step_id"], event["args"]["index"]][event["name"]] = event["dur"]
    assert len(by_step) == sums["step"].count
    for (_, index), spans in by_step.items():
        assert spans.keys() == {"step", *PHASES} - ({"plan"} if index else set())
        assert sum(spans[name] for name in PHASES if name in spans) == pytest.approx(spans["step"], rel=0.05)
    # the engine's spans lie within torch's time
    stamps = [event["ts"] for event in events if event.get("cat") == "cpu_op"]
    first = min(event["ts"] for event in events if event["name"] == "step")
    assert min(stamps) - 1e6 < first < max(stamps) + 1e6


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["inline", "thread", "process"])
async def test_a_trace_has_every_step_and_its_phases_add_up(runner: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"runner": runner, "profile_dir": str(tmp_path / "traces"), "num_kv_blocks": 64}
    async with triolet.open_engine(**fields) as engine:
        params = triolet.SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        await engine.start_profile()
        num_before = engine.statistics().steps
        for temperature in (0.0, 1.0):
            params = triolet.SamplingParams(max_tokens=12, temperature=temperature, ignore_eos=True)
            await engine.complete("Hello!", params)
        num_steps = engine.statistics().steps - num_before
        assert num_steps >= 24
        check_trace(Path(await engine.stop_profile()), num_steps)
        await engine.complete("Hello!", params)


@pytest.mark.slow
async def test_a_folder_that_cannot_be_written_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    async with triolet.open_engine(runner="thread", profile_dir=str(folder), num_kv_blocks=64) as engine:
        folder.rmdir()  # it was made at the start
        folder.touch()
        with pytest.raises(ConfigError, match=r"^profile_dir must be a folder that can be written to"):
            await engine.start_profile()
        with pytest.raises(ProfileConflict):
            await engine.stop_profile()


async def test_a_folder_that_cannot_be_made_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    stages: list[str] = []
    rule = r"^profile_dir must be a folder that can be written to \(.*\); got '.*file'$"
    with pytest.raises(ConfigError, match=rule):
        async with triolet.open_engine(
            runner="inline",
            profile_dir=str(tmp_path / "file"),
            on_progress=lambda told: stages.append(told.stage),
        ):
            pytest.fail("it is open")
    assert "weights" not in stages


@pytest.mark.slow
def test_llm_writes_a_trace_as_well(tmp_path: Path) -> None:
    llm = LLM(profile_dir=str(tmp_path / "traces"), num_kv_blocks=64)
    llm.start_profile("offline")
    with pytest.raises(ProfileConflict):
        llm.start_profile()
    llm.generate("Hello!", triolet.SamplingParams(max_tokens=12, ignore_eos=True), use_tqdm=False)
    llm.stop_profile()
    [path] = (tmp_path / "traces").iterdir()
    assert path.name.startswith("offline-")
    check_trace(path, 12)
