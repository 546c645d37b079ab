"""Checkpoint whose experts are stacked, as gpt-oss has them: a matrix and a bias for each expert, plain or MXFP4.

The matrices of all experts of a layer are one tensor, [num_experts, in, out] if it is plain. In MXFP4 they are two:
`_blocks` [num_experts, out, in / 32, 16] with two values of four bits in a byte, and `_scales` [num_experts, out,
in / 32] with the exponent of each 32. The rows of gate and up alternate. They are read expert by expert, under the
names that the other families with experts have.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import attrs
import torch
from torch import Tensor

from triolet.errors import InvariantViolated, UnsupportedModel
from triolet.model.folder.checkpoint import Checkpoint, StoredTensor
from triolet.model.folder.json_fields import Fields
from triolet.model.quantized.checkpoint import SECTION
from triolet.model.quantized.dequantize import MXFP4_BLOCK_BYTES, mxfp4
from triolet.model.quantized.layer import FLOATS, Module

MXFP4: Final = "mxfp4"
"""`quant_method` of quantised folders of such models."""

_EXPERTS: Final = ".experts"
# Each stack, with the projections that its rows are: every row, or every other one from the first or second on.
_STACKS: Final = {
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}


@attrs.frozen
class ExpertTensor:
    """Matrix or bias of one expert, not read yet."""

    shape: tuple[int, ...]  # [out, in], or [out]
    num_bytes: int  # its share of what the expert takes on disk
    sources: tuple[str, ...]  # the expert's part of each stack: values, or blocks and scales
    rows: slice  # its rows among those of the expert


@attrs.frozen(eq=False)
class StackedExperts:
    """Tensors of a model folder, with a tensor for each expert in place of the stacks."""

    tensors: Mapping[str, StoredTensor | ExpertTensor]
    _stored: Checkpoint  # has the experts' parts of the stacks, too
    num_quantized: int  # matrices in MXFP4
    kept: frozenset[str] = frozenset()  # none: they are all dequantised
    # The part that was read last: gate and up come one after the other out of the same.
    _last: dict[tuple[str, ...], Tensor] = attrs.field(factory=dict, init=False)

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which `read` gives a tensor."""
        tensor = self.tensors[name]
        if isinstance(tensor, StoredTensor):
            return self._stored.dtype_of(name)
        return torch.float32 if len(tensor.sources) > 1 else self._stored.dtype_of(tensor.sources[0])

    def read(self, name: str, out: Tensor | None = None) -> Tensor:
        """One tensor, on the CPU; errors are those of `Checkpoint.read`."""
        tensor = self.tensors[name]
        if isinstance(tensor, StoredTensor):
            return self._stored.read(name, out)
        rows = self._rows_of(tensor.sources)[tensor.rows]
        return rows.contiguous() if out is None else out.copy_(rows)

    def _rows_of(self, sources: tuple[str, ...]) -> Tensor:
        """Return an expert's part of a stack, [out, in] or [out]."""
        if sources not in self._last:
            self._last.clear()
            if len(sources) > 1:
                blocks, scales = map(self._stored.read_raw, sources)
                self._last[sources] = mxfp4(blocks, scales)
            else:
                values = self._stored.read(sources[0])
                # Plain matrices lie as [in, out].
                self._last[sources] = values.T if values.ndim == 2 else values
        return self._last[sources]

    def block_format(self, name: str) -> None:
        """Return None: the CPU kernels have no such blocks."""
        return

    def read_blocks(self, name: str) -> NoReturn:
        raise InvariantViolated(f"tensor {name!r} has no blocks")

    def map_blocks(self, name: str) -> None:
        """Return None: there are no blocks."""


def open_stacked_experts(checkpoint: Checkpoint, config: Mapping[str, Any], folder: Path) -> StackedExperts:
    """Find the stacks of a checkpoint and check that their tensors fit each other.

    Args:
        checkpoint: of the model folder.
        config: its config.json, perhaps with a `quantization_config`.
        folder: where it lies, for error messages.
    Raises:
        UnsupportedModel: a tensor of a stack is missing or of another dtype or shape, or the folder is quantised in
            another way than MXFP4.
        ModelFileError: `quantization_config` is wrong.
    """
    fields = Fields(folder / "config.json", dict(config))
    section = fields.section(SECTION)
    if section is not None and section.values and (method := section.text("quant_method", "")) != MXFP4:
        raise UnsupportedModel(
            f"{fields.path}: {SECTION}.quant_method must be {MXFP4} for stacked experts; got {method!r}"
        )
    found = _Stacks(checkpoint)
    endings = tuple(f".{stack}{part}" for stack in _STACKS for part in ("", "_blocks", "_scales", "_bias"))
    names = {name.rpartition(".")[0] for name in checkpoint.tensors if name.endswith(endings)}
    for name in sorted(name for name in names if name.endswith(_EXPERTS)):
        for stack in _STACKS:
            found.add(Module(name, checkpoint), stack)
    tensors = {name: stored for name, stored in checkpoint.tensors.items() if name not in found.hidden}
    return StackedExperts(
        {**tensors, **found.tensors},
        Checkpoint({**tensors, **found.parts}),
        sum(len(tensor.sources) > 1 for tensor in found.tensors.values()),
    )


@attrs.frozen(eq=False)
class _Stacks:
    """Collects the experts of a checkpoint."""

    checkpoint: Checkpoint
    tensors: dict[str, ExpertTensor] = attrs.field(factory=dict, init=False)
    parts: dict[str, StoredTensor] = attrs.field(factory=dict, init=False)
    hidden: set[str] = attrs.field(factory=set, init=False)  # the stacks themselves

    def add(self, module: Module, stack: str) -> None:
        """Add the matrices and biases of one stack."""
        blocks, scales = f"{stack}_blocks", f"{stack}_scales"
        if module.find(blocks) is None and module.find(scales) is None:
            num_experts, num_in, num_out = _sizes(module, stack, FLOATS, None, None, None)
            stored = [stack]
        else:
            if module.find(stack) is not None:
                raise module.wrong(stack, f"absent beside {blocks}", "both")
            num_experts, num_out, num_groups, _ = _sizes(
                module, blocks, ("U8",), None, None, None, MXFP4_BLOCK_BYTES
            )
            module.need(scales, ("U8",), num_experts, num_out, num_groups)
            num_in, stored = num_groups * 2 * MXFP4_BLOCK_BYTES, [blocks, scales]
        bias = f"{stack}_bias"
        module.need(bias, FLOATS, num_experts, num_out)
        for expert in range(num_experts):
            weights = tuple(self._part(module, part, expert) for part in stored)
            biases = (self._part(module, bias, expert),)
            for name, rows in _STACKS[stack].items():
                count = len(range(num_out)[rows])
                full = f"{module.name}.{expert}.{name}"
                self._add(f"{full}.weight", (count, num_in), num_out, weights, rows)
                self._add(f"{full}.bias", (count,), num_out, biases, rows)

    def _add(
        self, name: str, shape: tuple[int, ...], num_out: int, sources: tuple[str, ...], rows: slice
    ) -> None:
        num_bytes = sum(self.parts[source].num_bytes for source in sources) * shape[0] // num_out
        self.tensors[name] = ExpertTensor(shape, num_bytes, sources, rows)

    def _part(self, module: Module, part: str, expert: int) -> str:
        """Add one expert's part of a stack and return its name."""
        full = module.full(part)
        stack = self.checkpoint.tensors[full]
        size = stack.num_bytes // stack.shape[0]
        name = f"{full}[{expert}]"
        self.parts[name] = attrs.evolve(
            stack, shape=stack.shape[1:], num_bytes=size, begin=stack.begin + expert * size
        )
        self.hidden.add(full)
        return name


def _sizes(module: Module, part: str, dtypes: tuple[str, ...], *sizes: int | None) -> tuple[int, ...]:
    shape = module.need(part, dtypes, *sizes)
    # Sizes of an empty tensor may be any numbers: a file of a few bytes could name a billion experts.
    if min(shape) < 1:
        raise module.wrong(part, "of sizes of at least 1", list(shape))
    return shape
