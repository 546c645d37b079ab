"""Prefix store: KV of prefixes outside of the KV cache, in memory and in files.

The scheduler names the blocks. A step begins with saving those that were computed since the last one; then blocks of
its rows are loaded as far as they are found, and the rows compute what is left of them, which may be nothing. A block
that is not there, or whose file is damaged, is computed like any other, so that the scheduler need not know what the
store has.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

import attrs
import torch
from torch import Tensor

from triolet.config.choices import rounding_of
from triolet.config.engine import EngineConfig
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import BlockLoad, BlockSave, PlanRow, RowResult, StepPlan, StepResult
from triolet.errors import ConfigError
from triolet.model.input_batch import RowTable
from triolet.model.interface import LayerCache
from triolet.model.memory.block_files import BlockFiles, times_of_use
from triolet.model.memory.page_prefault import PagePrefault
from triolet.model.weights_cache import identity_of

FLUSH_S: Final = 0.8  # less than an engine waits for the end of its runner's process
_LAYOUT: Final = 1  # version of the content of a block: keys and values of each layer, one after the other


class PrefixStore:
    """Blocks of one model.

    Args:
        cache: the KV cache.
        files: on disk; None for none.
        pool_bytes: memory for blocks; 0 for none.
    """

    def __init__(self, cache: Sequence[LayerCache], files: BlockFiles | None, pool_bytes: int) -> None:
        self._block_size = cache[0].tensors[0].shape[1] if cache else 0
        # Of each layer in order: its cache group, and each tensor as [blocks, bytes of a block].
        self._tensors = [
            (layer.group, tensor.view(len(tensor), -1).view(torch.uint8))
            for layer in cache
            for tensor in layer.tensors
        ]
        self._sizes = [tensor.shape[1] for _, tensor in self._tensors]
        self._block_bytes = sum(self._sizes)
        self._files = files
        self._pool: OrderedDict[bytes, bytearray] = OrderedDict()
        self._max_pooled = pool_bytes // self._block_bytes if self._block_bytes else 0
        self._num_failed = 0
        self._num_without_memory = 0

    def take_failures(self) -> int:
        """Return how many blocks could not be written since the last call."""
        num_failed = self._num_without_memory + (0 if self._files is None else self._files.num_failed)
        new, self._num_failed = num_failed - self._num_failed, num_failed
        return new

    def flush(self) -> None:
        """Wait until what was saved is written, `FLUSH_S` seconds at most."""
        if self._files is not None:
            self._files.flush(FLUSH_S)

    def take(self, plan: StepPlan, rows: RowTable, pages: PagePrefault | None) -> StepPlan:
        """Save and load the blocks that a plan names, and note in the table what was loaded.

        Args:
            rows: of the runner.
            pages: of the KV cache, where they are prepared; None elsewhere.
        Returns:
            What is left of the plan; without rows if nothing is to be computed.
        """
        self.save(plan.saves)  # first: the blocks may be those of other rows by now
        # Told before anything is written: pages beyond the highest block are given back to the system when it is idle.
        rows.highest_block_id = max([rows.highest_block_id, *(max(load.block_ids) for load in plan.loads)])
        if pages is not None:
            pages.reach(rows.highest_block_id)
        rest, whole = self.load_into(plan)
        if whole:
            rest = rows.take_loaded(rest, whole)
        for row in rest.rows:
            rows.note_loaded(row.row_id, row.start)
        return rest

    def result(
        self, plan: StepPlan, rest: StepPlan, rows: tuple[RowResult, ...], elapsed_s: float
    ) -> StepResult:
        """Return the result of a step.

        Args:
            rest: what was left of the plan.
            rows: what its rows gave.
            elapsed_s: time that it took.
        """
        return StepResult(
            plan.step_id,
            rows,
            elapsed_s,
            num_loaded_tokens=plan.num_tokens - rest.num_tokens,
            num_failed_saves=self.take_failures(),
        )

    def save(self, saves: Iterable[BlockSave]) -> None:
        """Copy blocks out of the KV cache; those that are stored already are not."""
        new = {
            save.key: save.block_ids
            for save in saves
            if not (self._files is not None and self._files.has(save.key)) and save.key not in self._pool
        }
        if not new:
            return
        for used_ns, (key, block_ids) in zip(times_of_use(), new.items(), strict=False):
            try:
                content = bytearray(self._block_bytes)
            except MemoryError:  # it is computed again when it is needed
                self._num_without_memory += 1
                continue
            for part, block in self._parts(content, block_ids):
                part.copy_(block)
            self._keep(key, content)
            if self._files is not None:
                self._files.write(key, content, used_ns)

    def _parts(self, content: bytearray, block_ids: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Pair the parts of a block's content with the tensors of the KV cache that they are of; both are views."""
        parts = torch.frombuffer(content, dtype=torch.uint8).split(self._sizes)
        return zip(parts, [tensor[block_ids[group]] for group, tensor in self._tensors], strict=True)

    def _keep(self, key: bytes, content: bytearray) -> None:
        self._pool[key] = content
        self._pool.move_to_end(key)
        while len(self._pool) > self._max_pooled:
            self._pool.popitem(last=False)

    def load(self, loads: Iterable[BlockLoad]) -> dict[int, int]:
        """Copy blocks into the KV cache.

        Args:
            loads: of each row, in order.
        Returns:
            By row id, how many tokens of it are there now: all before the first block that is not stored.
        """
        num_tokens: dict[int, int] = {}
        for row_id, blocks in groupby(loads, key=lambda load: load.row_id):
            num_tokens[row_id] = 0
            read = list[bytes]()
            for load in blocks:
                if (content := self._content(load.key)) is None:
                    break
                for part, block in self._parts(content, load.block_ids):
                    block.copy_(part)
                num_tokens[row_id] += self._block_size
                read.append(load.key)
            if self._files is not None:
                self._files.note_used(read)
        return num_tokens

    def load_into(self, plan: StepPlan) -> tuple[StepPlan, list[PlanRow]]:
        """Load what a plan names.

        Returns:
            A plan of what is left to compute, the last token of every row that is sampled among it; and the rows of
            which nothing is left.
        """
        num_loaded = self.load(plan.loads)
        left, whole = list[PlanRow](), list[PlanRow]()
        for row in plan.rows:
            count = min(num_loaded.get(row.row_id, 0), row.num_tokens - row.sample)
            if count == row.num_tokens:
                whole.append(row)
            elif count:
                left.append(attrs.evolve(row, start=row.start + count, num_tokens=row.num_tokens - count))
            else:
                left.append(row)
        return attrs.evolve(plan, rows=tuple(left)), whole

    def _content(self, key: bytes) -> bytearray | None:
        content = self._pool.get(key)
        if content is None and self._files is not None:
            content = self._files.read(key, self._block_bytes)
        if content is not None:
            self._keep(key, content)
        return content


def store_of(config: EngineConfig, info: ModelInfo, cache: Sequence[LayerCache]) -> PrefixStore:
    """Open the prefix store of a loaded model.

    Args:
        config: of the engine.
        info: the model.
        cache: its KV cache.
    Raises:
        ConfigError: the model keeps no KV, or the folder cannot be made or read.
    """
    field = "kv_pool_bytes" if config.kv_store is None else "kv_store"
    if not (cache and config.enable_prefix_caching):
        rule = "left out without enable_prefix_caching, and for a model without keys and values to keep"
        raise ConfigError(field, rule, getattr(config, field))
    files = None
    if config.kv_store is not None:
        shapes = [[*layer.keys.shape[1:], *layer.values.shape[1:], str(layer.keys.dtype)] for layer in cache]
        computed_by = [
            importlib.metadata.version("triolet"),
            info.architecture,
            info.backend,
            info.device,
            info.dtype,
            info.cpu_kernels,
            rounding_of(config.quantization) or "none",
            config.lora_dtype,
            config.max_model_len,  # decides how a model with two ranges of positions (LongRoPE) places tokens
        ]
        depends_on = [_LAYOUT, identity_of(_files_of(Path(info.folder))), shapes, computed_by]
        name = hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()[:32]
        try:
            files = BlockFiles(Path(config.kv_store, name), config.kv_store_bytes)
        except OSError as error:
            rule = f"a folder that can be written ({error.strerror})"
            raise ConfigError("kv_store", rule, config.kv_store) from error
    return PrefixStore(cache, files, config.kv_pool_bytes)


def _files_of(model: Path) -> list[Path]:
    """Return the files that a model was read from."""
    if model.is_dir():
        # With the code that it may bring.
        return [*model.glob("*.safetensors"), *model.glob("*.py"), model / "config.json"]
    # All parts of a split GGUF file lie side by side.
    return [model, *model.parent.glob(model.name.partition("-00001-of-")[0] + "-*-of-*.gguf")]
