"""Spans of steps as a trace: the four phases of a step follow each other without a gap."""

from __future__ import annotations

from typing import Any

import pytest

from triolet.core.profile import PHASES, StepRecorder, WorkerStep, chrome_events, phase_sums


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


def test_a_recording_holds_20_000_steps() -> None:
    recorder = StepRecorder()
    for step_id in range(20_005):
        recorder.note_plan(step_id, 0.0, 1.0)
        recorder.note_result(step_id, 0.0, 1.0)
        recorder.note_text(0.0, 1.0)
    assert [len(recorder.plans), len(recorder.applied), len(recorder.detokenized)] == [20_000] * 3


def named(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["name"] == name]


def test_the_spans_of_a_step_lie_between_the_times_that_both_sides_noted() -> None:
    recorder = StepRecorder()
    recorder.note_plan(5, 10.0, 11.0)
    recorder.note_result(5, 27.0, 28.0)
    events = chrome_events(recorder, [WorkerStep(5, 3, 40, 13.0, 15.0, 20.0, 24.0)], 77, 10.0, 500.0)
    assert {
        event["name"]: ((event["ts"] - 500.0) / 1e6, event["dur"] / 1e6)
        for event in events
        if event["ph"] == "X"
    } == {
        "step": (0.0, 18.0),
        "plan": (0.0, 1.0),
        "compute": (1.0, 9.0),
        "hand over": (1.0, 2.0),
        "prepare": (3.0, 2.0),
        "forward": (5.0, 5.0),
        "sample": (10.0, 4.0),
        "deliver": (14.0, 4.0),
    }


def test_a_later_step_of_a_run_begins_in_the_worker_without_a_plan() -> None:
    events = chrome_events(*recorded(), 77, zero_s=11.0, zero_us=0.0)
    later = [event for event in events if event["args"].get("index") == 1]
    assert [event["name"] for event in later] == [
        "step",
        "compute",
        "prepare",
        "forward",
        "sample",
        "deliver",
    ]
    assert [event["ts"] for event in later[:2]] == [pytest.approx(0.9e6)] * 2
    assert later[1]["dur"] == pytest.approx(0.7e6)


def test_the_spans_of_a_step_say_which_step_it_was() -> None:
    events = chrome_events(*recorded(), 77, 10.0, 0.0)
    assert [event["args"] for event in named(events, "sample")] == [
        {"step_id": 1, "index": 0, "rows": 3, "tokens": 40},
        {"step_id": 2, "index": 0, "rows": 3, "tokens": 3},
        {"step_id": 2, "index": 1, "rows": 3, "tokens": 3},
    ]
    assert {(event["pid"], event.get("cat", "triolet")) for event in events} == {(77, "triolet")}


def test_every_span_lies_on_a_row_with_a_name_above_the_ids_of_threads() -> None:
    events = chrome_events(*recorded(), 77, 10.0, 0.0)
    rows = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert min(rows) >= 1_000_000
    assert {
        event["name"]: rows[event["tid"]]
        for event in events
        if event["ph"] == "X" and event["name"] != "step"
    } == {
        "plan": "triolet: plan",
        "compute": "triolet: compute",
        "hand over": "triolet: inside of compute",
        "prepare": "triolet: inside of compute",
        "forward": "triolet: inside of compute",
        "sample": "triolet: sample",
        "deliver": "triolet: deliver",
        "detokenize": "triolet: detokenize",
    }


def test_steps_take_turns_on_two_rows_even_if_one_is_left_out() -> None:
    recorder, steps = recorded()
    recorder.note_plan(3, 13.0, 13.1)
    recorder.note_result(3, 14.0, 14.1)
    recorder.note_plan(4, 14.1, 14.2)
    recorder.note_result(4, 15.0, 15.1)
    del recorder.plans[1]
    steps += [WorkerStep(step_id, 3, 3, *[step_id + 10.5] * 4) for step_id in (3, 4)]
    events = chrome_events(recorder, steps, 77, 10.0, 0.0)
    rows = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert [(event["args"]["step_id"], rows[event["tid"]]) for event in named(events, "step")] == [
        (2, "triolet: step (even)"),
        (2, "triolet: step (odd)"),
        (3, "triolet: step (even)"),
        (4, "triolet: step (odd)"),
    ]


def test_a_span_with_its_end_noted_before_its_beginning_has_no_length() -> None:
    recorder = StepRecorder()
    recorder.note_text(3.0, 2.0)
    (event,) = named(chrome_events(recorder, [], 77, 1.0, 0.0), "detokenize")
    assert (event["ts"], event["dur"]) == (2e6, 0.0)


def span(name: str, dur: float, **fields: Any) -> dict[str, Any]:
    return {"cat": "triolet", "ph": "X", "name": name, "dur": dur} | fields


def test_the_sums_are_those_of_the_traces_own_spans() -> None:
    events = [
        span("step", 30.0),
        span("step", 10.0),
        span("sample", 10.0),
        span("sample", 90.0, cat="other"),
        span("sample", 90.0, ph="B"),
        {"ph": "M", "name": "sample"},
    ]
    sums = {one.name: (one.count, one.total_us, one.share) for one in phase_sums(events)}
    assert (sums["step"], sums["sample"]) == ((2, 40.0, 1.0), (1, 10.0, 0.25))
    assert set(sums) - {"step", "sample"} == {
        "plan",
        "compute",
        "deliver",
        "hand over",
        "prepare",
        "forward",
        "detokenize",
    }
    assert {sums[name] for name in set(sums) - {"step", "sample"}} == {(0, 0.0, 0.0)}


def test_the_sums_come_in_the_order_of_a_step_with_what_is_inside_or_beside_at_the_end() -> None:
    assert [one.name for one in phase_sums([])] == [
        "step",
        "plan",
        "compute",
        "sample",
        "deliver",
        "hand over",
        "prepare",
        "forward",
        "detokenize",
    ]


def test_a_trace_without_a_whole_step_has_sums_all_the_same() -> None:
    sums = {one.name: one for one in phase_sums([span("detokenize", 4.0)])}
    assert (sums["step"].share, sums["detokenize"].total_us) == (0.0, 4.0)
    assert sums["detokenize"].share == 0.0, "of no step there is no share"
