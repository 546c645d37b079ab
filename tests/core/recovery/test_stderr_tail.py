"""Of what a process wrote before it died, the lines that tell why."""

from __future__ import annotations

from triolet.core.recovery.supervision import (
    MAX_LINE_CHARS,
    NUM_FRAMES,
    NUM_LINES,
    NUM_LINES_BEFORE,
    StderrTail,
)

FATAL = "Fatal Python error: Floating point exception"


def words(lines: list[str]) -> StderrTail:
    heard = StderrTail()
    for line in lines:
        heard.add_line(line, 1.0)
    return heard


def frames(name: str, number: int = 10) -> list[str]:
    return [f'  File "{name}.py", line {line} in {name}' for line in range(number)]


def thread(current: bool) -> str:
    return f"{'Current thread' if current else 'Thread'} 0x00007f5d8a3b4740 (most recent call first):"


def test_the_last_lines_are_kept_and_of_each_the_beginning() -> None:
    heard = words([f"line {number} " + "x" * 1000 for number in range(100)]).since(0.0)
    assert [line.split()[1] for line in heard] == ["95", "96", "97", "98", "99"]
    assert (len(heard), {len(line) for line in heard}) == (NUM_LINES, {MAX_LINE_CHARS})


def test_a_fatal_error_is_told_with_what_came_before_it_and_the_innermost_frames_of_its_thread() -> None:
    heard = words(
        [
            *("an old line", "terminate called", "what(): it broke", FATAL),
            *(thread(False), *frames("waiting"), thread(True), *frames("dividing")),
            *(thread(False), *frames("sleeping"), "Extension modules: numpy, torch (total: 2)"),
        ]
    ).since(0.0)
    assert heard == [
        *("terminate called", "what(): it broke", FATAL),
        *('File "dividing.py", line 0 in dividing', 'File "dividing.py", line 1 in dividing'),
        'File "dividing.py", line 2 in dividing',
    ]
    assert len(heard) == NUM_LINES_BEFORE + 1 + NUM_FRAMES


def test_a_fatal_error_in_a_thread_that_python_does_not_know_is_told_without_frames() -> None:
    heard = words([FATAL, thread(False), *frames("waiting"), "Extension modules: numpy (total: 1)"])
    assert heard.since(0.0) == [FATAL]


def test_old_lines_are_no_reason() -> None:
    heard = words([FATAL, thread(True), *frames("dividing")])
    heard.add_line("later", 5.0)
    assert heard.since(4.0) == ["later"]
    assert heard.since(6.0) == []


def test_lines_of_exactly_that_time_are_among_the_reasons() -> None:
    assert words(["late"]).since(1.0) == ["late"]
    assert words([FATAL, "later"]).since(1.0) == [FATAL]


def test_frames_are_those_under_the_first_heading_of_the_thread_that_failed() -> None:
    assert words([FATAL, *frames("loose")]).since(0.0) == [FATAL]
    assert words([FATAL, thread(True), "Extension modules: numpy"]).since(0.0) == [FATAL]
    assert words([FATAL, "Current thread 0x00007f5d8a3b4740 has no frames", *frames("none")]).since(0.0) == [
        FATAL
    ]
    again = [FATAL, thread(True), *frames("first", 1), "", thread(True), *frames("second", 1)]
    assert words(again).since(0.0) == [FATAL, 'File "first.py", line 0 in first']


def test_of_two_fatal_errors_the_last_one_is_told() -> None:
    first, second = (
        [thread(True), *frames("first", 1)],
        [*frames("loose"), thread(True), *frames("second", 9)],
    )
    heard = words([FATAL, *first, FATAL, *second]).since(0.0)
    assert heard[-3:] == [f'File "second.py", line {line} in second' for line in range(3)]
    assert not any("loose" in line for line in heard)


def test_a_line_is_cut_to_200_characters() -> None:
    assert [len(line) for line in words(["x" * 1000]).since(0.0)] == [200]
