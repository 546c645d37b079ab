"""Tensors of a GGUF model under the names of its layers, dequantised while they are read, or in their blocks.

What llama.cpp's converter did to the weights is undone here: the rows of Llama's query and key projections, which it
permutes for its own rotary encoding, and the 1 that it adds to the norms of Gemma.
"""

from __future__ import annotations

from io import FileIO

import attrs
import numpy as np
import torch
from torch import Tensor

from triolet.errors import ModelFileError
from triolet.kernels.cpu.gemm.blocks import GGUF_FORMATS, BlockFormat, BlockRows, MappedRows
from triolet.model.gguf.dequantize import Bytes, Floats, dequantize
from triolet.model.gguf.file import GgufTensor
from triolet.model.gguf.ggml_types import GgmlType

_CHUNK_VALUES = 2**20
"""Values dequantised at a time: some 10 MB of intermediate arrays."""


@attrs.frozen
class GgufSource:
    """One tensor of the decoder in a GGUF file."""

    tensor: GgufTensor
    expert: int | None = None  # which matrix of a stack of experts; None for the whole tensor
    num_permuted_heads: int = 0  # heads whose rows are permuted; 0 for none
    offset: float = 0.0  # added to each value

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]

    @property
    def num_bytes(self) -> int:
        return self.tensor.num_bytes if self.expert is None else self.tensor.num_bytes // self.tensor.shape[0]

    @property
    def begin(self) -> int:
        return self.tensor.begin + (self.expert or 0) * self.num_bytes


@attrs.frozen(eq=False)
class GgufCheckpoint:
    """The tensors of a GGUF model, by the decoder's names for them, in the dtype that was asked for."""

    tensors: dict[str, GgufSource]
    dtype: torch.dtype
    kept: set[str] = attrs.field(factory=set, init=False)  # tensors that were read as they are stored

    def dtype_of(self, name: str) -> torch.dtype:
        return self.dtype

    def block_format(self, name: str) -> BlockFormat | None:
        source = self.tensors[name]
        return None if source.offset else GGUF_FORMATS.get(source.tensor.type.name)

    def read_blocks(self, name: str) -> BlockRows:
        """Read the blocks of one tensor; errors are those of `read`."""
        source, kind = self.tensors[name], GGUF_FORMATS[self.tensors[name].tensor.type.name]
        try:
            with source.tensor.path.open("rb", buffering=0) as file:
                file.seek(source.begin)
                data = _read_exactly(file, source.num_bytes, source.tensor)
        except OSError as error:
            raise ModelFileError(source.tensor.path, f"cannot be read: {error.strerror or error}") from error
        rows = torch.from_numpy(data).view(source.shape[0], -1)
        if heads := source.num_permuted_heads:  # as in `read`, with whole rows of blocks
            rows = rows.view(heads, len(rows) // heads // 2, 2, -1).transpose(1, 2).reshape(rows.shape)
        self.kept.add(name)
        return BlockRows(kind, rows)

    def map_blocks(self, name: str) -> MappedRows | None:
        """Map the blocks of one tensor.

        Raises:
            ModelFileError: the file has gone, or become shorter, since it was opened.
        """
        source, kind = self.tensors[name], self.block_format(name)
        if kind is None or source.num_permuted_heads:
            return None
        try:
            mapped = np.memmap(
                source.tensor.path, np.uint8, "r", offset=source.begin, shape=(source.num_bytes,)
            )
        except (OSError, ValueError) as error:
            raise ModelFileError(source.tensor.path, f"cannot be mapped: {error}") from error
        self.kept.add(name)
        return MappedRows(kind, mapped.ctypes.data, mapped)

    def read(self, name: str, out: Tensor | None = None) -> Tensor:
        """Read and dequantise one tensor, on the CPU.

        Args:
            name: of the tensor.
            out: where to put it, of its shape; by default memory of its own.

        Raises:
            ModelFileError: the file has gone, or become shorter, since it was opened.
        """
        source = self.tensors[name]
        tensor = torch.empty(source.shape, dtype=self.dtype) if out is None else out
        kind, heads = source.tensor.type, source.num_permuted_heads
        # a chunk is whole rows, and of a permuted tensor whole heads
        rows = tensor.view(heads or tensor.numel() // source.shape[-1], -1)
        try:
            with source.tensor.path.open("rb", buffering=0) as file:
                file.seek(source.begin)
                for chunk in rows.split(max(1, _CHUNK_VALUES // rows.shape[1])):
                    num_bytes = chunk.numel() // kind.block_values * kind.block_bytes
                    values = torch.from_numpy(_values(_read_exactly(file, num_bytes, source.tensor), kind))
                    if source.offset:
                        values = values + source.offset
                    if heads:  # [pairs, 2, columns] in the file, [2, pairs, columns] here
                        pairs = source.shape[0] // heads // 2
                        values = values.view(len(chunk), pairs, 2, -1).transpose(1, 2)
                    chunk.copy_(values.reshape(chunk.shape))
        except OSError as error:
            raise ModelFileError(source.tensor.path, f"cannot be read: {error.strerror or error}") from error
        return tensor


def _read_exactly(file: FileIO, num_bytes: int, tensor: GgufTensor) -> Bytes:
    # Not filled with zeros first, as a bytearray would be.
    data = np.empty(num_bytes, dtype=np.uint8)
    left = data.data
    while left:
        if not (count := file.readinto(left)):
            raise ModelFileError(tensor.path, f"is truncated: it ends within tensor {tensor.name!r}")
        left = left[count:]
    return data


def _values(data: Bytes, kind: GgmlType) -> Floats:
    return dequantize(data.reshape(-1, kind.block_bytes), kind.name)


def gguf_checkpoint(
    tensors: dict[str, GgufTensor],
    dtype: torch.dtype,
    *,
    permuted_heads: dict[str, int],
    norm_offset: float,
) -> GgufCheckpoint:
    """Return the checkpoint of some tensors; stacks of experts become a matrix each.

    Args:
        tensors: by name.
        dtype: what they are read as.
        permuted_heads: number of heads of the projections whose rows are permuted, by their name in a layer.
        norm_offset: added to the weights of norms.
    """
    sources: dict[str, GgufSource] = {}
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".")
        if stem.endswith("_exps") and len(tensor.shape) == (2 if part == "bias" else 3):
            for expert in range(tensor.shape[0]):
                sources[f"{stem}.{expert}.{part}"] = GgufSource(tensor, expert)
            continue
        heads = permuted_heads.get(stem.rpartition(".")[2], 0)
        if tensor.shape[0] % (
            2 * heads or 1
        ):  # misshapen: an error that names it comes from the comparison of shapes
            heads = 0
        is_norm = stem.endswith("_norm") and part == "weight"
        sources[name] = GgufSource(tensor, None, heads, norm_offset if is_norm else 0.0)
    return GgufCheckpoint(sources, dtype)
