"""Size of the KV cache on a GPU, with numbers in place of one: share of the engine, less what a largest step takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from tests.model.tiny import make_model
from triolet.actors.executors.contract import with_kv_cache
from triolet.config.engine import EngineConfig
from triolet.core.load_progress import LoadProgress
from triolet.errors import ConfigError
from triolet.model.interface import ForwardBatch
from triolet.model.loading import runner as loading
from triolet.model.loading.options import LoadOptions
from triolet.model.loading.runner import load_runner
from triolet.model.memory.device_memory import GIB, MARGIN_BYTES, DeviceMemory, largest_step
from triolet.model.runner import ModelRunner

GPU = torch.device("cuda", 0)
BLOCK = 2**20


class FakeCuda:
    """Numbers that torch.cuda tells: memory of a card of 80 GiB, bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **numbers: int) -> None:
        self.free = self.reserved = self.allocated = self.peak = 0
        self.asked: set[torch.device] = set()  # the cards that were asked about
        vars(self).update(numbers)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        for name, answer in {
            "synchronize": lambda: None,
            "reset_peak_memory_stats": lambda: None,
            "mem_get_info": lambda: (self.free, 80 * GIB),
            "memory_reserved": lambda: self.reserved,
            "memory_allocated": lambda: self.allocated,
            "max_memory_allocated": lambda: self.peak,
        }.items():
            monkeypatch.setattr(torch.cuda, name, partial(self._answer, answer))

    def _answer(self, answer: Callable[[], Any], device: torch.device) -> Any:
        self.asked.add(device)
        return answer()


@pytest.mark.parametrize(
    ("free", "utilization", "share"), [(79, 0.9, 72), (79, 0.5, 40), (50, 0.9, 50), (50, 1.0, 50)]
)
def test_the_engine_takes_its_part_of_all_memory_or_what_was_free(
    monkeypatch: pytest.MonkeyPatch, free: int, utilization: float, share: int
) -> None:
    FakeCuda(monkeypatch, free=free * GIB)
    assert DeviceMemory.measure(GPU).share(utilization) == share * GIB


@pytest.mark.parametrize("others", [0, 3 * GIB])
def test_the_kv_cache_gets_what_the_largest_step_the_libraries_and_a_margin_leave(
    monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    cuda = FakeCuda(monkeypatch, free=78 * GIB, reserved=others, allocated=others)
    memory = DeviceMemory.measure(GPU)

    def compute() -> int:
        cuda.peak = others + 20 * GIB + 4 * GIB  # weights and activations, and a KV cache for the step alone
        cuda.reserved = others + 18 * GIB
        cuda.free = 78 * GIB - 18 * GIB - 2 * GIB  # 2 GiB are the libraries'
        return 4 * GIB

    assert memory.left_for_kv(0.9, compute, BLOCK) == (72 - 20 - 2) * GIB - MARGIN_BYTES


def test_all_of_it_is_asked_of_the_card_that_the_engine_computes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    second = torch.device("cuda", 1)
    cuda = FakeCuda(monkeypatch, free=78 * GIB)
    DeviceMemory.measure(second).left_for_kv(0.9, lambda: 0, BLOCK)
    assert cuda.asked == {second}


class Chosen(Exception):
    """A load has chosen its device."""


def test_a_load_computes_and_measures_on_the_card_with_the_configured_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load_model(model: str, options: LoadOptions, **_: Any) -> None:
        raise Chosen(options.device)

    places: list[object] = []
    cuda = FakeCuda(monkeypatch, free=78 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", places.append)
    monkeypatch.setattr(loading, "load_model", load_model)
    with pytest.raises(Chosen, match=r"^cuda:1$"):
        load_runner(EngineConfig(model="nowhere", device="cuda:1"))
    assert {*places} == cuda.asked == {torch.device("cuda", 1)}


def test_a_card_without_room_for_a_block_is_refused_with_what_is_needed_and_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch, free=10 * GIB)
    memory = DeviceMemory.measure(GPU)

    def compute() -> int:
        cuda.peak, cuda.reserved, cuda.free = 9 * GIB + GIB // 2, 9 * GIB, GIB // 2
        return 0

    rule = r"steps take 10\.12 GiB, a block of KV 0\.001 GiB, and 10\.00 of 80\.00 GiB were free; got 0\.9"
    with pytest.raises(ConfigError, match=rule) as caught:
        memory.left_for_kv(0.9, compute, BLOCK)
    assert caught.value.field == "gpu_memory_utilization"


def test_what_another_engine_takes_of_the_card_meanwhile_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch, free=78 * GIB)
    memory = DeviceMemory.measure(GPU)

    def compute() -> int:
        cuda.peak = cuda.reserved = 20 * GIB
        cuda.free = 78 * GIB - 20 * GIB - 30 * GIB  # 30 GiB are the other engine's
        return 0

    assert memory.left_for_kv(0.9, compute, BLOCK) == (72 - 20 - 30) * GIB - MARGIN_BYTES
    assert DeviceMemory.measure(GPU).share(0.9) == 28 * GIB, "a third engine has what the two have left"


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "max_position", "shape"),
    [(64, 4, 256, (4, 16)), (64, 100, 256, (64, 1)), (65, 2, 256, (2, 32)), (512, 2, 100, (2, 100))],
)
def test_the_largest_step_has_as_many_tokens_and_logits_as_a_scheduler_may_plan(
    tmp_path: Path, num_tokens: int, num_rows: int, max_position: int, shape: tuple[int, int]
) -> None:
    runner, _ = load_runner(
        EngineConfig(model=str(make_model("llama", tmp_path)), device="cpu", num_kv_blocks=1)
    )
    plan, num_blocks = largest_step(num_tokens, num_rows, 16, max_position)
    large = ModelRunner(
        runner.model,
        num_blocks=num_blocks,
        block_size=16,
        max_num_seqs=num_rows,
        max_model_len=max_position,
        device=torch.device("cpu"),
    )
    result = large.execute(plan)
    assert len(result.tokens) == shape[0]
    assert [row.num_tokens for row in plan.rows] == [shape[1]] * shape[0]
    assert all(token.logprobs is not None for token in result.tokens)


class PretendedMemory:
    """Memory of a GPU in whose place the CPU computes."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.num_blocks = 40

    def left_for_kv(self, utilization: float, compute_largest_step: Any, block_bytes: int) -> int:
        self.steps.append(compute_largest_step())
        return int(self.num_blocks * block_bytes * utilization)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> PretendedMemory:
    memory = PretendedMemory()
    monkeypatch.setattr(loading, "memory_of", lambda device: memory)
    return memory


def test_a_load_computes_the_largest_step_once_and_takes_what_it_leaves(
    tmp_path: Path, pretended: PretendedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[tuple[int, int]] = []
    forward = ModelRunner._compute

    def note(self: ModelRunner, step: Any) -> Any:
        batch: ForwardBatch = step.forward_batch(self._cache, self._soft_prompts)
        batches.append((len(batch.token_ids), len(batch.logits_indices)))
        return forward(self, step)

    monkeypatch.setattr(ModelRunner, "_compute", note)
    folder = str(make_model("llama", tmp_path))
    _, info = load_runner(
        EngineConfig(
            model=folder, device="cpu", gpu_memory_utilization=0.5, max_num_batched_tokens=96, max_num_seqs=6
        )
    )
    assert info.num_kv_blocks == 20
    assert batches == [(96, 6)]
    assert pretended.steps == [6 * 16 * 3 * 2 * 2 * 16 * 4], "six blocks of three layers in float32"


@pytest.mark.parametrize("size", [{"num_kv_blocks": 7}, {"kv_cache_bytes": 7 * 16 * 3 * 2 * 2 * 16 * 4}])
def test_a_size_that_was_given_or_found_by_an_earlier_life_is_not_measured_again(
    tmp_path: Path, pretended: PretendedMemory, size: dict[str, int]
) -> None:
    _, info = load_runner(EngineConfig(model=str(make_model("llama", tmp_path)), device="cpu", **size))  # type: ignore[arg-type]
    assert (info.num_kv_blocks, pretended.steps) == (7, [])


def test_a_later_life_has_the_blocks_of_the_first_although_less_memory_is_free(
    tmp_path: Path, pretended: PretendedMemory
) -> None:
    config = EngineConfig(model=str(make_model("llama", tmp_path)), device="cpu", gpu_memory_utilization=0.5)
    _, first = load_runner(config, lambda told: None)
    pretended.num_blocks = 10
    _, later = load_runner(with_kv_cache(config, first), lambda told: None)
    assert (first.num_kv_blocks, later.num_kv_blocks) == (20, 20)
    assert later.max_model_len == first.max_model_len
    assert len(pretended.steps) == 1


def test_weights_that_a_card_has_no_memory_for_are_refused_with_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCuda(monkeypatch, free=10 * GIB)
    memory = DeviceMemory.measure(GPU)
    monkeypatch.setattr(loading, "memory_of", lambda device: memory)

    def load_model(*_: Any, on_progress: Any, **__: Any) -> None:
        on_progress(LoadProgress("weights", 0, 14 * GIB))
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loading, "load_model", load_model)
    rule = r"memory for the weights of 14\.00 GiB; 10\.00 of 80\.00 GiB were free; got 'cuda:0'"
    with pytest.raises(ConfigError, match=rule):
        load_runner(EngineConfig(model=str(tmp_path), device="cpu"))


def test_fields_that_change_nothing_are_warned_of_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(model=str(make_model("llama", tmp_path)), device="cpu", num_kv_blocks=4)
    lora: dict[str, Any] = {"max_loras": 4, "max_lora_rank": 8, "max_cpu_loras": 4, "lora_dtype": "float32"}
    load_runner(attrs.evolve(config, gpu_memory_utilization=0.5, enforce_eager=True, **lora))
    assert [message.split(";")[0] for message in caplog.messages] == [
        "gpu_memory_utilization has no effect on a CPU",
        "enforce_eager has no effect on a CPU, which has no CUDA graphs",
        *(f"{name} has no effect without enable_lora" for name in lora),
    ]
    caplog.clear()
    load_runner(config)
    load_runner(attrs.evolve(config, enable_lora=True, **lora))
    assert caplog.messages == []
