"""Metadata of the model in a GGUF file."""

from __future__ import annotations

from typing import Any

import attrs

from triolet.errors import ModelFileError
from triolet.model.folder.json_fields import Fields
from triolet.model.gguf.file import GgufArray, GgufFile, GgufTensor

_MAX_LAYERS = 1024


@attrs.frozen
class GgufMetadata:
    """Metadata of a model, with the keys of its architecture by their last part."""

    file: GgufFile

    @property
    def architecture(self) -> str:
        name = self.file.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise ModelFileError(self.file.path, f"general.architecture must be a string; got {name!r}")
        return name

    @property
    def fields(self) -> Fields:
        """Keys of the architecture, without its name before them."""
        prefix = f"{self.architecture}."
        values = {
            key.removeprefix(prefix): self._plain(key) for key in self.file.metadata if key.startswith(prefix)
        }
        return Fields(self.file.path, values, prefix)

    def _plain(self, key: str) -> Any:
        """Return a value; of an array with a number per layer, all the same, that number."""
        value = self.file.metadata[key]
        if isinstance(value, GgufArray) and value.holds_numbers and 0 < value.count <= _MAX_LAYERS:
            same = set(value.numbers())
            return same.pop() if len(same) == 1 else value
        return value

    def required(self, name: str) -> int:
        """Return an integer of at least 1 that must be there."""
        if name not in self.fields:
            raise ModelFileError(self.file.path, f"{self.architecture}.{name} is missing")
        return self.fields.integer(name, 0)

    @property
    def num_layers(self) -> int:
        number = self.required("block_count")
        if number > len(self.file.tensors):  # the decoder makes a plan for each
            raise self.fields.wrong(
                "block_count", f"at most the number of tensors ({len(self.file.tensors)})"
            )
        return number

    def per_layer(self, name: str, default: int) -> list[int]:
        """Return an integer of each layer, of at least 1, that stands there once for all or in an array."""
        value = self.fields.values.get(name)
        if not isinstance(value, GgufArray):
            return [self.fields.integer(name, default)] * self.num_layers
        numbers = [int(number) for number in value.numbers()]
        if len(numbers) != self.num_layers or min(numbers) < 1:
            raise self.fields.wrong(name, f"{self.num_layers} integers of at least 1, or one")
        return numbers

    @property
    def num_experts(self) -> int:
        number = self.required("expert_count")
        stacked = max((tensor.shape[0] for tensor in self.expert_stacks), default=0)
        if number > stacked:
            raise self.fields.wrong("expert_count", f"at most the number of experts in a tensor ({stacked})")
        return number

    @property
    def expert_stacks(self) -> list[GgufTensor]:
        """Tensors that hold a matrix of each expert, [num_experts, num_out, num_in]."""
        tensors = self.file.tensors.items()
        return [
            tensor for name, tensor in tensors if name.endswith("_exps.weight") and len(tensor.shape) == 3
        ]

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        heads = self.required("attention.head_count")
        return self.fields.integer("attention.key_length", max(1, self.required("embedding_length") // heads))

    @property
    def rotary_dimensions(self) -> int:
        """Numbers of a head that turn with its position."""
        return self.fields.integer("rope.dimension_count", self.head_dim)
