"""Steps whose rows live on the device, with and without graphs, give the tokens that are computed alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from tests.model.cuda.fake_graph import FakeDevice, put_in_place
from tests.model.cuda.histories import SIZES, DeviceModel, History, HostNumbersModel, play
from tests.model.test_runner import make_runner
from tests.scale import num_cases
from triolet.kernels import paged_attention
from triolet.model.cuda.graphs import graph_sizes, prompt_graph_sizes
from triolet.model.runner import ModelRunner

NUM_HISTORIES = 200
MAX_TOKENS = 17  # of a step of a history


def make_graphs(
    model: DeviceModel, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> tuple[ModelRunner, list[int]]:
    """A runner with all its graphs, and the numbers of those that were captured as they were told."""
    put_in_place(device, monkeypatch)
    monkeypatch.setattr(paged_attention, "MAX_FEW_QUERIES", 6)  # the prompts of these histories are short
    monkeypatch.setattr(model, "forward_logits", device.launched(model.forward_logits))
    runner = make_runner(model, **SIZES, max_num_batched_tokens=MAX_TOKENS, step_device=device)
    told: list[int] = []
    runner.capture_graphs(lambda done, total: told.append(done))
    return runner, told


def play_and_compare(runner: ModelRunner, seed: int, num_requests: int = 10) -> History:
    """Play a history; after each step the device's rows are those of the host."""
    runner.reset()
    steps = runner._steps
    assert steps is not None

    def compare() -> None:
        assert steps.rows.differences(runner._table) == []

    return play(seed, runner.execute, compare, num_requests)


def counting(replay: Callable[[], None], counted: Counter[str]) -> Callable[[], None]:
    def replay_and_count() -> None:
        counted["steps with prompts"] += 1
        replay()

    return replay_and_count


def test_without_graphs_every_answer_is_the_one_computed_alone() -> None:
    runner = make_runner(DeviceModel(random.Random(7)), **SIZES, step_device=FakeDevice())
    for seed in range(2):
        play_and_compare(runner, seed).check()


@pytest.mark.parametrize("num_histories", [2, pytest.param(num_cases(NUM_HISTORIES), marks=pytest.mark.slow)])
def test_graphs_that_are_captured_once_give_the_answers_computed_alone(
    num_histories: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, model = FakeDevice(), DeviceModel(random.Random(9))
    runner, told = make_graphs(model, device, monkeypatch)
    assert told == [1, 2, 3, 4, 5]
    counted: Counter[str] = Counter()
    prompt_graph = runner._steps.prompt_graphs.of(1)[1]  # type: ignore[union-attr, index]
    monkeypatch.setattr(prompt_graph, "replay", counting(prompt_graph.replay, counted))
    for seed in range(num_histories):
        history = play_and_compare(runner, seed)
        history.check()
        counted["preemptions"] += history.scheduler.counters.num_preemptions
        counted["aborts"] += len(history.aborted)
    assert device.num_replays > 20 * num_histories
    assert counted["steps with prompts"] > 2 * num_histories
    assert model.num_errors > 0
    assert counted["preemptions"] > 0
    assert counted["aborts"] > 0


def test_a_graph_of_a_model_that_reads_the_hosts_lengths_gives_other_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, _ = make_graphs(HostNumbersModel(), FakeDevice(), monkeypatch)
    with pytest.raises(AssertionError):
        play_and_compare(runner, 1).check()


def test_a_step_has_one_mark_and_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    runner, _ = make_graphs(DeviceModel(), device, monkeypatch)
    num_steps = 0

    def count() -> None:
        nonlocal num_steps
        num_steps += 1

    play(3, runner.execute, count)
    assert device.num_marks == device.num_waits == num_steps


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [(1, (1,)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8)), (40, (1, 2, 4, 8, 16, 24, 32, 40)), (17, (1, 2, 4, 8, 16, 17))],
)  # fmt: skip
def test_the_sizes_of_graphs_are_these(max_num_seqs: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(max_num_seqs) == sizes


def test_padding_is_small_at_every_size() -> None:
    sizes = graph_sizes(512)
    assert len(sizes) == len(set(sizes)) < 60
    for num_rows in range(1, 513):
        padded = min(size for size in sizes if size >= num_rows)
        assert padded - num_rows < max(16, num_rows)


@pytest.mark.parametrize(
    ("max_num_tokens", "sizes"),
    [
        (17, (17,)),
        (256, (256,)),
        (300, (256, 300)),
        (2048, (256, 384, 512, 768, 1024, 1536, 2048)),
        (8192, (256, 384, 512, 768, 1024, 1536, 2048)),
    ],
)
def test_steps_with_prompts_are_captured_for_these_numbers_of_tokens(
    max_num_tokens: int, sizes: tuple[int, ...]
) -> None:
    assert prompt_graph_sizes(max_num_tokens) == sizes
