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
from triolet.engine.gc_freeze import FullCollections, collect_in_short_steps

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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_everything_is_collected_once_memory_has_grown_and_nothing_happens_for_some_steps() -> None:
    full = FullCollections(num_quiet=3, num_blocks=1000)
    assert not any(full.is_due(1099, is_quiet=True) for _ in range(10))
    assert full.is_due(1100, is_quiet=True)
    full.note_done(1100)
    assert not any(full.is_due(1200, is_quiet=True) for _ in range(10))
    # Something happens in between: the quiet steps are counted again.
    quiet = (False, True, True, False, True, True, True)
    assert [full.is_due(1210, is_quiet=is_quiet) for is_quiet in quiet] == [False] * 6 + [True]


def test_where_always_something_happens_everything_is_collected_rarely_and_only_if_memory_has_doubled() -> (
    None
):
    full = FullCollections(min_busy_steps=4, num_blocks=1000)
    assert [full.is_due(2000, is_quiet=False) for _ in range(4)] == [False, False, False, True]
    full.note_done(1500)
    assert not any(full.is_due(2999, is_quiet=False) for _ in range(20))
    assert [full.is_due(3000, is_quiet=False) for _ in range(4)] == [False, False, False, True]


def test_requests_that_come_and_go_are_no_growth_that_has_everything_collected_amid_them() -> None:
    full = FullCollections(min_busy_steps=4, num_blocks=1000)
    blocks = [9000, 1999, 9000, 9000] * 3
    assert not any(full.is_due(num_blocks, is_quiet=False) for num_blocks in blocks)
    assert [full.is_due(2000, is_quiet=False) for _ in range(4)] == [False, False, False, True]


def test_a_step_looks_at_nothing_that_an_earlier_step_has_left_and_growth_in_quiet_brings_all_back() -> None:
    run(
        """
        import sys
        from unittest import mock
        from triolet.engine import gc_freeze
        from triolet.engine.gc_freeze import collect_in_short_steps

        class Now:
            num_middle, num_blocks, is_idle = 1, 1000, False

        async def main():
            patches = (
                mock.patch.object(gc_freeze, "STEP_INTERVAL_S", 0.001),
                mock.patch.object(gc, "get_count", lambda: (0, 0, Now.num_middle)),
                mock.patch.object(sys, "getallocatedblocks", lambda: Now.num_blocks),
            )
            with frozen_gc(), patches[0], patches[1], patches[2]:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(collect_in_short_steps, lambda: Now.is_idle)
                    node = Node()
                    remains = weakref.ref(node)
                    while is_looked_at(node):
                        await trio.sleep(0.001)
                    del node
                    await trio.sleep(0.1)
                    assert remains() is not None, "it is garbage, but was frozen before"
                    Now.num_middle = 0
                    await trio.sleep(0.1)
                    assert remains() is not None, "memory has not grown"
                    Now.num_blocks = 1200
                    await trio.sleep(0.1)
                    assert remains() is not None, "a request would be held up"
                    Now.is_idle = True
                    while remains() is not None:
                        await trio.sleep(0.001)
                    nursery.cancel_scope.cancel()

        trio.run(main)
        """
    )


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
            nursery.start_soon(collect_in_short_steps, lambda: True)
            await trio.sleep(0.5)
            assert gc.get_threshold() != thresholds
            garbage = weakref.ref(Node())
            await trio.sleep(5)
            assert garbage() is None
    assert gc.get_threshold() == thresholds


def test_no_step_of_a_server_counts_the_frozen_objects_but_one_that_has_collected_them_all() -> None:
    run(
        """
        import sys
        from unittest import mock
        from triolet.engine import gc_freeze
        from triolet.engine.gc_freeze import collect_in_short_steps

        num_blocks, num_counts, count = 1000, 0, gc.get_freeze_count

        def counted():
            global num_counts
            num_counts += 1
            return count()

        async def main():
            global num_blocks
            patches = (
                mock.patch.object(gc, "get_freeze_count", counted),
                mock.patch.object(gc, "get_count", lambda: (0, 0, 0 if num_blocks > 1000 else 1)),
                mock.patch.object(sys, "getallocatedblocks", lambda: num_blocks),
            )
            with frozen_gc(), patches[0], patches[1], patches[2]:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(collect_in_short_steps, lambda: True)
                    await trio.testing.wait_all_tasks_blocked()
                    at_the_start = num_counts
                    await trio.sleep(60)
                    assert num_counts == at_the_start, "a step counted"
                    num_blocks = 1200
                    await trio.sleep(6)
                    after_all = num_counts
                    assert after_all > at_the_start, "everything was to be collected"
                    num_blocks = 1000
                    await trio.sleep(60)
                    assert num_counts == after_all, "a step counted"
                    nursery.cancel_scope.cancel()

        import trio.testing
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
        """
    )
