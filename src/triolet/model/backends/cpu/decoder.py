"""The native decoder on a CPU: a whole step as one call into C++.

Loading makes a plan (`plan.py`). A step is then the addresses of its input tensors and one call, without the
interpreter lock; what torch would spend on starting a dozen operations per layer is gone, and so is every copy between
them. What the C++ step does not know (gates of attention, float16) stays with `triolet.model.backends.torch_decoder`,
which is also the truth that this one is tested against.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from triolet.kernels.cpu.abi import (
    CacheGroupStruct,
    ModelStruct,
    MultiStepStruct,
    StepStruct,
    addresses,
    no_memory,
)
from triolet.kernels.cpu.calibration import Calibration
from triolet.kernels.cpu.gemm.packing import CppArgmaxFilter, CppLinear
from triolet.model.interface import ForwardBatch, GreedyStep, InputEmbeddings, LayerCache, ModelSpec

if TYPE_CHECKING:
    from triolet.kernels.cpu.gemm.lora import CppAdapter
    from triolet.model.adapters import AdapterBank


@attrs.frozen(eq=False)
class Found:
    """Output arrays of greedy steps, written by C++ while they run.

    Args:
        count: tokens of a step.
        max_logits: [steps, count], the largest logits.
        argmax: [steps, count], the tokens that have them.
        elapsed_s: [steps], seconds.
    """

    count: int
    max_logits: ctypes.Array[ctypes.c_float]
    argmax: ctypes.Array[ctypes.c_int64]
    elapsed_s: ctypes.Array[ctypes.c_float]

    @classmethod
    def of(cls, count: int, num_steps: int = 1) -> Found:
        """Allocate the arrays for `count` tokens of each step."""
        size = count * num_steps
        return cls(
            count, (ctypes.c_float * size)(), (ctypes.c_int64 * size)(), (ctypes.c_float * num_steps)()
        )

    def addresses(self) -> dict[str, int]:
        """Return the addresses for the fields of `StepStruct`."""
        return {"max_logits": ctypes.addressof(self.max_logits), "argmax": ctypes.addressof(self.argmax)}

    def step(self, index: int) -> GreedyStep:
        """Return the result of one step, which must be over."""
        place = slice(index * self.count, (index + 1) * self.count)
        return GreedyStep(self.max_logits[place], self.argmax[place], self.elapsed_s[index])


@attrs.define(eq=False)
class CpuRun:
    """`GreedyRun` of the C++ decoder.

    Args:
        step: with all it points at; read and written to its end.
        run: likewise.
        found: what the two write to.
    """

    _step: StepStruct
    _run: MultiStepStruct
    _found: Found
    _num_told: int = attrs.field(default=0, init=False)

    def steps(self, count: int) -> list[GreedyStep]:
        first, self._num_told = self._num_told, self._num_told + count
        steps = [self._found.step(index) for index in range(first, self._num_told)]
        if self._run.lacks_memory and self.is_over:
            steps[-1] = attrs.evolve(steps[-1], lacks_memory=True)
        return steps

    @property
    def is_over(self) -> bool:
        return bool(self._run.num_done == -self._num_told)

    def halt(self) -> None:
        self._run.is_halted = 1


class CpuDecoder:
    """A causal language model over a paged cache; see `triolet.model.interface.CausalModel`.

    Args:
        spec: what it is.
        model: the plan.
        kept: what the plan's addresses point at.
        cpp: the kernels.
        calibration: choices that the plan was given.
        cache_places: of each layer: the entry of the cache that it reads.
        adapters: LoRA adapters that change its layers; None for a model without them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        model: ModelStruct,
        kept: list[object],
        cpp: ctypes.CDLL,
        calibration: Calibration,
        cache_places: tuple[int, ...],
        adapters: AdapterBank[CppAdapter] | None = None,
    ) -> None:
        self.calibration = calibration
        self._spec = spec
        self._model = model
        self._kept = kept
        self._cpp = cpp
        self._cache_places = cache_places
        self._adapters = adapters
        self._adapter_slots: Tensor | None = None  # of the tokens of the last step
        self._cache: tuple[LayerCache, ...] = ()
        self._cache_addresses = addresses(()), addresses(()), (ctypes.c_int32 * 0)()
        self._background: ctypes.c_void_p | None = None  # not before it is needed: most models do without

    @property
    def spec(self) -> ModelSpec:
        """Description of the model that the engine is built from."""
        return self._spec

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weights, norms and rotary tables."""
        packed = [kept.num_bytes for kept in self._kept if isinstance(kept, CppLinear | CppArgmaxFilter)]
        return sum(packed) + sum(kept.nbytes for kept in self._kept if isinstance(kept, Tensor))

    @property
    def has_blocks(self) -> bool:
        """Tell whether layers are multiplied in the blocks of a quantised checkpoint."""
        return any(isinstance(kept, CppLinear) and kept.panels is not None for kept in self._kept)

    def wake(self) -> None:
        """Wake the threads of the next step, while its input is being built."""
        self._cpp.triolet_wake()

    def forward(self, batch: ForwardBatch) -> Tensor:
        hidden = torch.empty(len(batch.token_ids), self._model.hidden, dtype=self._spec.dtype)
        step = self._step(batch, hidden=hidden.data_ptr())
        # Stop before the output head.
        step.num_logits = 0
        self._compute(self._cpp.triolet_step, step)
        return hidden

    def compute_logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        taken = hidden[rows]
        logits = torch.empty(len(rows), self._spec.vocab_size, dtype=self._spec.dtype)
        step = StepStruct(
            hidden=taken.data_ptr(),
            logits=logits.data_ptr(),
            num_logits=len(rows),
            num_threads=torch.get_num_threads(),
        )
        if self._adapter_slots is not None:
            self._place_adapters(step, self._adapter_slots[rows])
        self._compute(self._cpp.triolet_head, step)
        return logits

    def forward_logits(self, batch: ForwardBatch) -> Tensor:
        logits = torch.empty(len(batch.logits_indices), self._spec.vocab_size, dtype=self._spec.dtype)
        step = self._step(batch, logits=logits.data_ptr())
        self._compute(self._cpp.triolet_step, step)
        return logits

    def forward_greedy(self, batch: ForwardBatch) -> tuple[list[float], list[int]]:
        found = Found.of(len(batch.logits_indices))
        step = self._step(batch, **found.addresses())
        self._compute(self._cpp.triolet_step, step)
        step_done = found.step(0)
        return step_done.max_logits, step_done.token_ids

    def _compute(self, function: Callable[..., int], step: StepStruct) -> None:
        if function(ctypes.byref(self._model), ctypes.byref(step)):
            raise no_memory()

    def prepare(self) -> None:
        """Wake the threads of the next background step, while its input is being built."""
        self._cpp.triolet_background_wake(self._background_thread())

    def begin_greedy(self, batch: ForwardBatch, *, num_steps: int, done_fd: int) -> CpuRun:
        found = Found.of(len(batch.logits_indices), num_steps)
        step = self._step(batch, **found.addresses())
        run = MultiStepStruct(elapsed_s=ctypes.addressof(found.elapsed_s), num_steps=num_steps)
        self._cpp.triolet_background_run(
            self._background_thread(),
            ctypes.byref(self._model),
            ctypes.byref(step),
            ctypes.byref(run),
            done_fd,
        )
        return CpuRun(step, run, found)

    def _background_thread(self) -> ctypes.c_void_p:
        if self._background is None:
            # ctypes takes results for 32-bit integers, which would cut the address.
            self._cpp.triolet_background_open.restype = ctypes.c_void_p
            self._background = ctypes.c_void_p(self._cpp.triolet_background_open())
            # The thread ends with the model.
            weakref.finalize(self, self._cpp.triolet_background_close, self._background)
        return self._background

    def _step(self, batch: ForwardBatch, **outputs: int) -> StepStruct:
        """Fill in the struct of a batch; its tensors must be contiguous CPU tensors of the dtypes of `ForwardBatch`."""
        attention = batch.attention
        keys, values, group_of_layer = self._addresses_of(batch.cache)
        groups = (CacheGroupStruct * (1 + len(batch.further_attention)))(
            *(
                CacheGroupStruct(one.slot_mapping.data_ptr(), one.block_tables.data_ptr())
                for one in (attention, *batch.further_attention)
            )
        )
        step = StepStruct(
            token_ids=batch.token_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            logits_indices=batch.logits_indices.data_ptr(),
            cu_query_lens=attention.cu_query_lens.data_ptr(),
            seq_lens=attention.seq_lens.data_ptr(),
            groups=ctypes.addressof(groups),
            group_of_layer=ctypes.addressof(group_of_layer),
            keys=ctypes.addressof(keys),
            values=ctypes.addressof(values),
            block_tables_stride=attention.block_tables.stride(0),
            num_groups=len(groups),
            num_tokens=len(batch.token_ids),
            num_seqs=len(attention.query_lens_host),
            num_logits=len(batch.logits_indices),
            block_size=batch.cache[0].keys.shape[1],
            num_threads=torch.get_num_threads(),
            **outputs,
        )
        virtual = None
        if batch.embeddings is not None:
            virtual = _virtual_addresses(batch.embeddings, len(batch.token_ids))
            step.embeddings = ctypes.addressof(virtual)
        # C++ reads them by address: they must live as long as the struct.
        step.kept = batch, keys, values, groups, group_of_layer, virtual
        self._adapter_slots = batch.adapter_slots
        if batch.adapter_slots is not None:
            self._place_adapters(step, batch.adapter_slots)
        return step

    def _place_adapters(self, step: StepStruct, slots: Tensor) -> None:
        """Point a step at the adapters of its rows."""
        assert self._adapters is not None  # no row has a slot otherwise
        used = set(slots.tolist())
        table = (ctypes.c_void_p * (max(used) + 1))()
        adapters = []
        for slot in used:
            if slot >= 0 and (adapter := self._adapters.in_slot(slot)) is not None:
                table[slot] = adapter.address
                adapters.append(adapter)
        step.adapter_slots, step.adapters = slots.data_ptr(), ctypes.addressof(table)
        step.kept += (slots, table, adapters)

    def _addresses_of(
        self, cache: tuple[LayerCache, ...]
    ) -> tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_int32]]:
        """Return the addresses of keys and values of each layer, and its cache group."""
        if cache is not self._cache:  # it is the same one for the life of an engine
            layers = [cache[place] for place in self._cache_places]
            self._cache_addresses = (
                addresses([layer.keys for layer in layers]),
                addresses([layer.values for layer in layers]),
                (ctypes.c_int32 * len(layers))(*(layer.group for layer in layers)),
            )
            self._cache = cache
        return self._cache_addresses


def _virtual_addresses(embeddings: InputEmbeddings, num_tokens: int) -> ctypes.Array[ctypes.c_void_p]:
    """Return the address of each token's own embedding, null for most; valid as long as `embeddings` lives."""
    virtual = (ctypes.c_void_p * num_tokens)()
    for token, value in zip(embeddings.tokens.tolist(), embeddings.values, strict=True):
        virtual[token] = value.data_ptr()
    return virtual
