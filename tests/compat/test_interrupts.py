"""Ctrl-C at any place of `LLM` and `LLMEngine`: the engine serves on, and nothing is lost or left behind."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest

import triolet
from tests.actors.harness import answer_of
from tests.compat.test_llm_engine import FakeRunner, make_engine
from triolet.compat import LLM, LLMEngine, SamplingParams
from triolet.core.output.outputs import RequestOutput
from triolet.core.request.params import RequestOutputKind

PARAMS = SamplingParams(max_tokens=6, seed=3)
NUM_PLACES = 24
PACKAGE = str(Path(triolet.__file__).parent) + os.sep  # the folder of a checkout may have the same name


@pytest.fixture(autouse=True)
def raises_keyboard_interrupt() -> Iterator[None]:
    """A shell has SIGINT ignored by what it runs in the background."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


class CtrlC:
    """Sends SIGINT before a line of the engine is run; counts the lines until then.

    The garbage of earlier engines is collected before, and none meanwhile: Python keeps an exception in a destructor
    to itself, and the lines of a destructor are not those of the work.

    Args:
        place: number of the line; beyond all lines for no signal.
    """

    def __init__(self, place: int) -> None:
        self.place, self.num_lines = place, 0

    def __enter__(self) -> Self:
        gc.collect()
        gc.disable()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        gc.enable()

    def _trace(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self.place:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._trace


def places(work: Callable[[], object]) -> list[int]:
    """Spread the signal over all lines that some work takes every time."""
    ask(make()[1])  # what is done once in a process is done now
    with CtrlC(sys.maxsize) as counted:
        work()
    return [1 + number * (counted.num_lines - 1) // NUM_PLACES for number in range(NUM_PLACES)]


def make() -> tuple[LLMEngine, LLM]:
    engine = make_engine(FakeRunner())
    return engine, LLM(engine=engine)


def ask(llm: LLM) -> list[RequestOutput]:
    return llm.generate([[1, 2], [3], [4, 5, 6]], PARAMS, use_tqdm=False)


def test_ctrl_c_at_any_line_of_a_batch_leaves_an_engine_that_answers() -> None:
    _, quiet = make()
    for place in places(lambda: ask(quiet)):
        engine, llm = make()
        with CtrlC(place), pytest.raises(KeyboardInterrupt):
            ask(llm)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert engine.get_num_unfinished_requests() == engine.statistics().num_requests_live == 0
        answers = [output.outputs[0].token_ids for output in ask(llm)]
        assert answers == [answer_of(prompt, 3, 6) for prompt in ([1, 2], [3], [4, 5, 6])]
        engine.check_health()
        assert engine.statistics().kv_blocks_in_use == 0


def steps_of(engine: LLMEngine) -> dict[str, list[int]]:
    """Step to the end, going on after an interrupt, and return the tokens of the requests."""
    found: dict[str, list[int]] = {}
    while True:
        try:
            if not engine.has_unfinished_requests():
                return found
            outputs = engine.step()
        except KeyboardInterrupt:
            continue
        for output in outputs:
            found.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)


def begun() -> LLMEngine:
    engine, _ = make()
    params = SamplingParams(max_tokens=6, seed=3, output_kind=RequestOutputKind.DELTA)
    engine.add_request("a", [1, 2], params)
    engine.add_request("b", [3], params)
    return engine


def test_ctrl_c_at_any_line_of_a_step_loses_no_token_and_doubles_none() -> None:
    quiet = begun()
    for place in places(lambda: steps_of(quiet)):
        engine = begun()
        with CtrlC(place):
            found = steps_of(engine)
        assert found == {"a": list(answer_of([1, 2], 3, 6)), "b": list(answer_of([3], 3, 6))}, place
        engine.check_health()


def test_where_a_program_handles_sigint_itself_its_handler_is_called_once_the_step_is_whole() -> None:
    engine, calls = begun(), []
    former = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with CtrlC(200):
            steps_of(engine)
        assert calls == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, former)
