"""Size and tensors of the KV cache, and the length of what it holds.

Each attention layer of a cache group has its own pair of tensors, [num_blocks, block_size, num_kv_heads, head_dim], or
one tensor if its values are parts of its keys; block i of one layer and block i of another belong to the same tokens,
so one block table serves all layers of a group. The first layers of all groups are in the same tensors, and so are the
second ones, and so on: a block belongs to one group at a time (`core.kv_cache.cache_groups`). A
recurrent layer has states in their place (`memory.state_cache`).
"""

from __future__ import annotations

import math
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import torch
from torch import Tensor

from triolet.core.kv_cache.cache_groups import CacheGroup, CacheGroups
from triolet.core.scheduling.budget import DEFAULT_BATCHED_TOKENS
from triolet.errors import ConfigError
from triolet.model.interface import LayerCache, LayerCacheSpec, ModelSpec
from triolet.model.memory.state_cache import allocate_states

CPU_SHARE = 0.25  # of available memory: unlike a GPU's, it is shared with every other process of the machine
LARGE_PAGE_BYTES = 2 * 2**20
MAX_FIRST_PAGES_BYTES = 32 * 2**20  # of all tensors together: what a single token may take
CPU_DEFAULT_BYTES = 4 * 2**30  # vLLM's VLLM_CPU_KVCACHE_SPACE default

MAX_GROUPS = 8  # each has a block table: more would cost more time than they save memory

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def cache_groups_of(spec: ModelSpec, *, longest: int, most: int = MAX_GROUPS) -> tuple[CacheGroup, ...]:
    """Divide the layers of a model into cache groups.

    Args:
        spec: the loaded model.
        longest: sequence, tokens; a window that is no shorter is none.
        most: groups that the device can compute; a model may take one only.
    Returns:
        Those with full attention first, all with as many layers, but for the last ones of each kind; one group without
        a window where more than `most` would be needed, or layers differ in shape.
    """
    windows = [layer.window if (layer.window or longest) < longest else None for layer in spec.cache_layers]
    widest = max((window for window in windows if window is not None), default=None)
    full = [index for index, window in enumerate(windows) if window is None]
    windowed = [index for index, window in enumerate(windows) if window is not None]
    everything = tuple(range(len(windows)))
    if not full or not windowed:
        return (CacheGroup(layers=everything, window=widest),)
    if not spec.takes_cache_groups or len({attrs.evolve(one, window=None) for one in spec.cache_layers}) > 1:
        return (CacheGroup(layers=everything),)

    def divided(size: int) -> list[CacheGroup]:
        return [
            CacheGroup(layers=tuple(kind[first : first + size]), window=window)
            for kind, window in ((full, None), (windowed, widest))
            for first in range(0, len(kind), size)
        ]

    def cost(size: int) -> tuple[int, int, int]:
        # Places of layers that stay empty; those beside full attention last as long as the sequence.
        return -len(full) % size, -len(windowed) % size, -size

    sizes = [size for size in range(1, len(windows)) if len(divided(size)) <= most]
    return tuple(divided(min(sizes, key=cost))) if sizes else (CacheGroup(layers=everything),)


def windows_of(groups: Sequence[CacheGroup]) -> CacheGroups:
    """Return the windows of cache groups."""
    return CacheGroups(tuple(group.window for group in groups))


def block_bytes_of(spec: ModelSpec, groups: Sequence[CacheGroup], block_size: int) -> int:
    """Return the bytes of a block, which is of the layers of one group; of all layers without groups."""
    return attrs.evolve(spec, cache_layers=_places(spec, groups)).block_bytes(block_size)


def _places(spec: ModelSpec, groups: Sequence[CacheGroup]) -> tuple[LayerCacheSpec, ...]:
    """Return the layers of the largest group; all layers without groups."""
    everything = range(len(spec.cache_layers))
    indices = max((group.layers for group in groups), key=len, default=everything)
    return tuple(spec.cache_layers[index] for index in indices)


def kv_block_count(
    spec: ModelSpec,
    *,
    groups: Sequence[CacheGroup] = (),
    block_size: int,
    num_kv_blocks: int | None,
    kv_cache_bytes: int | None,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS,
) -> int:
    """Decide the number of KV blocks.

    An explicit number wins, then an explicit size, then a share of the main memory.

    Args:
        spec: the loaded model.
        groups: cache groups of its layers; empty for one without a window.
        block_size: tokens in a block.
        num_kv_blocks: the operator's number of blocks in each group, if given.
        kv_cache_bytes: the operator's size, bytes, or what a GPU has left; None for a share of the main memory.
        max_model_len: longest sequence, tokens.
        max_num_seqs: sequences computed together.
        max_num_batched_tokens: tokens of a step.
    Returns:
        Blocks of the pool that all groups share, a multiple of their number.
    Raises:
        ConfigError: `kv_cache_bytes` is less than one block.
    """
    windows = CacheGroups() if not groups else windows_of(groups)
    count = windows.count
    if num_kv_blocks is not None:
        return num_kv_blocks * count
    block_bytes = block_bytes_of(spec, groups, block_size)
    if kv_cache_bytes is not None:
        if kv_cache_bytes < block_bytes * count:
            raise ConfigError(
                "kv_cache_bytes",
                f"at least one block of {block_size} tokens, {block_bytes * count} bytes",
                kv_cache_bytes,
            )
        return kv_cache_bytes // block_bytes // count * count
    # by default the most that the sequences could need, limited to a share of the memory that is free now
    needed = max_num_seqs * windows.num_needed(max_model_len, block_size)
    if windows.window is not None:  # and a step's chunks, before a window has passed them
        needed += (count - windows.num_full) * math.ceil(max_num_batched_tokens / block_size)
    default = min(int(available_memory_bytes() * CPU_SHARE), CPU_DEFAULT_BYTES)
    return max(1, min(-(-needed // count), default // block_bytes // count)) * count


def allocate_kv_cache(
    spec: ModelSpec,
    *,
    num_blocks: int,
    block_size: int,
    device: torch.device,
    groups: Sequence[CacheGroup] = (),
) -> tuple[LayerCache, ...]:
    """Allocate the tensors, all zeros.

    Args:
        spec: the loaded model.
        num_blocks: blocks in each tensor.
        block_size: tokens in a block.
        device: where the tensors will be.
        groups: cache groups of its layers; empty for one of all.
    Returns:
        Of each layer; those at the same place of several groups have the same tensors.
    Raises:
        ConfigError: the memory is not there.
    """
    layers = _places(spec, groups)
    num_tensors = sum(1 if layer.is_latent else 2 for layer in layers)
    first_pages_bytes = num_tensors * LARGE_PAGE_BYTES
    small_bytes = LARGE_PAGE_BYTES if first_pages_bytes > MAX_FIRST_PAGES_BYTES else 0

    # Zeros, not uninitialised memory: attention multiplies padded reads by a weight of 0, and 0 times NaN is NaN.
    def zeros(shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        return _zeros(shape, dtype or spec.dtype, device, small_bytes)

    try:
        caches = [allocate_layer(layer, num_blocks, block_size, spec.cache_dtype, zeros) for layer in layers]
    except (RuntimeError, OSError, OverflowError, ValueError) as error:  # torch's own is a RuntimeError
        num_bytes = num_blocks * block_bytes_of(spec, groups, block_size)
        rule = f"small enough for the memory of {device} ({num_bytes} bytes of KV asked for)"
        raise ConfigError("num_kv_blocks", rule, num_blocks) from error
    of_layer = {
        index: attrs.evolve(cache, group=number)
        for number, group in enumerate(groups)
        for index, cache in zip(group.layers, caches, strict=False)
    }
    return tuple([of_layer[index] for index in sorted(of_layer)]) if groups else tuple(caches)


def allocate_layer(
    layer: LayerCacheSpec,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    zeros: Callable[[tuple[int, ...], torch.dtype | None], Tensor],
) -> LayerCache:
    """Allocate the cache of one layer.

    Args:
        layer: shape of the cache.
        num_blocks: blocks of the cache.
        block_size: tokens in a block.
        dtype: of keys and values.
        zeros: returns zeros of a shape and a dtype, by default the model's.
    """
    states = None if layer.state is None else allocate_states(layer.state, num_blocks, zeros)
    shape = num_blocks, block_size, layer.num_kv_heads, layer.head_dim
    if not layer.num_kv_heads:
        # Without memory of its own, whatever `zeros` does for large tensors.
        assert states is not None, "a layer caches something"
        nothing = states.convolution.new_zeros(shape)
        return LayerCache(nothing, nothing, states)
    keys = zeros(shape, dtype)
    return LayerCache(keys, keys if layer.is_latent else zeros(shape, dtype), states)


def longest_sequence(max_model_len: int | None, max_position: int, num_kv_tokens: int) -> int:
    """Decide the length that a sequence may have, tokens.

    Args:
        max_model_len: the operator's wish, if any.
        max_position: what the model can place.
        num_kv_tokens: what the KV cache holds.
    Raises:
        ConfigError: the wish is more than one of the two allows.
    """
    # One token of the prompt and one of the answer: anything less could serve no request.
    if num_kv_tokens < 2:
        raise ConfigError("num_kv_blocks", "enough for a prompt token and an answer token", num_kv_tokens)
    if max_model_len is None:
        return min(max_position, num_kv_tokens)
    _check_position(max_model_len, max_position)
    if max_model_len > num_kv_tokens:
        raise ConfigError(
            "max_model_len", f"at most {num_kv_tokens}, the tokens that the KV cache holds", max_model_len
        )
    return max_model_len


def _check_position(max_model_len: int, max_position: int) -> None:
    if max_model_len > max_position:
        raise ConfigError(
            "max_model_len", f"at most {max_position}, the positions of this model", max_model_len
        )


def longest_prompt(max_model_len: int | None, max_position: int, max_num_batched_tokens: int | None) -> int:
    """Decide the length that a prompt of an encoder may have, tokens.

    Args:
        max_model_len: the operator's wish, if any.
        max_position: what the model can place.
        max_num_batched_tokens: token budget of a step, in which a prompt is computed whole; None for the default.
    Raises:
        ConfigError: the wish is more than one of the two allows.
    """
    budget = max_num_batched_tokens or DEFAULT_BATCHED_TOKENS
    if max_model_len is None:
        return min(max_position, budget)
    _check_position(max_model_len, max_position)
    if max_model_len > budget:
        raise ConfigError(
            "max_model_len",
            f"at most max_num_batched_tokens, {budget}: an encoder computes a whole prompt in one step",
            max_model_len,
        )
    return max_model_len


def available_memory_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Return the main memory that this process could still take without swapping, bytes.

    Args:
        meminfo: the kernel's own account; without it, half of all memory is assumed to be free.
        cgroup: folder with the limits of the container, if there is one.
    """
    free = _available_of_machine(meminfo)
    try:
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no cgroup v2, or no limit ("max")
        return free
    return max(0, min(free, limit - used))


def _available_of_machine(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    kibibytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return kibibytes * 1024


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, small_bytes: int = 0) -> Tensor:
    if device.type != "cpu" or sys.platform == "win32" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    # Anonymous pages are zero and allocated at the first access: a cache that is never full never takes its whole size.
    # torch.zeros would write it all, which takes seconds for 4 GiB.
    size = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A decode step reads every block of every sequence, scattered: with pages of 4 KiB most of the time goes into
        # TLB misses. But with many layers one token would take a large page of each, so the first bytes use small ones.
        if small_bytes:
            pages.madvise(mmap.MADV_NOHUGEPAGE, 0, min(small_bytes, size))
        if size > small_bytes:
            pages.madvise(mmap.MADV_HUGEPAGE, small_bytes, size - small_bytes)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
