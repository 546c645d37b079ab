"""Loading of a runner: device, model, size of the KV cache, and what the rest of the engine is told of them."""

from __future__ import annotations

import logging
import re
from functools import partial
from typing import TYPE_CHECKING

import torch

from triolet.config.engine import DEFAULT_GPU_MEMORY_UTILIZATION, DEVICE, EngineConfig
from triolet.core.load_progress import LoadProgress, OnProgress
from triolet.core.request.model_info import ModelInfo
from triolet.core.scheduling.budget import DEFAULT_BATCHED_TOKENS
from triolet.errors import ConfigError
from triolet.kernels.cpu.library import kernels
from triolet.model.load import AdapterLimits, LoadedFolder, load_model
from triolet.model.memory.device_memory import DeviceMemory, largest_step
from triolet.model.memory.kv_cache import kv_block_count, longest_prompt, longest_sequence
from triolet.model.runner import ModelRunner
from triolet.model.soft_prompts import soft_prompt_support
from triolet.model.worker import worker_class

if TYPE_CHECKING:
    from triolet.model.parallel.group import Group

_logger = logging.getLogger(__name__)


def load_runner(
    *,
    model: str,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    max_model_len: int | None = None,
    block_size: int = 16,
    num_kv_blocks: int | None = None,
    kv_cache_bytes: int | None = None,
    gpu_memory_utilization: float = DEFAULT_GPU_MEMORY_UTILIZATION,
    max_num_seqs: int = 128,
    max_num_batched_tokens: int | None = None,
    quantization: str | None = None,
    logprobs_mode: str = "raw_logprobs",
    convert: str = "auto",
    classifier_from_token: tuple[str, ...] = (),
    adapter_limits: AdapterLimits | None = None,
    weights_cache: str | None = None,
    on_progress: OnProgress | None = None,
    group: Group | None = None,
) -> tuple[ModelRunner, ModelInfo]:
    """Load a model and everything it needs to run; arguments are `EngineConfig`'s fields.

    Args:
        adapter_limits: of LoRA adapters; None for a model without them.
        on_progress: told how much of the model is there.
        group: of the processes that compute this model together; None for one.
    Raises:
        ConfigError: no such device, not enough memory on it, or model and KV cache do not allow `max_model_len`.
        ModelError: the model cannot be loaded.
    """
    place = choose_device(device)
    if place.index is not None:
        torch.cuda.set_device(place)
    if place.type == "cpu":
        kernels()  # compiled now, if it must be: in a first step it would use up some request's time
        if gpu_memory_utilization != DEFAULT_GPU_MEMORY_UTILIZATION:
            _logger.warning(
                "gpu_memory_utilization has no effect on a CPU; kv_cache_bytes is the size of its KV cache"
            )
    memory = memory_of(place)
    load = partial(
        load_model,
        model,
        dtype=dtype,
        device=str(place),
        trust_remote_code=trust_remote_code,
        revision=revision,
        max_model_len=max_model_len,
        quantization=quantization,
        convert=convert,
        classifier_from_token=classifier_from_token,
        adapter_limits=adapter_limits,
        weights_cache=weights_cache,
        group=group,
    )
    num_weight_bytes = 0

    def report(progress: LoadProgress) -> None:
        nonlocal num_weight_bytes
        if progress.stage == "weights":
            num_weight_bytes = progress.total_bytes
        if on_progress is not None:
            on_progress(progress)

    try:
        loaded = load(on_progress=report)
    except torch.OutOfMemoryError as error:
        if memory is None:
            raise
        raise memory.too_small_for(num_weight_bytes) from error
    spec = loaded.model.spec
    if loaded.pooler is not None and loaded.pooler.info.needs_whole_prompts:
        for field, value in (("num_kv_blocks", num_kv_blocks), ("kv_cache_bytes", kv_cache_bytes)):
            if value is not None:
                raise ConfigError(field, "left out for an encoder, which keeps no keys and values", value)
        longest = longest_prompt(max_model_len, spec.max_position, max_num_batched_tokens)
        # A block holds nothing here; a row takes one, whatever the length of its prompt.
        return _runner_of(loaded, place, longest, max_num_seqs, longest, max_num_seqs, logprobs_mode)
    if memory is not None and num_kv_blocks is None and kv_cache_bytes is None:

        def compute_largest_step() -> int:
            budget = max_num_batched_tokens or DEFAULT_BATCHED_TOKENS
            longest = max_model_len or spec.max_position
            plan, num_blocks = largest_step(budget, max_num_seqs, block_size, longest)
            runner, _ = _runner_of(
                loaded, place, longest, num_blocks, block_size, max_num_seqs, logprobs_mode
            )
            if (problem := runner.execute(plan).out_of_memory) is not None:
                raise ConfigError(
                    "max_num_batched_tokens", f"a step that fits into the memory ({problem})", budget
                )
            return num_blocks * block_size * spec.kv_bytes_per_token()

        block_bytes = block_size * spec.kv_bytes_per_token()
        kv_cache_bytes = memory.left_for_kv(gpu_memory_utilization, compute_largest_step, block_bytes)
    num_blocks = kv_block_count(
        spec,
        block_size=block_size,
        num_kv_blocks=num_kv_blocks,
        kv_cache_bytes=kv_cache_bytes,
        max_model_len=max_model_len or spec.max_position,
        max_num_seqs=max_num_seqs,
    )
    if group is not None:  # all ranks have the same blocks, whatever memory each of them found free
        num_blocks = group.least(num_blocks)
    longest = longest_sequence(max_model_len, spec.max_position, num_blocks * block_size)
    return _runner_of(loaded, place, longest, num_blocks, block_size, max_num_seqs, logprobs_mode)


def _runner_of(
    loaded: LoadedFolder,
    device: torch.device,
    max_model_len: int,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    logprobs_mode: str,
) -> tuple[ModelRunner, ModelInfo]:
    runner = ModelRunner(
        loaded.model,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        device=device,
        logprobs_mode=logprobs_mode,
        pooler=loaded.pooler,
        adapters=loaded.adapters,
    )
    return runner, _model_info(loaded, device, max_model_len, num_blocks, block_size)


def memory_of(device: torch.device) -> DeviceMemory | None:
    """Measure the memory of a GPU; None for a CPU, of which nothing is set aside."""
    return DeviceMemory.measure(device) if device.type == "cuda" else None


def choose_device(device: str) -> torch.device:
    """Resolve `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises:
        ConfigError: there is no such device here.
    """
    has_cuda = torch.cuda.is_available()
    if device == "auto":
        return torch.device("cuda" if has_cuda else "cpu")
    if re.fullmatch(DEVICE, device) is None:
        raise ConfigError("device", "one of auto, cpu, cuda, cuda:N", device)
    place = torch.device(device)
    if place.type == "cuda" and not has_cuda:
        raise ConfigError("device", "auto or cpu, since torch finds no CUDA device here", device)
    if ":" in device and place.index >= (count := torch.cuda.device_count()):
        raise ConfigError(
            "device", f"below cuda:{count}, since torch finds {count} CUDA devices here", device
        )
    return place


def _model_info(
    loaded: LoadedFolder, device: torch.device, max_model_len: int, num_blocks: int, block_size: int
) -> ModelInfo:
    spec, cpp = loaded.model.spec, kernels() if device.type == "cpu" else None
    return ModelInfo(
        folder=str(loaded.folder),
        architecture=spec.architecture,
        backend=spec.backend,
        vocab_size=spec.vocab_size,
        max_position=spec.max_position,
        max_model_len=max_model_len,
        num_kv_blocks=num_blocks,
        block_size=block_size,
        dtype=str(spec.dtype).removeprefix("torch."),
        device=device.type,
        cpu_kernels=None if cpp is None else cpp.target.name,
        generation=loaded.generation_defaults,
        generates=loaded.generates,
        pooling=None if loaded.pooler is None else loaded.pooler.info,
        adapters=None if loaded.adapters is None else loaded.adapters.support,
        soft_prompts=soft_prompt_support(spec),
    )


def load_configured_runner(
    config: EngineConfig, on_progress: OnProgress, group: Group | None = None
) -> tuple[ModelRunner, ModelInfo]:
    """Load the model and KV cache of a configuration.

    Args:
        config: with a `model`.
        on_progress: told how much of it is there.
        group: of the processes that compute this model together; None for one.
    Raises:
        ConfigError: a field that does not fit the model or the machine.
        ModelError: the model cannot be loaded.
    """
    if config.model is None:
        raise ValueError("config.model must be a folder or a hub id; got None")
    if (size := config.tensor_parallel_size) > 1 and group is None:
        raise ConfigError("tensor_parallel_size", "1 where the model is in one process", size)
    kind = worker_class(config.worker_extension)  # first, since the model takes long
    runner, info = load_runner(
        model=config.model,
        dtype=config.dtype,
        device=config.device,
        trust_remote_code=config.trust_remote_code,
        revision=config.revision,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        num_kv_blocks=config.num_kv_blocks,
        kv_cache_bytes=config.kv_cache_bytes,
        gpu_memory_utilization=config.gpu_memory_utilization,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        quantization=None if config.quantization == "none" else config.quantization,
        logprobs_mode=config.logprobs_mode,
        convert=config.convert,
        classifier_from_token=config.classifier_from_token,
        adapter_limits=_adapter_limits(config),
        weights_cache=config.weights_cache,
        on_progress=on_progress,
        group=group,
    )
    runner.worker = kind(runner)
    if config.stores_blocks:
        # imported here because most engines have no store
        from triolet.model.memory.prefix_store import store_of

        runner.keep_prefixes(partial(store_of, config, info))
    return runner, info


def _adapter_limits(config: EngineConfig) -> AdapterLimits | None:
    if not config.enable_lora:
        return None
    return AdapterLimits(
        max_loras=config.max_loras,
        max_lora_rank=config.max_lora_rank,
        max_cpu_loras=config.num_kept_loras,
        lora_dtype=config.lora_dtype,
    )
