"""Section `bench` of `gpu.py`: speed in percent of what the card's measured ceilings allow."""

from __future__ import annotations

import logging
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import trio
from gpu_place import (
    KINDS,
    Case,
    Figures,
    Place,
    by_flash_attention,
    flash_attentions,
    randn,
    read_all,
)
from gpu_steps import Draw, sampling_of
from torch import Tensor

from triolet import EngineConfig, SamplingParams
from triolet.errors import InvariantViolated

SERVING_S = 60.0  # of random requests; the whole run has eight minutes
RANDOM_NUMBERS = 2**24  # repeated to fill the weights of a large model
MODELS: dict[str, dict[str, Any]] = {
    "0.6B": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256, "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "tie_word_embeddings": True,
    },
}  # fmt: skip


def bench(place: Place) -> Iterator[Case]:
    """Yield the table: the small model first, so that a run that is cut off has most rows."""
    small, large = ("tiny", "tiny") if place.dry_run else ("0.6B", "8B")
    # First, since all that follows finds the kernels that were compiled for what came before.
    yield f"kernels compiled while serving {small}", Loaded(place, small).serving
    yield (
        "decode attention",
        partial(_kernel_speed, place, "decode", [(1, 1024)] * (2 if place.dry_run else 32)),
    )
    prompt = [(64, 64) if place.dry_run else (2048, 2048)]
    prefill = partial(_kernel_speed, place, "prefill", prompt)
    yield "prefill attention", prefill
    for flash in flash_attentions(place):
        yield f"prefill attention by {flash}", by_flash_attention(flash, prefill)
    yield "sampling", partial(_sampling, place)
    tables = ((small, {1: 50, 256: 65}), (large, {1: 85, 256: 60}))
    for model, goals in tables[:1] if place.dry_run else tables:
        loaded = Loaded(place, model)
        for batch, goal in goals.items():
            batch, context = (min(batch, 4), 20) if place.dry_run else (batch, 128 if batch == 1 else 1024)
            yield f"decode {model} batch {batch}", partial(loaded.decode, batch, context, goal)
        yield f"GPU idle {model}", loaded.idle
        yield f"TTFT {model}", loaded.first_token
        yield f"nano-vllm workload {model}", loaded.nano
        yield f"transformers {model}", loaded.transformers
        if model == small:
            yield f"CUDA graphs {model}", loaded.graphs
        loaded.forget()


def _kernel_speed(place: Place, kind: str, lens: list[tuple[int, int]], **options: Any) -> Figures:
    import kernels_gpu

    kernels_gpu.DEVICE = place.device
    model = kernels_gpu.Heads("8B", 32, 8, 128, 4096, 14336)
    trial = kernels_gpu.attention_trial(model, kind, lens, **options)
    taken_s = place.time_s(trial.run, 30)
    copy_s, product_s = (
        trial.moved_bytes / place.ceilings["copy_bytes_per_s"],
        int(trial.shape["flop"]) / place.ceilings["matmul_flop_per_s"],
    )
    return {
        "ms": taken_s * 1000, "gb_per_s": trial.moved_bytes / taken_s / 1e9,
        "tflop_per_s": int(trial.shape["flop"]) / taken_s / 1e12,
        **_of_floor(max(copy_s, product_s), taken_s, 85 if kind == "decode" else None), **trial.shape,
    }  # fmt: skip


def _of_floor(floor_s: float, taken_s: float, goal_percent: float | None) -> Figures:
    percent = round(100 * floor_s / taken_s, 1)
    return {"floor_ms": floor_s * 1000, "percent_of_ceiling": percent, "goal_percent": goal_percent}


def _sampling(place: Place) -> Figures:
    """Time the sampling of a step, from logits to tokens in the tables, of 256 rows of the larger vocabulary."""
    num_rows, vocab_size = (4, 1000) if place.dry_run else (256, 151_936)
    logits = randn(place, torch.bfloat16, num_rows, vocab_size)
    figures: Figures = {"rows": num_rows, "vocab_size": vocab_size, "goal_ms": 0.15}
    for kind, draw in {
        "greedy": Draw(temperature=0.0),
        "temperature": Draw(temperature=0.9),
        "top_p_and_top_k": Draw(temperature=0.7, top_k=20, top_p=0.9),
    }.items():
        figures[f"{kind}_ms"] = 1000 * place.time_s(sampling_of(place, logits, draw), 20)
    figures["floor_ms"] = 1000 * logits.nbytes / place.ceilings["copy_bytes_per_s"]
    return figures


class RandomCheckpoint:
    """Stands in for a checkpoint's files: tensors of the right shapes, filled with random numbers as they are read."""

    def __init__(self, fields: dict[str, Any]) -> None:
        import transformers

        from triolet.model.folder.checkpoint import StoredTensor

        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(_config(fields))
        self._numbers = (
            torch.randn(RANDOM_NUMBERS, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
        )
        self.tensors = {
            name: StoredTensor(tuple(tensor.shape), "BF16", 2 * tensor.numel(), Path(), 0)
            for name, tensor in model.state_dict().items()
            if not (name == "lm_head.weight" and fields["tie_word_embeddings"])
        }

    def body_bytes(self) -> int:
        """Return the bytes that every step reads: all, but an embedding that is not the head as well."""
        tied = "lm_head.weight" not in self.tensors
        return sum(
            each.num_bytes
            for name, each in self.tensors.items()
            if tied or name != "model.embed_tokens.weight"
        )

    def unstacked(self, stacks: Sequence[tuple[str, tuple[str, ...]]]) -> RandomCheckpoint:
        assert not stacks, "a model like Llama has no stacks of experts"
        return self

    def dtype_of(self, name: str) -> torch.dtype:
        return torch.bfloat16

    def read(self, name: str, out: Tensor | None = None) -> Tensor:
        tensor = torch.empty(self.tensors[name].shape, dtype=torch.bfloat16) if out is None else out
        for part in tensor.view(-1).split(RANDOM_NUMBERS):
            part.copy_(self._numbers[: len(part)])
        return tensor

    def block_format(self, name: str) -> None:
        return

    def read_blocks(self, name: str) -> Any:
        raise InvariantViolated(f"tensor {name!r} has no blocks")

    def map_blocks(self, name: str) -> None:
        return


class LateKernels(logging.Handler):
    """Collects what is said of kernels that are compiled or loaded after the start."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.labels: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.labels.append(record.getMessage())

    @contextmanager
    def counted(self, logger: logging.Logger) -> Iterator[None]:
        """Listen to a logger within this scope."""
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)


def _config(fields: dict[str, Any]) -> Any:
    import transformers

    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return transformers.LlamaConfig(
        **fields, **ids, architectures=["LlamaForCausalLM"], max_position_embeddings=8192
    )


class Loaded:
    """Model of random weights that is loaded once for all rows of the table; nothing is written to a disk."""

    def __init__(self, place: Place, model: str) -> None:
        self._place, self._name, self._fields = place, model, MODELS[model]
        self._model: Any = None
        self._body_bytes = 0

    def forget(self) -> None:
        """Free the weights."""
        self._model = None

    def _folder(self, name: str) -> str:
        """Write config.json, and let runners be made with the random weights, loaded once."""
        from triolet.model.loading import folder, runner
        from triolet.model.loading.model import load_model
        from triolet.model.loading.options import LoadOptions

        _config(self._fields).save_pretrained(name)
        if self._model is None:
            checkpoint = RandomCheckpoint(self._fields)
            self._body_bytes = checkpoint.body_bytes()
            with mock.patch.object(folder, "Checkpoint", SimpleNamespace(open=lambda _: checkpoint)):
                self._model = load_model(name, LoadOptions(dtype="bfloat16", device=self._place.device))
        mock.patch.object(runner, "load_model", return_value=self._model).start()
        return name

    @property
    def _kv_bytes(self) -> int:
        """Bytes of keys and values of one token."""
        fields: dict[str, int] = self._fields
        return 4 * fields["num_hidden_layers"] * fields["num_key_value_heads"] * fields["head_dim"]

    def _prompt_s(self, num_tokens: int) -> float:
        """Return the least time for a prompt: products of all weights, and causal attention."""
        fields: dict[str, int] = self._fields
        heads = fields["num_attention_heads"] * fields["head_dim"]
        attention = 2 * num_tokens**2 * heads * fields["num_hidden_layers"]
        return (self._body_bytes * num_tokens + attention) / self._place.ceilings["matmul_flop_per_s"]

    def _step_s(self, batch: int, num_kv_tokens: int) -> float:
        """Return the least time for a decode step: the products, then attention at the speed of memory."""
        copy, products = self._place.ceilings["copy_bytes_per_s"], self._place.ceilings["matmul_flop_per_s"]
        weights_s = max(self._body_bytes / copy, self._body_bytes * batch / products)
        return weights_s + num_kv_tokens * self._kv_bytes / copy

    def _steps(self, batch: int, context: int, num_steps: int) -> Callable[[], None]:
        """Return a function that computes the next decode step, for at most so many."""
        from triolet.core.step_plan import PlanRow, RowStart, StepPlan
        from triolet.model.loading.runner import load_runner

        each = -(-(context + num_steps + 1) // 16)
        with tempfile.TemporaryDirectory() as name:
            runner, _ = load_runner(EngineConfig(
                model=self._folder(name), dtype="bfloat16", device=self._place.device, num_kv_blocks=batch * each,
                max_num_seqs=batch, max_model_len=context + num_steps + 1,
            ))  # fmt: skip
        for layer in runner._cache:  # zeros would be faster than keys and values
            for tensor in (layer.keys, layer.values):
                tensor.normal_()
        params = SamplingParams(temperature=0.0, max_tokens=num_steps + 1, ignore_eos=True)
        starts = tuple(
            RowStart(
                row_id=i, request_id=f"r{i}", epoch=i + 1,
                prompt_token_ids=tuple((i + j) % 500 for j in range(context)),
                output_token_ids=(), params=params, seed=i, ending_token_ids=frozenset(),
            )
            for i in range(batch)
        )  # fmt: skip
        blocks = [tuple(range(i * each, (i + 1) * each)) for i in range(batch)]
        first = tuple(PlanRow(i, context - 1, 1, blocks[i], sample=True) for i in range(batch))
        runner.execute(StepPlan(1, (), starts, first))
        count = 0

        def step() -> None:
            nonlocal count
            count += 1
            rows = tuple(PlanRow(i, context - 1 + count, 1, (), sample=True) for i in range(batch))
            result = runner.execute(StepPlan(1 + count, (), (), rows))
            assert len(result.rows) == batch and result.out_of_memory is None, result

        return step

    def decode(self, batch: int, context: int, goal: float) -> Figures:
        """Measure decode steps of the runner: a plan in, tokens on the host out; median of five rounds of ten."""
        rounds, length = (1, 2) if self._place.dry_run else (5, 10)
        step = self._steps(batch, context, rounds * length + 3)
        for _ in range(3):
            step()
        times = []
        for _ in range(rounds):
            began_s = time.perf_counter()
            for _ in range(length):
                step()
            times.append((time.perf_counter() - began_s) / length)
        taken_s = statistics.median(times)
        return {
            "model": self._name, "batch": batch, "context": context, "step_ms": taken_s * 1000,
            "step_ms_min": min(times) * 1000, "step_ms_max": max(times) * 1000, "tokens_per_s": batch / taken_s,
            **_of_floor(self._step_s(batch, batch * context), taken_s, goal),
        }  # fmt: skip

    def idle(self) -> Figures:
        """Measure the share of decode steps in which no kernel runs."""
        if self._place.dry_run:
            step = self._steps(2, 20, 3)
            step()
            return {"model": self._name, "batch": 2, "note": "a pretended device is never busy"}
        from torch.profiler import ProfilerActivity, profile

        step = self._steps(32, 1024, 20)
        for _ in range(5):
            step()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            began_s = time.perf_counter()
            for _ in range(10):
                step()
            taken_s = time.perf_counter() - began_s
        busy_s = sum(event.self_device_time_total for event in trace.key_averages()) / 1e6
        percent = round(100 * (1 - busy_s / taken_s), 1)
        return {"model": self._name, "batch": 32, "idle_percent": percent, "goal_percent_at_most": 5}

    def graphs(self) -> Figures:
        """Measure how long the capture of all graphs takes, and the memory that they keep."""
        from triolet.model.loading.runner import load_runner

        sizes: dict[str, Any] = (
            {"max_num_seqs": 4, "max_num_batched_tokens": 32}
            if self._place.dry_run
            else {"max_num_seqs": 256}
        )
        with tempfile.TemporaryDirectory() as name:
            config = EngineConfig(
                model=self._folder(name), dtype="bfloat16", device=self._place.device, num_kv_blocks=512,
                enforce_eager=True, **sizes,
            )  # fmt: skip
            runner, _ = load_runner(config)
        if self._place.dry_run:
            assert not runner.capture_graphs()
            return {"model": self._name, "note": "a pretended device captures nothing"}
        torch.cuda.empty_cache()
        before, began_s, counted = torch.cuda.memory_reserved(), time.perf_counter(), [0]
        is_captured = runner.capture_graphs(lambda done, total: counted.__setitem__(0, total))
        taken_s = time.perf_counter() - began_s
        return {
            "model": self._name, "graphs": counted[0], "seconds_to_capture": taken_s, "goal_seconds_at_most": 15,
            "mib": (torch.cuda.memory_reserved() - before) / 2**20, "passed": is_captured,
        }  # fmt: skip

    def serving(self) -> Figures:
        """Count the kernels that are compiled or loaded under random requests, once the engine is ready."""
        from triolet.kernels import _triton

        seconds = 1.0 if self._place.dry_run else SERVING_S
        draw, late = random.Random(1), LateKernels()

        def request() -> tuple[list[int], SamplingParams]:
            most = 12 if self._place.dry_run else 1500
            prompt = [draw.randrange(500) for _ in range(draw.randint(1, most))]
            kind = {**draw.choice([*KINDS.values()]), "max_tokens": draw.randint(10, 64), "ignore_eos": True}
            return prompt, SamplingParams(**kind, seed=draw.getrandbits(30))

        async def measure(each: Any) -> int:
            count = 0

            async def read() -> None:
                nonlocal count
                while trio.current_time() < end_s:
                    await trio.sleep(draw.expovariate(4.0))
                    prompt, params = request()
                    await read_all(each, [prompt], [params])
                    count += 1

            with late.counted(logging.getLogger(_triton.__name__)):
                end_s = trio.current_time() + seconds
                async with trio.open_nursery() as nursery:
                    for _ in range(4 if self._place.dry_run else 48):
                        nursery.start_soon(read)
            return count

        num_requests = self._with_engine(measure, max_num_seqs=32)
        return {
            "model": self._name, "seconds_of_load": seconds, "requests": num_requests, "late_kernels": late.labels[:5],
            "goal": 0, "passed": not late.labels,
        }  # fmt: skip

    def first_token(self) -> Figures:
        """Measure a prompt of 2,048 tokens through an engine that is idle; median of five."""
        length = 40 if self._place.dry_run else 2048

        async def measure(each: Any) -> list[float]:
            times = []
            for index in range(6):
                prompt = [(index * 37 + j) % 500 for j in range(length)]  # no prefix in common
                began_s = trio.current_time()
                async with each.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True)) as stream:
                    async for _ in stream:
                        pass
                times.append(trio.current_time() - began_s)
            return times[1:]

        taken_s = statistics.median(self._with_engine(measure, max_num_batched_tokens=length))
        times_floor = round(taken_s / self._prompt_s(length), 2)
        return {
            "model": self._name, "prompt": length, "ttft_ms": taken_s * 1000, "times_floor": times_floor,
            "goal_times_floor": 1.6, **_of_floor(self._prompt_s(length), taken_s, None),
        }  # fmt: skip

    def nano(self) -> Figures:
        """Measure nano-vllm's workload: 256 prompts of 100 to 1,024 tokens, answers as long, drawn at 0.6."""
        number, least, most = (6, 4, 12) if self._place.dry_run else (256, 100, 1024)
        draw = random.Random(0)
        prompts = [[draw.randrange(500) for _ in range(draw.randint(least, most))] for _ in range(number)]
        lengths = [draw.randint(least, most) for _ in range(number)]
        params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length) for length in lengths]

        async def measure(each: Any) -> float:
            await read_all(each, prompts[:2], params[:2])
            began_s = trio.current_time()
            answers = await read_all(each, prompts, params)
            assert [len(token_ids) for token_ids, _ in answers] == lengths
            return trio.current_time() - began_s

        taken_s = self._with_engine(measure, max_num_seqs=number)
        floor_s = sum(self._prompt_s(len(prompt)) for prompt in prompts)
        for step in range(max(lengths)):
            alive = [
                len(prompt) + step for prompt, length in zip(prompts, lengths, strict=True) if length > step
            ]
            floor_s += self._step_s(len(alive), sum(alive))
        return {
            "model": self._name, "requests": number, "output_tokens": sum(lengths), "seconds": taken_s,
            "tokens_per_s": sum(lengths) / taken_s, **_of_floor(floor_s, taken_s, 55),
        }  # fmt: skip

    def _with_engine(self, measure: Callable[[Any], Any], **fields: Any) -> Any:
        """Run a measurement with an engine whose runner is in a thread: the random weights are in this process."""
        from triolet import open_engine

        blocks: dict[str, Any] = {"num_kv_blocks": 128} if self._place.dry_run else {}

        async def run(folder: str) -> Any:
            config = EngineConfig(
                model=folder, dtype="bfloat16", device=self._place.device, runner="thread",
                enable_prefix_caching=False, **fields, **blocks,
            )  # fmt: skip
            async with open_engine(config) as each:
                return await measure(each)

        with tempfile.TemporaryDirectory() as name:
            return trio.run(run, self._folder(name))

    def transformers(self) -> Figures:
        """Measure transformers' continuous batching with 32 prompts of 512 tokens, and triolet beside it."""
        import transformers

        number, length, num_new = (2, 8, 4) if self._place.dry_run else (32, 512, 64)
        prompts = [[(i * 37 + j) % 500 for j in range(length)] for i in range(number)]
        params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_new)] * number

        async def measure(each: Any) -> float:
            await read_all(each, prompts[:2], params[:2])
            began_s = trio.current_time()
            await read_all(each, prompts, params)
            return trio.current_time() - began_s

        ours_s = self._with_engine(measure, max_num_seqs=number)
        figures = {"model": self._name, "requests": number, "triolet_tokens_per_s": number * num_new / ours_s}
        if self._place.dry_run:
            return {**figures, "note": "transformers' continuous batching needs a GPU"}
        with torch.device(self._place.device):
            model = transformers.AutoModelForCausalLM.from_config(
                _config(self._fields), dtype=torch.bfloat16
            ).eval()
        model.generation_config = transformers.GenerationConfig(
            max_new_tokens=num_new, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        model.generate_batch(inputs=prompts[:2])
        began_s = time.perf_counter()
        model.generate_batch(inputs=prompts)
        theirs = number * num_new / (time.perf_counter() - began_s)
        ours = figures["triolet_tokens_per_s"]
        return {
            **figures,
            "transformers_tokens_per_s": theirs,
            "share_of_ours": theirs / ours,
            "goal_at_most": 0.5,
        }
