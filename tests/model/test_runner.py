from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import transformers

from tests.model.backends.fake_causal_model import VOCAB_SIZE, FakeCausalModel, expected_logits
from tests.model.tiny import VOCAB_SIZE as TINY_VOCAB_SIZE
from tests.model.tiny import make_model
from triolet.config.engine import EngineConfig
from triolet.core.journal import Journal, JournalEntry
from triolet.core.load_progress import LoadProgress
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.params import SamplingParams
from triolet.core.request.request import FinishReason, Request
from triolet.core.scheduling.scheduler import Scheduler, SchedulerConfig
from triolet.core.step_plan import PlanRow, RowFailure, RowStart, StepPlan, StepResult
from triolet.errors import ConfigError, InvariantViolated
from triolet.kernels.cpu.library import kernels
from triolet.model import runner as runner_module
from triolet.model.folder.hub import resolve_folder
from triolet.model.loading import model as loading
from triolet.model.loading.runner import choose_device, load_runner
from triolet.model.memory.kv_cache import longest_sequence
from triolet.model.runner import ModelRunner
from triolet.model.sampling.sampler import NOT_NUMBERS, SamplingBatch
from triolet.model.sampling.sampling_row import SamplingRow

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0)
BLOCK_SIZE = 4


def make_runner(model: FakeCausalModel | None = None, **fields: Any) -> ModelRunner:
    sizes = {"num_blocks": 64, "block_size": BLOCK_SIZE, "max_num_seqs": 8, "max_model_len": 100}
    return ModelRunner(model or FakeCausalModel(), **(sizes | fields), device=CPU)


def start(
    row_id: int,
    prompt: Sequence[int],
    output: Sequence[int] = (),
    params: SamplingParams = GREEDY,
    *,
    seed: int = 0,
    epoch: int = 1,
    ending: Iterable[int] = (),
) -> RowStart:
    return RowStart(
        row_id=row_id,
        request_id=f"request-{row_id}",
        epoch=epoch,
        prompt_token_ids=tuple(prompt),
        output_token_ids=tuple(output),
        params=params,
        seed=seed,
        ending_token_ids=frozenset(ending),
    )


def expected_answer(
    prompt: Sequence[int],
    length: int,
    params: SamplingParams = GREEDY,
    *,
    seed: int = 0,
    output: Sequence[int] = (),
    ending: Iterable[int] = (),
) -> list[int]:
    """Return the result of the whole sequence without runner, cache and other requests."""
    state = SamplingRow(
        params=params,
        seed=seed,
        vocab_size=VOCAB_SIZE,
        prompt_token_ids=prompt,
        output_token_ids=output,
        ending_token_ids=ending,
    )
    for _ in range(length):
        logits = expected_logits([*prompt, *state.output_token_ids])
        state.append(SamplingBatch([state], VOCAB_SIZE, CPU).sample(logits[None]).token_ids[0])
    return state.output_token_ids[len(output) :]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(VOCAB_SIZE) for _ in range(generator.randint(1, 30))] for _ in range(count)]


@attrs.define
class Driver:
    """Makes plans by hand: blocks come from a shuffled list, and prompts go in chunks of `chunk` tokens."""

    runner: ModelRunner
    chunk: int = 1000
    num_blocks: int = 64
    step_id: int = 0
    free: list[int] = attrs.field(init=False)
    tables: dict[int, list[int]] = attrs.field(factory=dict)
    lengths: dict[int, tuple[int, int]] = attrs.field(factory=dict)  # row: (computed, all)
    answers: dict[int, list[int]] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.free = random.Random(9).sample(range(self.num_blocks), self.num_blocks)

    def step(self, starts: Sequence[RowStart] = (), ended: Sequence[int] = ()) -> StepResult:
        for row_id in ended:
            self.free += self.tables.pop(row_id)
            del self.lengths[row_id]
        for begun in starts:
            self.tables[begun.row_id] = []
            self.lengths[begun.row_id] = (0, len(begun.prompt_token_ids) + len(begun.output_token_ids))
            self.answers.setdefault(begun.row_id, [])
        rows = tuple(self._row(row_id) for row_id in self.lengths)
        self.step_id += 1
        result = self.runner.execute(StepPlan(self.step_id, tuple(ended), tuple(starts), rows))
        for token in result.tokens:
            row_id = int(token.request_id.removeprefix("request-"))
            computed, length = self.lengths[row_id]
            self.lengths[row_id] = (computed, length + 1)
            self.answers[row_id].append(token.token_id)
        return result

    def _row(self, row_id: int) -> PlanRow:
        computed, length = self.lengths[row_id]
        end = min(length, computed + self.chunk)
        table = self.tables[row_id]
        new = [self.free.pop() for _ in range(-(-end // BLOCK_SIZE) - len(table))]
        table += new
        self.lengths[row_id] = (end, length)
        return PlanRow(row_id, computed, end - computed, tuple(new), end == length)


@pytest.mark.parametrize("chunk", [1000, 7, 1])
def test_a_batch_of_mixed_lengths_reads_exactly_its_own_tokens(chunk: int) -> None:
    driver = Driver(make_runner(), chunk)
    texts = prompts(5)
    driver.step([start(i, text) for i, text in enumerate(texts)])
    while any(len(answer) < 9 for answer in driver.answers.values()):
        driver.step()
    for i, text in enumerate(texts):
        assert driver.answers[i][:9] == expected_answer(text, 9)


def test_only_rows_at_their_end_are_sampled() -> None:
    model = FakeCausalModel()
    driver = Driver(make_runner(model), chunk=5)
    results = [driver.step([start(0, range(12)), start(1, range(3))]), driver.step(), driver.step()]
    sampled = [[(token.request_id, token.position) for token in result.tokens] for result in results]
    assert sampled == [[("request-1", 0)], [("request-1", 1)], [("request-0", 0), ("request-1", 2)]]
    assert model.num_tokens_of_steps == [8, 6, 3]
    assert [result.step_id for result in results] == [1, 2, 3]


def test_a_request_that_was_preempted_goes_on_where_it_was() -> None:
    params = SamplingParams(temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.3)
    driver = Driver(make_runner())
    text = prompts(1)[0]
    whole = expected_answer(text, 12, params, seed=5)
    driver.step([start(0, text, params=params, seed=5)])
    driver.step()
    driver.step()
    again = driver.step([start(3, text, whole[:3], params, seed=5, epoch=2)], ended=[0])
    assert [(token.epoch, token.position) for token in again.tokens] == [(2, 3)]
    while len(driver.answers[3]) < 9:
        driver.step()
    assert driver.answers[0] + driver.answers[3] == whole


def test_a_row_may_begin_behind_cached_blocks_of_another() -> None:
    runner = make_runner()
    text = list(range(10))
    runner.execute(StepPlan(1, (), (start(0, text),), (PlanRow(0, 0, 10, (9, 4, 30), True),)))
    longer = [*range(8), 50, 51]  # shares two full blocks
    result = runner.execute(StepPlan(2, (0,), (start(1, longer),), (PlanRow(1, 8, 2, (9, 4, 2), True),)))
    assert [token.token_id for token in result.tokens] == expected_answer(longer, 1)


def test_a_seed_gives_the_same_answer_alone_in_a_batch_and_in_another_order() -> None:
    texts = prompts(6, seed=1)
    kinds = [SamplingParams(), SamplingParams(top_p=0.7), SamplingParams(temperature=1.5, top_k=9)]
    starts = [start(i, text, params=kinds[i % 3], seed=i) for i, text in enumerate(texts)]
    whole = [expected_answer(text, 8, kinds[i % 3], seed=i) for i, text in enumerate(texts)]
    for order in (starts, starts[::-1]):
        driver = Driver(make_runner(), chunk=11)
        for begun in order:  # one joins per step, so that the sampled rows change again and again
            driver.step([begun])
        while any(len(answer) < 8 for answer in driver.answers.values()):
            driver.step()
        assert [driver.answers[i][:8] for i in range(6)] == whole
    assert len({tuple(answer) for answer in whole}) == 6


def test_min_tokens_and_penalties_see_what_the_runner_sampled() -> None:
    params = SamplingParams(
        temperature=0, min_tokens=4, max_tokens=9, presence_penalty=2.0, frequency_penalty=2.0
    )
    ending = range(0, VOCAB_SIZE, 2)
    driver = Driver(make_runner())
    driver.step([start(0, [1, 2, 3], params=params, ending=ending)])
    for _ in range(7):
        driver.step()
    assert driver.answers[0] == expected_answer([1, 2, 3], 8, params, ending=ending)
    assert all(token_id % 2 for token_id in driver.answers[0][:4])


def test_logprobs_come_with_the_token_for_rows_that_asked() -> None:
    driver = Driver(make_runner())
    asked = SamplingParams(temperature=0, logprobs=3)
    first, second = driver.step([start(0, [5]), start(1, [5], params=asked)]).tokens
    assert first.logprobs is None
    assert second.logprobs is not None
    logprobs = expected_logits([5]).log_softmax(dim=0)
    assert list(second.logprobs.token_ids) == [second.token_id, *logprobs.topk(3).indices.tolist()]
    assert second.logprobs.logprobs[0] == pytest.approx(logprobs.max().item())


def test_a_row_with_logits_that_are_not_numbers_fails_alone_and_may_leave() -> None:
    driver = Driver(make_runner(FakeCausalModel(poison=13)))
    result = driver.step(
        [start(0, [1, 2]), start(1, [13, 2], epoch=7), start(2, [4], params=SamplingParams())]
    )
    assert result.failures == (RowFailure("request-1", 7, NOT_NUMBERS),)
    assert [token.request_id for token in result.tokens] == ["request-0", "request-2"]
    driver.step(ended=[1])
    assert driver.answers[0] == expected_answer([1, 2], 2)


def test_sampling_tensors_are_made_again_only_when_the_sampled_rows_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    class Counted(SamplingBatch):
        def __init__(self, rows: Sequence[SamplingRow], *args: Any) -> None:
            made.append(len(rows))
            super().__init__(rows, *args)

    monkeypatch.setattr(runner_module, "SamplingBatch", Counted)
    driver = Driver(make_runner(), chunk=4)
    driver.step([start(0, [1]), start(1, [2])])
    driver.step()
    driver.step([start(2, range(6))])  # its first chunk is not sampled
    driver.step()
    driver.step()
    driver.step(ended=[0])
    assert made == [0, 2, 3, 2]


def test_after_a_reset_no_row_is_known_and_every_row_is_free() -> None:
    runner = make_runner()
    driver = Driver(runner)
    driver.step([start(0, [1, 2, 3])])
    runner.reset()
    with pytest.raises(InvariantViolated, match=r"row 0 must have been started"):
        runner.execute(StepPlan(2, (), (), (PlanRow(0, 3, 1, (), True),)))
    runner.reset()
    fresh = Driver(runner)
    fresh.step([start(0, [7, 8])])
    fresh.step()
    assert fresh.answers[0] == expected_answer([7, 8], 2)


def one(row: PlanRow, starts: tuple[RowStart, ...] = (), ended: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(2, ended, starts, (row,))


FIRST = PlanRow(1, 0, 1, (50,), True)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (one(PlanRow(3, 0, 1, (5,), True)), "row 3 must have been started"),
        (one(PlanRow(8, 0, 1, (5,), True)), r"row_id must be in \[0, 8\); got 8"),
        (one(PlanRow(-1, 0, 1, (5,), True)), r"row_id must be in \[0, 8\); got -1"),
        (one(PlanRow(0, 5, 1, (), True)), "start must be 6 for request-0"),
        (one(PlanRow(0, 7, 1, (), True)), "start must be 6 for request-0"),
        (one(PlanRow(0, 6, 2, (), True)), "request-0 has 7 tokens"),
        (one(PlanRow(0, 6, 0, (), False)), "request-0 has 7 tokens"),
        (one(PlanRow(0, 6, 1, (), False)), "request-0 has 7 tokens"),
        (one(FIRST, (start(1, [1, 2]),)), "request-1 has 2 tokens"),
        (one(PlanRow(1, -1, 2, (5,), True), (start(1, [1]),)), "start must be 0 for request-1"),
        (one(PlanRow(1, 0, 5, (5,), True), (start(1, range(5)),)), "must have blocks for 5 tokens; got 1 of 4"),
        (one(PlanRow(1, 0, 1, (64,), True), (start(1, [1]),)), r"block ids of request-1 must be in \[0, 64\)"),
        (one(PlanRow(1, 0, 1, (-1,), True), (start(1, [1]),)), r"block ids of request-1 must be in \[0, 64\)"),
        (one(PlanRow(1, 0, 1, tuple(range(26)), True), (start(1, [1]),)), "must have at most 25 blocks; got 26"),
        (one(FIRST, (start(1, [VOCAB_SIZE]),)), r"token ids of request-1 must be in \[0, 97\); got 97 to 97"),
        (one(FIRST, (start(1, [-1]),)), r"token ids of request-1 must be in \[0, 97\); got -1 to -1"),
        (one(FIRST, (start(1, []),)), "must have 1 to 100 tokens; got 0"),
        (one(FIRST, (start(1, [1] * 101),)), "must have 1 to 100 tokens; got 101"),
        (one(FIRST, (start(1, [1], params=SamplingParams(logit_bias={97: 1.0})),)), "admitted with token_id"),
        (one(FIRST, (start(0, [1]),)), "row 0 is request-0's; got request-0"),
        (StepPlan(2, (), (), (PlanRow(0, 6, 1, (), True), PlanRow(0, 7, 1, (), True))), "must have rows, each once"),
        (StepPlan(2, (), (), ()), "must have rows, each once"),
        (one(FIRST, ended=(9,)), r"row_id must be in \[0, 8\); got 9"),
    ],
)  # fmt: skip
def test_a_plan_that_contradicts_the_table_is_refused_before_anything_is_computed(
    plan: StepPlan, message: str
) -> None:
    model = FakeCausalModel()
    runner = make_runner(model)
    Driver(runner).step([start(0, range(6))])  # six computed tokens and a seventh that was sampled
    with pytest.raises(InvariantViolated, match=message):
        runner.execute(plan)
    assert len(model.num_tokens_of_steps) == 1


def test_rows_that_are_ended_need_not_exist() -> None:
    runner = make_runner()
    result = runner.execute(StepPlan(1, tuple(range(8)), (start(0, [3]),), (PlanRow(0, 0, 1, (0,), True),)))
    assert [token.token_id for token in result.tokens] == expected_answer([3], 1)


# --------------------------------------------------------------------------------------------- with the real scheduler


def run_all(
    runner: ModelRunner, config: SchedulerConfig, requests: Sequence[Request]
) -> tuple[list[JournalEntry], Scheduler]:
    journal = Journal()
    scheduler = Scheduler(config, journal)
    entries = []
    results: list[StepResult] = []

    def step() -> bool:
        """Plan as far ahead as is allowed, and apply the oldest result."""
        while scheduler.may_plan and (plan := scheduler.plan_step(0.0)) is not None:
            results.append(runner.execute(plan))
        if not results:
            return False
        scheduler.apply(results.pop(0), 0.0)
        return True

    for request in requests:  # one joins per step
        entries.append(journal.open(request))
        scheduler.add(entries[-1])
        step()
    while step():
        pass
    scheduler.check()
    return entries, scheduler


@pytest.mark.parametrize("is_ahead", [False, True], ids=["", "two steps in flight"])
def test_under_the_scheduler_every_answer_is_the_one_computed_alone_whatever_is_preempted_chunked_or_cached(
    is_ahead: bool,
) -> None:
    generator = random.Random(12)
    kinds = [
        SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.3),
        SamplingParams(max_tokens=20, top_p=0.9, presence_penalty=0.5),
        SamplingParams(max_tokens=20, top_k=5, min_tokens=10),
    ]
    common = [generator.randrange(VOCAB_SIZE) for _ in range(13)]
    requests = [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=tuple(
                common + [generator.randrange(VOCAB_SIZE) for _ in range(generator.randint(1, 15))]
            ),
            params=kinds[i % 3],
            seed=i * 1000,
            max_tokens=20,
            eos_token_ids=(3, 4),
        )
        for i in range(40)
    ]
    config = SchedulerConfig(
        num_blocks=26,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=17,
        max_model_len=60,
        cache_key=b"k",
        async_scheduling=is_ahead,
    )
    runner = make_runner(num_blocks=26, block_size=4, max_num_seqs=6, max_model_len=60)
    entries, scheduler = run_all(runner, config, requests)
    assert scheduler.counters.num_preemptions > 0
    assert scheduler.counters.prefix_cache_hits > 0
    for entry in entries:
        request = entry.request
        assert entry.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        alone = expected_answer(
            request.prompt_token_ids,
            len(entry.output_token_ids),
            request.params,
            seed=request.seed,
            ending=request.ending_token_ids,
        )
        assert entry.output_token_ids == alone


# ------------------------------------------------------------------------------------------------------------- loading


def test_the_device_is_chosen_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == CPU
    with pytest.raises(
        ConfigError, match=r"device must be auto or cpu, since torch finds no CUDA device here; got 'cuda'"
    ):
        choose_device("cuda")
    with pytest.raises(
        ConfigError, match=r"device must be one of auto, cpu, cpu:CORES, cuda, cuda:N; got 'tpu'"
    ):
        choose_device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match=r"device must be below cuda:2, since torch finds 2 CUDA devices"):
        choose_device("cuda:2")


def test_the_longest_sequence_is_what_is_asked_for_or_what_model_and_cache_allow() -> None:
    assert longest_sequence(None, 2048, 4096) == 2048
    assert longest_sequence(None, 2048, 1024) == 1024
    assert longest_sequence(500, 2048, 1024) == 500
    with pytest.raises(
        ConfigError, match=r"max_model_len must be at most 2048, the positions of this model; got 2049"
    ):
        longest_sequence(2049, 2048, 4096)
    with pytest.raises(
        ConfigError, match=r"max_model_len must be at most 1024, the tokens that the KV cache holds; got 1025"
    ):
        longest_sequence(1025, 2048, 1024)
    with pytest.raises(
        ConfigError, match=r"num_kv_blocks must be enough for a prompt token and an answer token; got 1"
    ):
        longest_sequence(None, 2048, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"), eos_token_id=7)


def test_a_loaded_runner_says_what_it_is(folder: Path) -> None:
    reports: list[LoadProgress] = []
    _, info = load_runner(
        EngineConfig(
            model=str(folder),
            device="cpu",
            num_kv_blocks=10,
            block_size=8,
            max_num_seqs=3,
            calibration="off",
        ),
        reports.append,
    )
    assert info == ModelInfo(
        folder=str(folder),
        architecture="LlamaForCausalLM",
        backend="native",
        vocab_size=TINY_VOCAB_SIZE,
        max_position=256,
        max_model_len=80,
        num_kv_blocks=10,
        block_size=8,
        dtype="float32",
        device="cpu",
        cpu_kernels=found.target.name if (found := kernels()) else None,
        calibration={"argmax_filter_rows": 8, "few_rows": 4} if found else {},
        generation=info.generation,
        soft_prompts=info.soft_prompts,
    )
    assert info.soft_prompts is not None
    assert info.generation.eos_token_ids == (7,)
    assert reports[-1].done_bytes == reports[-1].total_bytes > 0


def test_the_kernels_are_compiled_once_the_model_is_found_and_before_its_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []

    def find(*args: Any, **options: Any) -> Path:
        events.append("folder")
        return resolve_folder(*args, **options)

    monkeypatch.setattr(loading, "resolve_folder", find)
    monkeypatch.setattr(loading, "kernels", lambda: events.append("kernels"))
    config = EngineConfig(model=str(folder), device="cpu", num_kv_blocks=4)
    load_runner(config, lambda progress: events.append(progress.stage))
    assert events[:3] == ["folder", "kernels", "weights"]


def test_without_numbers_the_cache_holds_what_all_sequences_could_need(folder: Path) -> None:
    _, info = load_runner(EngineConfig(model=str(folder), device="cpu", max_num_seqs=2))
    assert (info.max_model_len, info.num_kv_blocks) == (256, 2 * 256 // 16)
    _, info = load_runner(EngineConfig(model=str(folder), device="cpu", max_num_seqs=2, max_model_len=33))
    assert (info.max_model_len, info.num_kv_blocks) == (33, 2 * 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_model_len": 257}, "max_model_len must be at most 256"),
        (
            {"max_model_len": 100, "num_kv_blocks": 6},
            "max_model_len must be at most 96, the tokens that the KV cache",
        ),
        ({"kv_cache_bytes": 100}, "kv_cache_bytes must be at least one block"),
        ({"device": "tpu"}, "device must be one of"),
    ],
)
def test_a_set_up_that_can_not_work_is_refused_by_name(
    folder: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_runner(EngineConfig(**({"model": str(folder), "device": "cpu"} | fields)))


@pytest.mark.slow
def test_a_real_model_answers_as_transformers_does_whatever_is_preempted_chunked_or_cached(
    folder: Path,
) -> None:
    config = SchedulerConfig(
        num_blocks=30,
        block_size=8,
        max_num_seqs=8,
        max_num_batched_tokens=7,
        max_model_len=120,
        cache_key=b"k",
    )
    runner, _ = load_runner(
        EngineConfig(
            model=str(folder), device="cpu", num_kv_blocks=30, block_size=8, max_num_seqs=8, max_model_len=120
        )
    )
    generator = random.Random(2)
    common = [generator.randrange(TINY_VOCAB_SIZE) for _ in range(17)]
    requests = [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=(*common, *(generator.randrange(TINY_VOCAB_SIZE) for _ in range(1 + 2 * i))),
            params=SamplingParams(temperature=0, max_tokens=32),
            seed=0,
            max_tokens=32,
        )
        for i in range(16)
    ]
    entries, scheduler = run_all(runner, config, requests)
    assert scheduler.counters.num_preemptions > 0
    assert scheduler.counters.prefix_cache_hits > 0
    theirs: Any = transformers.LlamaForCausalLM.from_pretrained(folder)
    theirs.generation_config.eos_token_id = None
    for entry in entries:
        prompt = torch.tensor([entry.request.prompt_token_ids])
        answer = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=32, do_sample=False, pad_token_id=0
        )
        assert entry.output_token_ids == answer[0, prompt.shape[1] :].tolist()


def test_a_runner_of_a_numbered_gpu_computes_each_step_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[torch.device] = []
    runner = make_runner()

    def set_device(place: torch.device) -> None:
        places.append(place)
        runner._device = CPU  # there is no such GPU here to go on with

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    runner._device = torch.device(
        "cuda", 1
    )  # Triton launches on the thread's device, whatever the tensors say
    runner.execute(StepPlan(1, (), (start(0, [1, 2]),), (PlanRow(0, 0, 2, (0,), sample=True),)))
    assert places == [torch.device("cuda", 1)]
