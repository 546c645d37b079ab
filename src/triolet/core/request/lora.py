"""LoRA adapters: what a caller names, what a request is admitted with, and which modules of a model can be adapted."""

from __future__ import annotations

import attrs

from triolet.errors import InvalidRequest, UnsupportedFeature


def _check_text(field: str, value: object) -> None:
    if value == "" or not isinstance(value, str):
        raise InvalidRequest(f"{field} must be a non-empty string; got {value!r}", field=field, got=value)


@attrs.frozen(eq=False)
class LoRARequest:
    """Adapter that a caller names; two are equal if they have the same name.

    Args:
        lora_name: name of the adapter.
        lora_int_id: number of the adapter, at least 1; no other adapter of the engine has it.
        lora_path: folder with adapter_config.json and adapter_model.safetensors.
        base_model_name: name of the model that it was trained on, shown in lists of models.
        load_inplace: read the folder again although an adapter with this number is loaded.
        is_3d_lora_weight: not supported; must be False.
    Raises:
        InvalidRequest: an argument of the wrong type or out of its range.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __attrs_post_init__(self) -> None:
        _check_text("lora_name", self.lora_name)
        _check_text("lora_path", self.lora_path)
        number: object = self.lora_int_id
        if not isinstance(number, int) or isinstance(number, bool):
            raise InvalidRequest(
                f"lora_int_id must be a whole number; got {number!r}", field="lora_int_id", got=number
            )
        if number < 1:
            raise InvalidRequest(f"id must be > 0, got {number}", field="lora_int_id", got=number)
        if self.base_model_name is not None:
            _check_text("base_model_name", self.base_model_name)
        if self.is_3d_lora_weight:
            raise UnsupportedFeature(
                "is_3d_lora_weight must be False: adapters of fused experts are not supported",
                field="is_3d_lora_weight",
                got=True,
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and other.lora_name == self.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)

    @property
    def adapter_id(self) -> int:
        """`lora_int_id`."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """`lora_name`."""
        return self.lora_name

    @property
    def path(self) -> str:
        """`lora_path`."""
        return self.lora_path


@attrs.frozen(kw_only=True)
class Adapter:
    """Adapter whose files were read and checked; part of a request, because its answer depends on it."""

    name: str
    int_id: int
    path: str  # its folder
    digest: str  # of the contents of its files: two adapters of one digest compute the same
    base_model_name: str | None = None

    @property
    def lora_request(self) -> LoRARequest:
        """Adapter as a caller names it."""
        return LoRARequest(self.name, self.int_id, self.path, self.base_model_name)


@attrs.frozen
class AdapterModule:
    """Linear layer or embedding of the model that an adapter may change."""

    name: str  # in the checkpoint, without the prefix of the family: `layers.0.self_attn.q_proj`
    layer: str  # layer of the decoder that it is part of: `layers.0.qkv`
    start: int  # first row of it in that layer
    num_out: int
    num_in: int
    is_embedding: bool = False


@attrs.frozen
class AdapterSupport:
    """Parts of a model that adapters may change, and the limit of their ranks."""

    modules: tuple[AdapterModule, ...]
    prefix: str  # of the names of all modules in a checkpoint, such as `model.`
    max_rank: int
