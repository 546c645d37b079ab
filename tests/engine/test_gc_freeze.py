"""Each story has a process of its own: what is set aside is set aside for all of a process."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import weakref

import pytest
import trio
import trio.testing

from tests.source_tree import ROOT, SRC
from triolet.engine.gc_freeze import FullCollections, collect_rarely

PROLOGUE = """
import gc, weakref
import trio
import triolet
from triolet.engine.gc_freeze import freeze_gc, frozen_gc

class Node:
    def __init__(self):
        self.itself = self  # no count of references will ever free it

def is_looked_at(thing):
    return any(one is thing for one in gc.get_objects())
"""


def run(story: str) -> None:
    program = PROLOGUE + textwrap.dedent(story)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PYTHONPATH": str(SRC), "PATH": ""},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_while_an_engine_is_open_collections_do_not_look_at_what_was_there_before() -> None:
    run(
        """
        long_lived = Node()
        async def main():
            async with triolet.open_engine(max_model_len=64, runner="inline"):
                assert gc.get_freeze_count() > 50_000
                assert not is_looked_at(long_lived)
                new = Node()
                assert is_looked_at(new)
            assert gc.get_freeze_count() == 0
            assert is_looked_at(long_lived)
        trio.run(main)
        """
    )


def test_engines_that_are_opened_in_turns_leave_nothing_behind() -> None:
    run(
        """
        async def main():
            remains = []
            for _ in range(3):
                async with triolet.open_engine(max_model_len=64, runner="inline") as engine:
                    await engine.complete("Hello", triolet.SamplingParams(max_tokens=2))
                    in_a_circle = Node()
                    remains += [weakref.ref(engine), weakref.ref(in_a_circle)]
                del engine, in_a_circle
                gc.collect()
                assert [ref() for ref in remains] == [None] * len(remains)
        trio.run(main)
        """
    )


def test_of_engines_that_overlap_the_next_collects_what_the_last_has_left() -> None:
    run(
        """
        first = frozen_gc()
        first.__enter__()
        for _ in range(3):
            garbage = Node()
            with frozen_gc():
                remains = weakref.ref(garbage)
                del garbage
                second = frozen_gc()
                second.__enter__()
            assert remains() is None
            assert gc.get_freeze_count() > 0, "one is open still"
            first.__exit__(None, None, None)
            first = second
        first.__exit__(None, None, None)
        assert gc.get_freeze_count() == 0
        """
    )


@pytest.mark.parametrize("ending", ["", "raise KeyError"])
def test_what_the_program_had_set_aside_stays_so(ending: str) -> None:
    run(
        f"""
        the_programs = Node()
        gc.freeze()
        try:
            with frozen_gc():
                assert not is_looked_at(the_programs)
                {ending}
        except KeyError:
            pass
        assert not is_looked_at(the_programs)
        """
    )


def test_what_the_program_sets_aside_meanwhile_stays_so() -> None:
    run(
        """
        with frozen_gc():
            the_programs = [Node() for _ in range(1000)]
            gc.freeze()
            with frozen_gc():
                pass
        assert not is_looked_at(the_programs[0])
        """
    )


def test_a_program_that_has_started_sets_the_rest_aside_until_its_engine_closes() -> None:
    run(
        """
        with frozen_gc():
            later = Node()
            assert is_looked_at(later)
            freeze_gc()
            assert not is_looked_at(later)
        assert is_looked_at(later)
        """
    )


def test_the_runners_process_sets_its_model_aside() -> None:
    run(
        """
        from tests.actors.executors.fake_worker import Misbehaving
        from triolet.workers import runner as worker
        from triolet.config.engine import EngineConfig
        from triolet.core.step_plan import StepPlan

        class Pipe:
            reply = print

            def has_request(self):
                return False

            def requests(self):
                yield EngineConfig()
                yield StepPlan(1, (), (), ())

        runner = Misbehaving()
        replies = worker._replies(runner.load, Pipe())
        assert is_looked_at(runner)
        assert next(replies).architecture == "Fake"
        assert not is_looked_at(runner)
        assert next(replies).step_id == 1
        """
    )


def test_full_collections_are_rare_while_they_find_little_and_soon_where_they_find_much() -> None:
    full = FullCollections(max_garbage=1000, min_middle=10, max_middle=700)

    def first_due() -> int:
        return next(num_middle for num_middle in range(1, 10_000) if full.is_due(num_middle, 0))

    assert first_due() == 500
    full.note_result(500, 0, 0)
    assert first_due() == 700
    full.note_result(500, 5000, 0)  # ten for each middle one: a thousand after a hundred
    assert first_due() == 100
    full.note_result(100, 10**6, 0)
    assert first_due() == 10


def test_a_full_collection_is_due_when_nothing_happens_any_more_but_not_again_and_again() -> None:
    full = FullCollections(min_middle=10)
    assert not full.is_due(40, 0)
    assert full.is_due(40, 0)
    full.note_result(40, 3, 0)
    assert [full.is_due(num_middle, 0) for num_middle in (0, 0, 9, 9, 9)] == [False] * 5


def test_a_full_collection_is_put_off_while_there_are_far_more_objects_than_usual_but_not_for_ever() -> None:
    full = FullCollections(min_middle=10, max_growth=1.5, max_put_off=3, num_blocks=1000)
    assert [full.is_due(600, num_blocks) for num_blocks in (5000, 1501, 1500)] == [False, False, True]
    full.note_result(600, 0, 2000)
    assert not full.is_due(3000, 9000)
    assert full.is_due(3000, 3000)
    full.note_result(3000, 0, 2000)
    assert [full.is_due(3000, 10**6) for _ in range(4)] == [False, False, False, True]
    full.note_result(3000, 10**5, 2000)
    assert [full.is_due(3000, 10**6) for _ in range(4)] == [False, False, False, True]


def test_a_full_collection_is_not_put_off_where_nothing_happens_since_what_has_grown_is_garbage() -> None:
    full = FullCollections(min_middle=10, max_put_off=60, max_put_off_quiet=3, num_blocks=1000)
    assert [full.is_due(40, 10**6) for _ in range(6)] == [False, False, False, False, True, True]
    full.note_result(40, 10**5, 1000)
    # It is busy in between: the quiet checks are counted again.
    counts = (40, 40, 40, 41, 41, 41, 41, 41)
    assert [full.is_due(num_middle, 10**6) for num_middle in counts] == [False] * 7 + [True]


async def test_a_server_collects_itself_and_gives_the_rule_back(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    class Node:
        def __init__(self) -> None:
            self.itself = self

    thresholds = gc.get_threshold()
    monkeypatch.setattr(gc, "get_count", lambda: (0, 0, 50))
    with trio.move_on_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect_rarely)
            await trio.sleep(0.5)
            assert gc.get_threshold() != thresholds
            garbage = weakref.ref(Node())
            await trio.sleep(5)
            assert garbage() is None
    assert gc.get_threshold() == thresholds
