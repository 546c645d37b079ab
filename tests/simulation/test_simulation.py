"""The whole engine on virtual time, under faults: `python -m tests.simulation` runs as many seeds as one likes.

A seed draws an engine's limits, its clients and what goes wrong; whatever the order of events, every request ends
once, for a reason that the story allows, with exactly the tokens and the text that it must have.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable

import attrs
import pytest

from tests.simulation import story
from tests.simulation.__main__ import main
from tests.simulation.mutation import (
    all_mutants,
    is_of_adapters,
    is_of_operations,
    is_of_replicas,
    is_of_windows,
    planted_mutant,
)
from tests.simulation.operations import OPERATION_POINTS
from tests.simulation.replicas import draw_replica_story
from tests.simulation.simulate import simulate
from tests.simulation.story import Ask, Fault, Story
from tests.simulation.world import World

# The simulation itself, in .ci/run, goes through many more.
NUM_QUICK, NUM_QUICK_REPLICAS, NUM_SLOW = 40, 12, 1000
NUM_TO_KILL = 4000


def violations(worlds: Iterable[World]) -> dict[str, list[str]]:
    """Of the bad runs, by the command that replays them."""
    return {
        f"python -m tests.simulation --seed {world.story.seed}"
        + (" --replicas" if world.story.num_replicas > 1 else ""): world.violations
        for world in worlds
        if world.violations
    }


def test_no_seed_breaks_a_rule() -> None:
    assert violations(map(simulate, range(NUM_QUICK))) == {}


def test_no_seed_of_two_replicas_breaks_a_rule() -> None:
    assert violations(map(simulate, map(draw_replica_story, range(NUM_QUICK_REPLICAS)))) == {}


@pytest.mark.slow
def test_nor_do_more_with_kills_of_one_and_of_both() -> None:
    fired: Counter[str] = Counter()

    def run(seed: int) -> World:
        world = simulate(draw_replica_story(seed))
        fired.update(world.fired)
        return world

    assert violations(map(run, range(NUM_SLOW))) == {}
    assert fired["runner.killed"] > NUM_SLOW / 4


@pytest.mark.slow
def test_nor_do_more_which_reach_every_point_and_every_ending() -> None:
    fired: Counter[str] = Counter()
    endings: Counter[str] = Counter()

    def run(seed: int) -> World:
        world = simulate(seed)
        fired.update(world.fired)
        endings.update(str(record.entry.finish_reason) for record in world.records.values())
        return world

    assert violations(map(run, range(NUM_SLOW))) == {}
    points = (
        *story.RUNNER_POINTS, *story.SCHEDULER_POINTS, *story.START_POINTS, *story.TEXT_POINTS, *story.OTHER_POINTS,
        *story.HANG_POINTS, *story.FORM_POINTS, *story.LOAD_POINTS, *story.ADAPTER_POINTS,
        *OPERATION_POINTS,
    )  # fmt: skip
    assert fired.keys() == set(points)
    assert endings.keys() == {"stop", "length", "abort", "deadline", "error", "shutdown"}


@pytest.mark.slow
@pytest.mark.parametrize("name", all_mutants())
def test_a_planted_defect_is_noticed(name: str) -> None:
    draw = draw_replica_story if is_of_replicas(name) else story.draw_story
    told: Iterable[Story] = map(draw, range(NUM_TO_KILL))
    if is_of_adapters(name):  # they are in one of five
        told = (one for one in told if "enable_lora" in one.limits)
    if is_of_operations(name):  # they are in one of four
        told = (one for one in told if one.operations)
    if is_of_windows(name):  # they are in two of five
        told = (one for one in told if one.windows != (None,))
    with planted_mutant(name):
        assert any(simulate(one).violations for one in told)


@pytest.mark.parametrize("name", ["no free on abort", "commit without the position check"])
def test_one_that_is_noticed_is_printed_with_the_command_that_replays_it(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with planted_mutant(name):
        seed = next(seed for seed in range(NUM_TO_KILL) if simulate(seed).violations)
    assert main(["--start", str(seed), "--seeds", "1", "--mutant", name]) == 1
    first_line, *rules, _ = capsys.readouterr().out.splitlines()
    assert first_line.endswith(f"python -m tests.simulation --seed {seed} --mutant '{name}'")
    assert main(["--seed", str(seed), "--mutant", name]) == 1
    replayed = capsys.readouterr().out
    assert replayed.splitlines()[-len(rules) :] == rules
    assert f"VIOLATED {rules[0].strip()}" in replayed


@pytest.mark.slow
def test_a_seed_gives_the_same_trace_in_two_processes() -> None:
    command = [sys.executable, "-m", "tests.simulation", "--seeds", "25", "--digests"]
    outputs = [
        subprocess.check_output(
            command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": hash_seed}
        )
        for hash_seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0].split())) == 50


# ------------------------------------------------------------------- stories that found bugs, told by hand


def tell(*faults: Fault, restart_s: float = 0.0) -> Story:
    """Two clients, one after the other, and what goes wrong."""
    asks = tuple(
        Ask(
            number=number,
            request_id=f"client-{number}",
            at_s=number * 0.01,
            prompt=(number, 2, 3),
            params={"max_tokens": 4, "seed": number},
            arguments={},
            manner="read",
            pace_s=0.0,
            num_outputs=0,
        )
        for number in range(2)
    )
    return Story(
        seed=0,
        mood="faulty",
        limits={
            "max_num_seqs": 2,
            "max_num_batched_tokens": 8,
            "max_queued_tokens": 100,
            "step_timeout": 1.0,
        },
        num_blocks=8,
        block_size=2,
        eos_token_ids=(),
        restart_s=restart_s,
        asks=asks,
        faults=faults,
        faults_until_s=1.0,
        ending="wait",
    )


@pytest.mark.parametrize("nth", range(1, 9))
@pytest.mark.parametrize("kind", ["error", "panic", "group"])
def test_a_token_that_ends_an_answer_ends_it_also_after_a_crash_in_between(
    nth: int, kind: story.Kind
) -> None:
    world = simulate(tell(Fault("scheduler.commit.after", nth, kind)))
    assert world.violations == []
    assert world.fired.total() == 1


@pytest.mark.parametrize("nth", [1, 2])
def test_a_request_has_ended_when_the_scheduler_crashes_while_ending_it(nth: int) -> None:
    world = simulate(tell(Fault("scheduler.finish.middle", nth, "error")))
    assert world.violations == []
    assert world.fired.total() == 1


@pytest.mark.parametrize("nth", range(1, 5))
def test_a_new_runner_is_not_given_the_plan_that_its_predecessor_did_not_take(nth: int) -> None:
    world = simulate(tell(Fault("runner.tell.after", nth, "error"), restart_s=0.1))
    assert world.violations == []
    assert world.num_lives == 2


def test_what_comes_after_the_last_token_would_be_noticed() -> None:
    with planted_mutant("the next life goes on behind a token that ended the answer"):
        runs = [simulate(tell(Fault("scheduler.commit.after", nth, "error"))) for nth in range(1, 9)]
    assert any(world.violations for world in runs)


def test_the_same_story_in_another_order_has_another_trace() -> None:
    told = tell()
    assert simulate(told).digest() == simulate(told).digest()
    assert simulate(told).digest() != simulate(attrs.evolve(told, seed=1)).digest()


@pytest.mark.parametrize("kind", ["error", "panic", "group"])
def test_what_goes_wrong_in_telling_a_result_is_no_fault_of_the_request(kind: story.Kind) -> None:
    """Whatever is raised: a group is made anew on its way, so that it is not the one that was raised any more."""
    told, computed = Fault("runner.tell.before", 2, kind), Fault("runner.execute.before", 4, "error")
    asked = tell(told, computed)  # the second one before the step is done again that could clear the request
    ask = attrs.evolve(asked.asks[0], params={"max_tokens": 12, "seed": 0})
    world = simulate(attrs.evolve(asked, asks=(ask,), limits=asked.limits | {"num_scheduler_steps": 8}))
    assert world.fired == {told.point: 1, computed.point: 1}
    assert world.violations == []


@pytest.mark.parametrize("first", [2, 3, 4])
def test_a_step_that_was_planned_ahead_of_one_that_crashed_may_have_crashed_it(first: int) -> None:
    """The next crash is in that step, and the request was alone in both; one step later it is not to blame."""
    failures: list[bool] = []
    for after in (3, 4):
        faults = (
            Fault("runner.execute.middle", first, "error"),
            Fault("runner.execute.before", first + after, "error"),
        )
        asked = tell(*faults)
        ask = attrs.evolve(asked.asks[0], params={"max_tokens": 12, "seed": 0})
        world = simulate(attrs.evolve(asked, asks=(ask,), limits=asked.limits | {"async_scheduling": True}))
        assert world.violations == []
        assert world.fired.total() == 2
        [before, again] = [length for _, length in world.num_crashes]
        assert again - before == after - 2
        failures.append(any("RequestFailed" in line for line in world.lines))
    assert failures == [True, False]


@pytest.mark.parametrize(("num_faults", "num_root_crashes"), [(8, 3), (9, 4)])
def test_the_root_mends_three_crashes_and_the_engine_may_die_of_the_fourth(
    num_faults: int, num_root_crashes: int
) -> None:
    """Six end the group of the runner, and each further one a start of it."""
    asked = tell(*(Fault("runner.execute.before", 2 + number, "error") for number in range(num_faults)))
    world = simulate(attrs.evolve(asked, mood="escalating"))
    assert world.fired.total() == num_faults
    assert world.num_root_crashes == num_root_crashes
    assert world.may_die == (num_root_crashes > 3)
    assert world.violations == []


def test_what_was_planned_before_an_adapter_was_known_to_be_lost_fails_of_it_too() -> None:
    """In this story, rows of two steps that are in flight together have an adapter that cannot be read again."""
    world = simulate(801_604)
    assert len({start.request_id for start in world.folders.unplaced}) > 1
    assert world.violations == []


def test_an_actor_that_hangs_with_nothing_to_read_is_ended_once_there_is_something() -> None:
    """In this story, the detokenizer hangs after the last client has gone, and another request comes later."""
    world = simulate(815_783)
    assert world.fired["detokenizer.hang"] == 1
    assert world.violations == []
