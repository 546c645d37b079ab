"""Loading of a runner: device, model, size of the KV cache, and what the rest of the engine is told of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import attrs
import torch

from triolet.config.devices import DEVICE_NAMES, cores_of, is_device, kind_of
from triolet.config.engine import DEFAULT_GPU_MEMORY_UTILIZATION, EngineConfig
from triolet.config.processors import VARIABLE, Processors, choose_threads
from triolet.core.kv_cache.cache_groups import CacheGroup
from triolet.core.load_progress import LoadProgress, OnProgress
from triolet.core.request.model_info import ModelInfo
from triolet.core.scheduling.budget import DEFAULT_BATCHED_TOKENS
from triolet.errors import ConfigError, ModelError
from triolet.kernels._triton import announce_warm, has_failed_kernels
from triolet.kernels.cpu.library import kernels
from triolet.kernels.flash_attention import IMPLEMENTATIONS
from triolet.kernels.lora import compile_low_rank
from triolet.model.backends.cpu.decoder import CpuDecoder
from triolet.model.backends.layers.warm_up import compute_warm_up_steps
from triolet.model.backends.torch_decoder import Decoder
from triolet.model.cuda.prompt_attention import choose_prompt_attention
from triolet.model.cuda.step_device import CudaDevice, StepDevice
from triolet.model.cuda.warm_up import can_compute_steps
from triolet.model.loading.model import load_model
from triolet.model.loading.options import AdapterLimits, LoadedFolder, LoadOptions
from triolet.model.memory.device_memory import DeviceMemory, largest_step
from triolet.model.memory.kv_cache import (
    MAX_GROUPS,
    cache_groups_of,
    kv_block_count,
    longest_prompt,
    longest_sequence,
    windows_of,
)
from triolet.model.memory.state_cache import block_size_of
from triolet.model.runner import ModelRunner
from triolet.model.soft_prompts import soft_prompt_support
from triolet.model.worker import worker_class

if TYPE_CHECKING:
    from triolet.model.parallel.group import Group

ADAPTER_LIMITS = ("max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype")
"""Fields of LoRA adapters."""

logger = logging.getLogger(__name__)


@contextmanager
def _driver_errors_as_model_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch has a class for most of them, and Triton none
        if isinstance(error, torch.OutOfMemoryError) or "CUDA" not in str(error):
            raise
        raise ModelError(f"the GPU's driver failed while the model was loaded: {error}") from error


def load_runner(
    config: EngineConfig, on_progress: OnProgress = lambda told: None, group: Group | None = None
) -> tuple[ModelRunner, ModelInfo]:
    """Load the model and KV cache of a configuration, and everything that they need to run.

    Args:
        config: with a `model`.
        on_progress: told how much of it is there.
        group: of the processes that compute this model together; None for one.
    Raises:
        ConfigError: a field that does not fit the model or the machine.
        ModelError: the model cannot be loaded, or the driver of the GPU failed.
    """
    if config.model is None:
        raise ValueError("config.model must be a folder or a hub id; got None")
    if (size := config.tensor_parallel_size) > 1 and group is None:
        raise ConfigError("tensor_parallel_size", "1 where the model is in one process", size)
    if config.num_replicas > 1 or config.devices:
        raise ConfigError(
            "replicas", "1, without devices, where the model is loaded once", config.num_replicas
        )
    kind = worker_class(config.worker_extension)  # first, since the model takes long
    # A worker on another machine knows the folder from the path of a profile, and not from a relative name.
    if config.profile_dir is not None and config.runner not in ("remote", "ray"):
        from triolet.model.profile import make_folder

        make_folder(config.profile_dir)
    with _driver_errors_as_model_errors():
        runner, info = _load(config, on_progress, group)
    if runner.model.spec.is_recurrent:
        _check_recurrent(config, info.architecture)
    runner.worker = kind(runner)
    if config.stores_blocks:
        # imported here because most engines have no store
        from triolet.model.memory.prefix_store import store_of

        runner.keep_prefixes(partial(store_of, config, info))
    return runner, info


def _load(
    config: EngineConfig, on_progress: OnProgress, group: Group | None
) -> tuple[ModelRunner, ModelInfo]:
    place = choose_device(config.device, 1 if group is None else group.part.size)
    if place.index is not None:
        torch.cuda.set_device(place)
    _warn_of_what_has_no_effect(config, place)
    memory = memory_of(place)
    weights = _WeightBytes(on_progress)
    try:
        loaded = _load_weights(config, place, weights, group)
        block_size = config.block_size or block_size_of(
            loaded.model.spec, config.max_model_len or loaded.model.spec.max_position
        )
        if place.type == "cuda" and isinstance(loaded.model, Decoder):
            model = choose_prompt_attention(
                config.attention_backend, loaded.model, device=place, block_size=block_size
            )
            loaded = attrs.evolve(loaded, model=model)
            compute_warm_up_steps(model, place, block_size, model.tile_lengths)
            if (bank := loaded.adapters) is not None:
                compile_low_rank(model.spec.dtype, bank.dtype, place)
        elif config.attention_backend in IMPLEMENTATIONS:
            rule = f"triton or auto for {loaded.model.spec.architecture} on {place.type}"
            raise ConfigError("attention_backend", rule, config.attention_backend)
    except torch.OutOfMemoryError as error:
        if memory is None:
            raise
        raise memory.too_small_for(weights.total) from error
    if loaded.pooler is not None and loaded.pooler.info.needs_whole_prompts:
        return _Sizing(config, loaded, place, block_size).encoder_runner()
    sizing = _Sizing(
        config, loaded, place, block_size, _step_device(config, loaded, place, block_size, group)
    )
    captures = sizing.step_device is not None and not config.enforce_eager and _is_capturable(loaded)
    kv_cache_bytes = config.kv_cache_bytes
    if memory is not None and config.num_kv_blocks is None and kv_cache_bytes is None:

        def compute_largest_step() -> int:
            nonlocal captures
            num_bytes, captures = sizing.compute_largest_step(captures=captures)
            return num_bytes

        block_bytes = loaded.model.spec.block_bytes(block_size)
        kv_cache_bytes = memory.left_for_kv(config.gpu_memory_utilization, compute_largest_step, block_bytes)
    runner, info = sizing.runner_within(kv_cache_bytes, group)
    if captures:
        runner.capture_graphs(lambda done, total: on_progress(LoadProgress(f"graph {done} of {total}", 0, 0)))
    if sizing.step_device is not None:
        announce_warm()
    return runner, info


@attrs.define
class _WeightBytes:
    """Bytes of a model's weights, noted while its load reports them to `on_progress`."""

    _on_progress: OnProgress
    total: int = 0

    def __call__(self, progress: LoadProgress) -> None:
        if progress.stage == "weights":
            self.total = progress.total_bytes
        self._on_progress(progress)


def _load_weights(
    config: EngineConfig, place: torch.device, on_progress: OnProgress, group: Group | None
) -> LoadedFolder:
    assert config.model is not None
    options = LoadOptions(
        dtype=config.dtype,
        device=str(place),
        trust_remote_code=config.trust_remote_code,
        revision=config.revision,
        max_model_len=config.max_model_len,
        quantization=None if config.quantization == "none" else config.quantization,
        convert=config.convert,
        classifier_from_token=config.classifier_from_token,
        adapter_limits=_adapter_limits(config),
        weights_cache=config.weights_cache,
        calibration=config.calibration,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    return load_model(config.model, options, on_progress=on_progress, group=group)


@attrs.frozen(eq=False)
class _Sizing:
    """Choice of the size of a loaded model's KV cache, and the runner that has it."""

    config: EngineConfig
    loaded: LoadedFolder
    place: torch.device
    block_size: int  # tokens
    step_device: StepDevice | None = None

    @property
    def budget(self) -> int:
        """Tokens of a step, at most."""
        return self.config.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS

    @property
    def longest(self) -> int:
        """Length of the longest sequence that is asked for, or that the model allows."""
        return self.config.max_model_len or self.loaded.model.spec.max_position

    def encoder_runner(self) -> tuple[ModelRunner, ModelInfo]:
        """Return the runner of an encoder, whose blocks hold nothing.

        Raises:
            ConfigError: a size of the KV cache is given.
        """
        config = self.config
        for field, value in (
            ("num_kv_blocks", config.num_kv_blocks),
            ("kv_cache_bytes", config.kv_cache_bytes),
        ):
            if value is not None:
                raise ConfigError(field, "left out for an encoder, which keeps no keys and values", value)
        longest = longest_prompt(
            config.max_model_len, self.loaded.model.spec.max_position, config.max_num_batched_tokens
        )
        # A row takes one block, whatever the length of its prompt.
        return attrs.evolve(self, block_size=longest).runner(config.max_num_seqs, longest)

    def compute_largest_step(self, *, captures: bool) -> tuple[int, bool]:
        """Compute the step that needs most memory, on a GPU.

        Args:
            captures: whether decode steps are to be captured as graphs.
        Returns:
            Bytes of the blocks that it had, less those that graphs keep; whether they can be captured.
        Raises:
            ConfigError: it does not fit into the memory.
        """
        plan, num_blocks = largest_step(self.budget, self.config.max_num_seqs, self.block_size, self.longest)
        runner, _ = self.runner(num_blocks, self.longest)
        graph_bytes = _graph_bytes(runner, self.place) if captures else None
        if (problem := runner.execute(plan).out_of_memory) is not None:
            raise ConfigError(
                "max_num_batched_tokens", f"a step that fits into the memory ({problem})", self.budget
            )
        # graphs keep their memory beside that of the step
        block_bytes = self.loaded.model.spec.block_bytes(self.block_size)
        return num_blocks * block_bytes - (graph_bytes or 0), graph_bytes is not None

    def runner_within(self, kv_cache_bytes: int | None, group: Group | None) -> tuple[ModelRunner, ModelInfo]:
        """Return the runner whose KV cache has the blocks that are asked for, or that fit.

        Args:
            kv_cache_bytes: memory for them, unless their number is configured; None for what all rows could need.
            group: whose ranks all have the same blocks.
        Raises:
            ConfigError: a size that does not fit the model.
        """
        groups = self._groups(self.longest)
        num_blocks, longest = self._sizes(groups, self.longest, kv_cache_bytes, group)
        if (others := self._groups(longest)) != groups:
            # No sequence that fits is longer than a window. Later loads are told of that and divide the layers so.
            groups = others
            num_blocks, longest = self._sizes(groups, longest, kv_cache_bytes, group)
        return self.runner(num_blocks, longest, groups)

    def _groups(self, longest: int) -> tuple[CacheGroup, ...]:
        # Steps whose rows are on a GPU have one block table, and what is set aside there is measured with one.
        most = MAX_GROUPS if self.place.type == "cpu" else 1
        return cache_groups_of(self.loaded.model.spec, longest=longest, most=most)

    def _sizes(
        self, groups: tuple[CacheGroup, ...], most: int, kv_cache_bytes: int | None, group: Group | None
    ) -> tuple[int, int]:
        """Return the number of blocks, and the length of the longest sequence, at most `most`."""
        config, spec = self.config, self.loaded.model.spec
        num_blocks = kv_block_count(
            spec,
            groups=groups,
            block_size=self.block_size,
            num_kv_blocks=config.num_kv_blocks,
            kv_cache_bytes=kv_cache_bytes,
            max_model_len=most,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=self.budget,
        )
        if group is not None:  # all ranks have the same blocks, whatever memory each of them found free
            num_blocks = group.least(num_blocks)
        num_kv_tokens = windows_of(groups).longest(num_blocks, self.block_size)
        return num_blocks, longest_sequence(config.max_model_len, min(most, spec.max_position), num_kv_tokens)

    def runner(
        self, num_blocks: int, max_model_len: int, groups: tuple[CacheGroup, ...] = ()
    ) -> tuple[ModelRunner, ModelInfo]:
        """Return a runner with so many blocks, and what the rest of the engine is told of it."""
        loaded, config = self.loaded, self.config
        runner = ModelRunner(
            loaded.model,
            num_blocks=num_blocks,
            block_size=self.block_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            device=self.place,
            logprobs_mode=config.logprobs_mode,
            pooler=loaded.pooler,
            adapters=loaded.adapters,
            step_device=self.step_device,
            max_num_batched_tokens=self.budget,
            groups=groups,
        )
        spec, is_on_cpu = loaded.model.spec, self.place.type == "cpu"
        cpp = kernels() if is_on_cpu else None
        return runner, ModelInfo(
            folder=str(loaded.folder),
            architecture=spec.architecture,
            backend=spec.backend,
            vocab_size=spec.vocab_size,
            max_position=spec.max_position,
            max_model_len=max_model_len,
            num_kv_blocks=num_blocks,
            block_size=self.block_size,
            dtype=str(spec.dtype).removeprefix("torch."),
            device=self.place.type,
            cpu_kernels=None if cpp is None else cpp.target.name,
            calibration=loaded.model.calibration.choices() if isinstance(loaded.model, CpuDecoder) else {},
            generation=loaded.generation_defaults.chosen_by(config.generation_config),
            generates=loaded.generates,
            pooling=None if loaded.pooler is None else loaded.pooler.info,
            adapters=None if loaded.adapters is None else loaded.adapters.support,
            soft_prompts=soft_prompt_support(spec),
            cache_windows=windows_of(groups).windows if groups else (None,),
        )


def _step_device(
    config: EngineConfig, loaded: LoadedFolder, place: torch.device, block_size: int, group: Group | None
) -> StepDevice | None:
    """Return what computes steps whose rows are on the GPU; None for a model that is not computed so."""
    device = _device_for_steps(loaded, place, group)
    if device is None or can_compute_steps(
        loaded.model, device, block_size=block_size, logprobs_mode=config.logprobs_mode
    ):
        return device
    return None


def _device_for_steps(loaded: LoadedFolder, place: torch.device, group: Group | None) -> StepDevice | None:
    # The states that a recurrent layer reads are chosen by lengths that the host knows.
    is_able = place.type == "cuda" and group is None and isinstance(loaded.model, Decoder)
    is_able = is_able and not loaded.model.spec.is_recurrent
    return CudaDevice(place) if is_able else None


def _is_capturable(loaded: LoadedFolder) -> bool:
    # A reference in torch that stands in for a kernel may wait for the device.
    return isinstance(loaded.model, Decoder) and loaded.model.is_capturable and not has_failed_kernels()


def _graph_bytes(runner: ModelRunner, place: torch.device) -> int | None:
    """Capture the largest graph of each kind, and return the memory that they keep; None without those of decodes."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(place)
    if not runner.capture_graphs(only_largest=True):
        return None
    torch.cuda.empty_cache()
    return max(0, torch.cuda.memory_reserved(place) - before)


def memory_of(device: torch.device) -> DeviceMemory | None:
    """Measure the memory of a GPU; None for a CPU, of which nothing is set aside."""
    return DeviceMemory.measure(device) if device.type == "cuda" else None


def choose_device(device: str, num_ranks: int = 1) -> torch.device:
    """Resolve `auto`, `cpu`, `cpu:CORES`, `cuda` or `cuda:N`; bind this thread to the cores, limit torch's threads.

    Args:
        device: its name.
        num_ranks: processes of a group that share the cores; of torch's threads each has its part already.
    Raises:
        ConfigError: there is no such device here.
    """
    place = _place_of(device)
    if (cores := cores_of(device)) is not None:
        _bind(cores, device)
        # Also where two of them are hyper-threads of one core: these are named one by one.
        torch.set_num_threads(max(1, len(cores) // num_ranks))
    elif place.type == "cpu":
        _limit_threads()
    return place


def _place_of(device: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if device == "auto":
        return torch.device("cuda" if has_cuda else "cpu")
    if not is_device(device):
        raise ConfigError("device", f"one of {DEVICE_NAMES}", device)
    if kind_of(device) == "cpu":
        return torch.device("cpu")
    place = torch.device(device)
    if place.type == "cuda" and not has_cuda:
        raise ConfigError("device", "auto or cpu, since torch finds no CUDA device here", device)
    if ":" in device and place.index >= (count := torch.cuda.device_count()):
        raise ConfigError(
            "device", f"below cuda:{count}, since torch finds {count} CUDA devices here", device
        )
    return place


def _limit_threads() -> None:
    """Compute with as many threads as the processors of this process are good for; the C++ kernels take torch's."""
    choice = choose_threads(Processors.read(), os.environ.get(VARIABLE))
    if choice.warning is not None:
        logger.warning(choice.warning)
    torch.set_num_threads(choice.within(torch.get_num_threads()).count)


def _bind(cores: frozenset[int], device: str) -> None:
    """Bind this thread, and those that it starts, to cores."""
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("device", "without cores: this system cannot bind threads to them", device)
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise ConfigError("device", f"cores that this process may use ({error.strerror})", device) from None
    # the kernel takes the part that it may use, such as that of a container
    if missing := cores - os.sched_getaffinity(0):
        raise ConfigError("device", f"cores that this process may use, without {sorted(missing)}", device)


def _check_recurrent(config: EngineConfig, architecture: str) -> None:
    """Refuse what does not fit a model whose states are at the ends of blocks: steps back, and loads of blocks."""
    reason = f"for {architecture}, of which most layers are recurrent"
    if config.speculative != "none":
        raise ConfigError("speculative", f"none {reason}", config.speculative)
    if config.stores_blocks:
        field = "kv_pool_bytes" if config.kv_store is None else "kv_store"
        raise ConfigError(field, f"left out {reason}", getattr(config, field))


def _warn_of_what_has_no_effect(config: EngineConfig, place: torch.device) -> None:
    """Log the fields that were set and change nothing; refused they would be a stop to programs that vLLM takes."""
    if place.type == "cpu" and config.gpu_memory_utilization != DEFAULT_GPU_MEMORY_UTILIZATION:
        logger.warning(
            "gpu_memory_utilization has no effect on a CPU; kv_cache_bytes is the size of its KV cache"
        )
    if place.type == "cpu" and config.enforce_eager:
        logger.warning("enforce_eager has no effect on a CPU, which has no CUDA graphs")
    defaults = attrs.fields_dict(EngineConfig)
    for name in ADAPTER_LIMITS:
        if not config.enable_lora and getattr(config, name) != defaults[name].default:
            logger.warning("%s has no effect without enable_lora", name)


def _adapter_limits(config: EngineConfig) -> AdapterLimits | None:
    if not config.enable_lora:
        return None
    return AdapterLimits(
        max_loras=config.max_loras,
        max_lora_rank=config.max_lora_rank,
        max_cpu_loras=config.num_kept_loras,
        lora_dtype=config.lora_dtype,
    )
