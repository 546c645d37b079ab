"""Spans of steps as a trace: the four phases of a step follow each other without a gap."""

from __future__ import annotations

import pytest

from triolet.core.profile import MAX_STEPS, PHASES, StepRecorder, WorkerStep, chrome_events, phase_sums


def recorded() -> tuple[StepRecorder, list[WorkerStep]]:
    """A step with one result, and a run with two."""
    recorder = StepRecorder()
    recorder.note_plan(1, 10.0, 10.1)
    recorder.note_result(1, 11.0, 11.1)
    recorder.note_plan(2, 11.1, 11.3)
    recorder.note_result(2, 12.0, 12.1)
    recorder.note_result(2, 12.8, 13.0)
    recorder.note_text(11.2, 11.25)
    steps = [
        WorkerStep(1, 3, 40, 10.2, 10.3, 10.8, 10.9),
        WorkerStep(2, 3, 3, 11.4, 11.5, 11.8, 11.9),
        WorkerStep(2, 3, 3, 11.9, 12.0, 12.6, 12.7),
    ]
    return recorder, steps


def test_the_four_phases_of_a_step_add_up_to_its_time() -> None:
    recorder, steps = recorded()
    events = chrome_events(StepRecorder.of(recorder.values()), steps, 77, zero_s=10.0, zero_us=500.0)
    spans = [event for event in events if event["ph"] == "X" and "step_id" in event["args"]]
    expected = {(1, 0): (10.0, 11.1), (2, 0): (11.1, 12.1), (2, 1): (11.9, 13.0)}
    for (step_id, index), (began_s, ended_s) in expected.items():
        of_step = {
            event["name"]: event
            for event in spans
            if (event["args"]["step_id"], event["args"]["index"]) == (step_id, index)
        }
        assert of_step["step"]["ts"] == pytest.approx((began_s - 10.0) * 1e6 + 500.0)
        assert of_step["step"]["dur"] == pytest.approx((ended_s - began_s) * 1e6)
        parts = [of_step[name]["dur"] for name in PHASES if name in of_step]
        assert sum(parts) == pytest.approx(of_step["step"]["dur"])
        assert ("plan" in of_step) is (index == 0)
    sums = {one.name: one for one in phase_sums(events)}
    assert sums["step"].count == 3
    assert sums["step"].total_us == pytest.approx((1.1 + 1.0 + 1.1) * 1e6)
    assert sum(sums[name].share for name in PHASES) == pytest.approx(1.0)
    assert sums["detokenize"].total_us == pytest.approx(0.05e6)


def test_a_step_that_one_side_has_not_recorded_is_left_out() -> None:
    recorder, steps = recorded()
    del recorder.plans[1]
    recorder.applied.pop()
    events = chrome_events(recorder, steps, 77, 10.0, 0.0)
    assert [event["args"]["step_id"] for event in events if event["name"] == "step"] == [2]


def test_a_recording_is_bounded() -> None:
    recorder = StepRecorder()
    for step_id in range(MAX_STEPS + 5):
        recorder.note_plan(step_id, 0.0, 1.0)
        recorder.note_result(step_id, 0.0, 1.0)
        recorder.note_text(0.0, 1.0)
    assert {len(recorder.plans), len(recorder.applied), len(recorder.detokenized)} == {MAX_STEPS}
