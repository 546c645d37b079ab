"""Size and tensors of the KV cache, and the length of what it holds.

Each attention layer has its own pair of tensors, [num_blocks, block_size, num_kv_heads, head_dim]; block i of one layer
and block i of another belong to the same tokens, so one block table serves all layers.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from triolet.core.scheduling.budget import DEFAULT_BATCHED_TOKENS
from triolet.errors import ConfigError
from triolet.model.interface import LayerCache, ModelSpec

CPU_SHARE = 0.25  # of available memory: unlike a GPU's, it is shared with every other process of the machine
LARGE_PAGE_BYTES = 2 * 2**20
MAX_FIRST_PAGES_BYTES = 32 * 2**20  # of all tensors together: what a single token may take
CPU_DEFAULT_BYTES = 4 * 2**30  # vLLM's VLLM_CPU_KVCACHE_SPACE default

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def kv_block_count(
    spec: ModelSpec,
    *,
    block_size: int,
    num_kv_blocks: int | None,
    kv_cache_bytes: int | None,
    max_model_len: int,
    max_num_seqs: int,
) -> int:
    """Decide the number of KV blocks.

    An explicit number wins, then an explicit size, then a share of the main memory.

    Args:
        spec: the loaded model.
        block_size: tokens in a block.
        num_kv_blocks: the operator's number of blocks, if given.
        kv_cache_bytes: the operator's size, bytes, or what a GPU has left; None for a share of the main memory.
        max_model_len: longest sequence, tokens.
        max_num_seqs: sequences computed together.
    Returns:
        At least 1.
    Raises:
        ConfigError: `kv_cache_bytes` is less than one block.
    """
    if num_kv_blocks is not None:
        return num_kv_blocks
    block_bytes = spec.kv_bytes_per_token() * block_size
    if kv_cache_bytes is not None:
        if kv_cache_bytes < block_bytes:
            raise ConfigError(
                "kv_cache_bytes",
                f"at least one block of {block_size} tokens, {block_bytes} bytes",
                kv_cache_bytes,
            )
        return kv_cache_bytes // block_bytes
    # by default the most that the sequences could need, limited to a share of the memory that is free now
    needed = max_num_seqs * math.ceil(max_model_len / block_size)
    default = min(int(available_memory_bytes() * CPU_SHARE), CPU_DEFAULT_BYTES)
    return max(1, min(needed, default // block_bytes))


def allocate_kv_cache(
    spec: ModelSpec, *, num_blocks: int, block_size: int, device: torch.device
) -> tuple[LayerCache, ...]:
    """Allocate the tensors, all zeros.

    Args:
        spec: the loaded model.
        num_blocks: blocks in each tensor.
        block_size: tokens in a block.
        device: where the tensors will be.
    Raises:
        ConfigError: the memory is not there.
    """
    first_pages_bytes = 2 * len(spec.cache_layers) * LARGE_PAGE_BYTES
    small_bytes = LARGE_PAGE_BYTES if first_pages_bytes > MAX_FIRST_PAGES_BYTES else 0

    def zeros(num_kv_heads: int, head_dim: int) -> Tensor:
        # Zeros, not uninitialised memory: attention multiplies padded reads by a weight of 0, and 0 times NaN is NaN.
        return _zeros((num_blocks, block_size, num_kv_heads, head_dim), spec.dtype, device, small_bytes)

    try:
        return tuple(
            LayerCache(zeros(layer.num_kv_heads, layer.head_dim), zeros(layer.num_kv_heads, layer.head_dim))
            for layer in spec.cache_layers
        )
    except (RuntimeError, OSError, OverflowError, ValueError) as error:  # torch's own is a RuntimeError
        num_bytes = num_blocks * block_size * spec.kv_bytes_per_token()
        rule = f"small enough for the memory of {device} ({num_bytes} bytes of KV asked for)"
        raise ConfigError("num_kv_blocks", rule, num_blocks) from error


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
    if device.type != "cpu" or sys.platform == "win32":
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
