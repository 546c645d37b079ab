"""What the host has to do in a decode step on a GPU: one copy in, one graph, one copy out, and one wait."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from tests.model.cuda.pretended_gpu import TRAFFIC, PretendedGpu, kernels_of_the_gpu, moved, wrapped
from tests.model.tiny import VOCAB_SIZE, make_model
from triolet.core.request.params import SamplingParams
from triolet.core.step_plan import PlanRow, RowStart, SampledToken, StepPlan
from triolet.model.backends.layers import mixture_of_experts
from triolet.model.backends.torch_decoder import Decoder
from triolet.model.cuda.device_rows import DeviceRows
from triolet.model.loading import decoder as loading
from triolet.model.loading.model import load_model
from triolet.model.loading.options import LoadOptions
from triolet.model.runner import ModelRunner

NUM_ROWS = 32
BLOCK_SIZE = 8
PROMPT = 5
SIZES: dict[str, Any] = {
    "num_blocks": 400,
    "block_size": BLOCK_SIZE,
    "max_num_seqs": NUM_ROWS,
    "max_model_len": 80,
    "max_num_batched_tokens": 512,
}
KINDS: dict[str, list[SamplingParams]] = {
    "greedy": [SamplingParams(temperature=0)],
    "temperature": [SamplingParams(temperature=0.8)],
    "top_p and top_k": [SamplingParams(temperature=0.9, top_p=0.9, top_k=20)],
    "penalties": [SamplingParams(temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.3)],
    "min_tokens": [SamplingParams(temperature=0.8, min_tokens=30, max_tokens=60)],
    "logprobs": [SamplingParams(temperature=0, logprobs=5)],
    "grammar mask": [SamplingParams(temperature=1.0)],
}
KINDS["mixed"] = [params for kind in KINDS.values() for params in kind]
MASKED = ("grammar mask", "mixed")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """The decoder that a GPU would have, on the CPU."""
    folder: Path = make_model("qwen3", tmp_path_factory.mktemp("model"), dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "can_plan", lambda *args: False)
        model = load_model(str(folder), LoadOptions(dtype="float32", device="cpu")).model
    assert isinstance(model, Decoder)
    return model


def make_gpu_runner(decoder: Decoder) -> ModelRunner:
    """A runner whose model, KV cache and tables are on the pretended GPU."""
    runner = ModelRunner(decoder, **SIZES, device=torch.device("cpu"), step_device=PretendedGpu())
    steps = runner._steps
    assert steps is not None
    steps._model, steps._cache = moved(decoder, wrapped), moved(steps._cache, wrapped)
    steps.rows = DeviceRows(moved(steps.rows.tables, wrapped))
    steps._buffers = moved(steps._buffers, wrapped)
    steps._packet, steps._results = wrapped(steps._packet), wrapped(steps._results)
    return runner


@pytest.fixture(scope="module")
def captured(decoder: Decoder) -> ModelRunner:
    """A runner on the pretended GPU, with its graphs."""
    with kernels_of_the_gpu():
        runner = make_gpu_runner(decoder)
        runner.capture_graphs()
    return runner


def starts(kind: str) -> tuple[RowStart, ...]:
    roll, kinds = random.Random(kind), KINDS[kind]
    return tuple(
        RowStart(
            row_id=row,
            request_id=f"r{row}",
            epoch=row,
            prompt_token_ids=tuple(roll.randrange(VOCAB_SIZE) for _ in range(PROMPT)),
            output_token_ids=(),
            params=kinds[row % len(kinds)],
            seed=roll.getrandbits(60),
            ending_token_ids=frozenset({3, 77}),
        )
        for row in range(NUM_ROWS)
    )


def plan(step: int, kind: str) -> StepPlan:
    """The first step computes the prompts, each one after it a token of each row."""
    roll = random.Random(f"{kind} {step}")
    start, length = (0, PROMPT) if step == 0 else (PROMPT + step - 1, 1)
    first, end = -(-start // BLOCK_SIZE), -(-(start + length) // BLOCK_SIZE)
    rows = []
    for row in range(NUM_ROWS):
        is_masked = kind in MASKED and row % 2 == 0
        mask = bytes(roll.getrandbits(8) | 1 for _ in range(VOCAB_SIZE // 8)) if is_masked else None
        blocks = tuple(row * 10 + place for place in range(first, end))
        rows.append(PlanRow(row, start, length, blocks, sample=True, mask=mask))
    return StepPlan(step + 1, (), starts(kind) if step == 0 else (), tuple(rows))


@pytest.mark.parametrize(
    ("kind", "num_steps"),
    [("mixed", 2), *(pytest.param(kind, 50, marks=pytest.mark.slow) for kind in KINDS)],
)
def test_a_decode_step_is_one_copy_in_one_graph_one_copy_out_and_one_wait(
    decoder: Decoder, captured: ModelRunner, kind: str, num_steps: int
) -> None:
    plain = ModelRunner(decoder, **SIZES, device=torch.device("cpu"))
    captured.reset()
    with kernels_of_the_gpu():
        most = 64 + (4 * -(-VOCAB_SIZE // 32) if kind in MASKED else 0)
        for step in range(num_steps + 1):
            TRAFFIC.clear()
            result = captured.execute(plan(step, kind))
            expected = plain.execute(plan(step, kind))
            assert [row.token_id for row in result.tokens] == [row.token_id for row in expected.tokens]
            for ours, theirs in zip(result.tokens, expected.tokens, strict=True):
                check_logprobs(ours, theirs)
            assert TRAFFIC.waits == ["event"]
            if step > 0:
                assert TRAFFIC.num_replays == 1
                assert TRAFFIC.num_launches == 0
                assert len(TRAFFIC.copies_in) == len(TRAFFIC.copies_out) == 1
                assert TRAFFIC.copies_in[0] <= most * NUM_ROWS
                assert TRAFFIC.copies_out[0] <= 64 * NUM_ROWS


LONG_PROMPT = 20


def mixed_plan(step: int) -> StepPlan:
    """The first step computes the prompts of half of the rows, the second those of the others beside decodes."""
    roll, half = random.Random(step), NUM_ROWS // 2
    prompt = tuple(roll.randrange(VOCAB_SIZE) for _ in range(LONG_PROMPT))
    new = [
        attrs.evolve(each, prompt_token_ids=prompt[: LONG_PROMPT - each.row_id % 3])
        for each in starts("mixed")[half * step : half * (step + 1)]
    ]
    rows = [
        PlanRow(
            each.row_id,
            0,
            len(each.prompt_token_ids),
            tuple(range(10 * each.row_id, 10 * each.row_id + 3)),
            sample=True,
        )
        for each in new
    ]
    if step:
        rows = [PlanRow(row, LONG_PROMPT - row % 3, 1, (), sample=True) for row in range(half)] + rows
    return StepPlan(step + 1, (), tuple(new), tuple(rows))


def test_a_step_with_prompts_is_one_graph_too_however_its_tokens_are_divided(
    decoder: Decoder, captured: ModelRunner
) -> None:
    plain = ModelRunner(decoder, **SIZES, device=torch.device("cpu"))
    captured.reset()
    with kernels_of_the_gpu():
        for step in range(2):
            TRAFFIC.clear()
            result, expected = captured.execute(mixed_plan(step)), plain.execute(mixed_plan(step))
            assert [row.token_id for row in result.tokens] == [row.token_id for row in expected.tokens]
            for ours, theirs in zip(result.tokens, expected.tokens, strict=True):
                check_logprobs(ours, theirs)
            assert (TRAFFIC.waits, TRAFFIC.num_replays) == (["event"], 1)
            assert len(TRAFFIC.copies_in) == len(TRAFFIC.copies_out) == 1


def check_logprobs(ours: SampledToken, theirs: SampledToken) -> None:
    assert (ours.logprobs is None) == (theirs.logprobs is None)
    if ours.logprobs is not None and theirs.logprobs is not None:
        assert ours.logprobs.token_ids == theirs.logprobs.token_ids
        assert ours.logprobs.rank == theirs.logprobs.rank
        assert ours.logprobs.logprobs == pytest.approx(theirs.logprobs.logprobs, abs=1e-4)


def test_a_step_is_submitted_before_the_one_before_it_was_read(
    decoder: Decoder, captured: ModelRunner
) -> None:
    plain, runner = ModelRunner(decoder, **SIZES, device=torch.device("cpu")), captured
    expected = [plain.execute(plan(step, "penalties")).tokens for step in range(5)]
    runner.reset()
    with kernels_of_the_gpu():
        pending = [runner.submit(plan(step, "penalties")) for step in range(2)]
        for step in range(2, 5):
            pending.append(runner.submit(plan(step, "penalties")))
            assert [row.token_id for row in pending[step - 2].result().tokens] == [
                row.token_id for row in expected[step - 2]
            ]
        assert [row.position for row in pending[-1].result().tokens] == [4] * NUM_ROWS
        assert pending[-1].result().tokens == expected[-1]
        assert pending[-2].result().tokens == expected[-2]


def test_a_read_from_the_device_is_a_wait_and_an_error_in_a_graph() -> None:
    TRAFFIC.clear()
    on_gpu = wrapped(torch.arange(4))
    assert int(on_gpu.sum()) == 6
    assert len(TRAFFIC.waits) == 1
    with pytest.raises(AssertionError, match="mixes tensors"):
        on_gpu + torch.arange(4)
    with pytest.raises(AssertionError, match="while a graph is captured"):
        PretendedGpu().capture(lambda: on_gpu[on_gpu > 1].sum().tolist())


def test_a_mixture_of_experts_is_one_graph_that_waits_for_no_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "can_plan", lambda *args: False)
    folder = str(make_model("qwen3-moe", tmp_path))
    one_by_one = load_model(folder, LoadOptions(dtype="float32", device="cpu")).model
    monkeypatch.setattr(mixture_of_experts, "GROUPED_DEVICES", ("cpu",))
    grouped = load_model(folder, LoadOptions(dtype="float32", device="cpu")).model
    assert isinstance(one_by_one, Decoder)
    assert isinstance(grouped, Decoder)
    assert (one_by_one.is_capturable, grouped.is_capturable) == (False, True)
    plain = ModelRunner(one_by_one, **SIZES, device=torch.device("cpu"))
    with kernels_of_the_gpu():
        captured = make_gpu_runner(grouped)
        captured.capture_graphs()
        for step in range(3):
            TRAFFIC.clear()
            result, expected = captured.execute(plan(step, "greedy")), plain.execute(plan(step, "greedy"))
            assert [row.token_id for row in result.tokens] == [row.token_id for row in expected.tokens]
            assert TRAFFIC.waits == ["event"]
        assert (TRAFFIC.num_replays, TRAFFIC.num_launches) == (1, 0)
