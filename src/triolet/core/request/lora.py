"""LoRA adapters: what a caller names, what a request is admitted with, and which modules of a model can be adapted."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Self

import attrs

from triolet.errors import AdaptersPinned, InvalidRequest, UnsupportedFeature, shown


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

    @property
    def folder(self) -> Path:
        """`lora_path` as an absolute path."""
        # The folder may be read again by a process with another working directory.
        return Path(self.lora_path).expanduser().absolute()


@attrs.frozen(kw_only=True)
class Adapter:
    """Adapter whose files were read and checked; part of a request, because its answer depends on it."""

    name: str
    int_id: int
    path: str  # its folder
    digest: str  # of the contents of its files: two adapters of one digest compute the same
    base_model_name: str | None = None

    @classmethod
    def of(cls, request: LoRARequest, digest: str) -> Self:
        """Make the adapter that a caller names, with the digest of its files."""
        return cls(
            name=request.lora_name,
            int_id=request.lora_int_id,
            path=str(request.folder),
            digest=digest,
            base_model_name=request.base_model_name,
        )

    @property
    def lora_request(self) -> LoRARequest:
        """Adapter as a caller names it."""
        return LoRARequest(self.name, self.int_id, self.path, self.base_model_name)


class AdapterTable:
    """Loaded adapters, the one that was used last at the end.

    A registered adapter is known until it is removed: requests have only its name. Its weights make way like others',
    and are read again.

    Args:
        is_enabled: whether requests may have adapters.
        most: of how many the weights may be kept.
    """

    def __init__(self, is_enabled: bool, most: int) -> None:
        self._is_enabled, self._most = is_enabled, most
        self._adapters: OrderedDict[int, Adapter] = OrderedDict()
        self._pinned: set[int] = set()
        self._registered: set[int] = set()

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """Loaded adapters, and registered ones."""
        return tuple(self._adapters.values())

    @property
    def resident(self) -> tuple[Adapter, ...]:
        """Adapters of which the weights are kept: pinned ones, and those that were used last."""
        unpinned = [number for number in self._adapters if number not in self._pinned]
        room = max(0, self._most - len(self._pinned))
        away = set(unpinned[: max(0, len(unpinned) - room)])
        return tuple(adapter for number, adapter in self._adapters.items() if number not in away)

    def check_enabled(self, request: LoRARequest) -> None:
        """Check that requests may have adapters.

        Raises:
            InvalidRequest: they may not.
        """
        if not self._is_enabled:
            raise InvalidRequest(
                f"Got lora_request {shown(request)} but LoRA is not enabled!", field="lora", got=request
            )

    def find(self, request: LoRARequest) -> Adapter | None:
        """Return the loaded adapter of a request, which counts as a use; None if its folder must be read.

        Raises:
            InvalidRequest: name and number disagree with those of a loaded adapter.
        """
        number, name = request.lora_int_id, request.lora_name
        adapter = self._adapters.get(number)
        if adapter is not None and adapter.name != name:
            raise InvalidRequest(
                f"lora_int_id must belong to one adapter; {number} is {shown(adapter.name)}, got {shown(name)}",
                field="lora_int_id",
                got=number,
            )
        same_name = next((one for one in self._adapters.values() if one.name == name), None)
        if same_name is not None and same_name.int_id != number:
            raise InvalidRequest(
                f"lora_name must belong to one adapter; {shown(name)} has lora_int_id {same_name.int_id}, "
                f"got {number}",
                field="lora_name",
                got=name,
            )
        if adapter is None or request.load_inplace:
            return None
        self._adapters.move_to_end(number)
        return adapter

    def has_others(self, request: LoRARequest, digest: str) -> bool:
        """Return True if the name or the number of a request belongs to another adapter, or to other contents."""
        wanted = (request.lora_int_id, request.lora_name, digest)
        return any(
            wanted[0] == one.int_id or wanted[1] == one.name
            for one in self._adapters.values()
            if (one.int_id, one.name, one.digest) != wanted
        )

    def add(self, adapter: Adapter) -> None:
        """Enter an adapter that was read; the one that was not used for longest makes way, and its requests go on.

        Raises:
            AdaptersPinned: there is no room for another adapter, because all are pinned.
        """
        if adapter.int_id not in self._adapters and len(self._adapters) >= self._most:
            if len(self._pinned) >= self._most:
                raise AdaptersPinned(self._most)
            kept = self._pinned | self._registered
            if (longest_unused := next((one for one in self._adapters if one not in kept), None)) is not None:
                del self._adapters[longest_unused]
        self._adapters[adapter.int_id] = adapter
        self._adapters.move_to_end(adapter.int_id)

    def register(self, int_id: int) -> None:
        """Know a loaded adapter until it is removed, also while its weights make way for those of others."""
        self._registered.add(int_id)

    def remove(self, int_id: int) -> bool:
        """Forget an adapter. Return False if it is not loaded."""
        self._pinned.discard(int_id)
        self._registered.discard(int_id)
        return self._adapters.pop(int_id, None) is not None

    def pin(self, int_id: int) -> Adapter:
        """Keep an adapter with its weights until it is removed, and return it.

        Raises:
            InvalidRequest: it is not loaded.
            AdaptersPinned: as many are pinned as there is room for.
        """
        if (adapter := self._adapters.get(int_id)) is None:
            raise InvalidRequest(
                f"Pinning failed. LoRA {int_id} is not registered.", field="lora_int_id", got=int_id
            )
        if int_id not in self._pinned and len(self._pinned) >= self._most:
            raise AdaptersPinned(self._most)
        self._pinned.add(int_id)
        return adapter

    def is_pinned(self, adapter: Adapter) -> bool:
        """Return True for an adapter that stays until it is removed."""
        return adapter.int_id in self._pinned


@attrs.frozen
class AdapterModule:
    """Linear layer or embedding of the model that an adapter may change."""

    name: str  # in the checkpoint, without the prefix of the family: `layers.0.self_attn.q_proj`
    layer: str  # layer of the decoder that it is part of: `layers.0.qkv`
    start: int  # first row of it in that layer
    num_out: int
    num_in: int
    is_embedding: bool = False
    # Heads, if its rows are those of a head's query, key and value after those of the head before; 0 for others.
    num_joined_heads: int = 0


@attrs.frozen
class AdapterSupport:
    """Parts of a model that adapters may change, and the limit of their ranks."""

    modules: tuple[AdapterModule, ...]
    prefix: str  # of the names of all modules in a checkpoint, such as `model.`
    max_rank: int


@attrs.frozen
class AdapterUsage:
    """LoRA adapters of the live requests, by name; an adapter with requests of both kinds is in both."""

    max_loras: int  # most in one step
    running: tuple[str, ...]
    waiting: tuple[str, ...]
