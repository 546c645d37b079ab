"""Reading of a LoRA adapter as peft saves it: adapter_config.json and adapter_model.safetensors, without torch.

Every field of the configuration is honoured, known to change nothing at inference, or refused by its name. Which
modules are adapted is told by the names of the tensors: `target_modules` may name modules that the model does not have.
The engine reads an adapter to check it, and the runner reads it again to use it; the digest tells if the files have
changed in between.

Source: peft 0.21, `LoraConfig` and `save_pretrained`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from triolet.core.request.lora import AdapterModule, AdapterSupport
from triolet.errors import AdapterError, ModelFileError, shown
from triolet.model.architectures.language_part import language_name
from triolet.model.folder.json_fields import Fields

logger = logging.getLogger("triolet.runner")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ITEM_BYTES: Final[Mapping[str, int]] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}

# Of training, or descriptions: they change nothing at inference.
_IGNORED: Final = frozenset(
    "peft_type auto_mapping base_model_name_or_path revision task_type inference_mode peft_version runtime_config "
    "target_modules exclude_modules layers_to_transform layers_pattern target_parameters lora_dropout "
    "megatron_config megatron_core loftq_config eva_config corda_config lora_ga_config qalora_group_size "
    # honoured below
    "r lora_alpha use_rslora rank_pattern alpha_pattern lora_bias use_dora init_lora_weights bias "
    # B A is always [out, in]: only a merge into the stored weights would have to transpose it
    "fan_in_fan_out".split()
)
_PREFIX = "base_model.model."
# Paths of the decoder in the wrappers of multimodal models.
_WRAPPERS = ("model.language_model.", "language_model.model.", "language_model.", "model.")
_BASE_COPY = ".base_layer.weight"
_PARTS: Final[Mapping[str, str]] = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
    ".lora_B.bias": "bias",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",  # as older versions of peft wrote it
}


@attrs.frozen
class AdapterTensor:
    """Place of a tensor in the file of an adapter."""

    name: str  # as stored
    dtype: str  # in the words of safetensors, such as `BF16`
    shape: tuple[int, ...]
    begin: int  # in the file, bytes
    end: int


@attrs.frozen(kw_only=True)
class AdaptedModule:
    """Tensors of an adapter that change one module: its output gets scaling * B A x."""

    module: AdapterModule
    a: AdapterTensor  # [rank, num_in]
    b: AdapterTensor  # [num_out, rank]
    scaling: float
    bias: AdapterTensor | None = None  # [num_out], of B
    magnitude: AdapterTensor | None = None  # [num_out], of DoRA


@attrs.frozen
class AdapterFiles:
    """Contents of an adapter folder that fit the model."""

    digest: str
    modules: tuple[AdaptedModule, ...]
    skipped: tuple[str, ...]  # tensors of a vision part, which is not read
    data: bytes = attrs.field(repr=False)  # of the file with the weights


def read_adapter(folder: Path, support: AdapterSupport) -> AdapterFiles:
    """Read an adapter folder and check all of it against the model.

    Raises:
        AdapterError: a file is missing, truncated or malformed, a field is not supported, a tensor does not fit the
            model, or a rank exceeds the limit; names the file and the field or the tensor.
    """
    try:
        config_data = read_adapter_file(folder / CONFIG, folder)
        data = read_adapter_file(folder / WEIGHTS, folder)
        config = _AdapterConfig.parse(folder / CONFIG, config_data)
    except ModelFileError as error:
        raise AdapterError(error.path, error.problem) from error
    stored = tuple(stored_tensors(folder / WEIGHTS, data))
    tensors = tuple(
        tensor for tensor in stored if language_name(tensor.name.removeprefix(_PREFIX)) is not None
    )
    skipped = tuple(tensor.name for tensor in stored if tensor not in tensors)
    modules = _modules(folder / WEIGHTS, tensors, config, support)
    digest = hashlib.blake2b(digest_size=16)
    for part in (config_data, data):
        digest.update(len(part).to_bytes(8, "big") + part)
    return AdapterFiles(digest.hexdigest(), modules, skipped, data)


def digest_of_folder(folder: Path, support: AdapterSupport | None) -> str:
    """Read an adapter folder and check it; return the digest of its contents. The log names what is skipped.

    Args:
        folder: of the adapter.
        support: parts of the model that adapters may change; None for a model without such parts.
    Raises:
        AdapterError: see `read_adapter`; or it is no folder, or the model takes no adapters.
    """
    if support is None:
        raise AdapterError(folder, "cannot be used: this model takes no adapters")
    if not folder.is_dir():
        raise AdapterError(folder, "is no folder with an adapter (hub ids are not supported: fetch it first)")
    files = read_adapter(folder, support)
    if files.skipped:
        logger.warning(
            "adapter %s: %d tensors of the vision part are skipped, such as %s: only the language part is computed",
            folder,
            len(files.skipped),
            files.skipped[0],
        )
    return files.digest


def read_adapter_file(path: Path, folder: Path) -> bytes:
    """Return the contents of a file of an adapter's folder.

    Raises:
        AdapterError: it is missing or cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        refusal = f"; {', '.join(pickled)} is not read: pickled weights can run code" if pickled else ""
        raise AdapterError(path, f"is missing{refusal if path.name == WEIGHTS else ''}") from None
    except OSError as error:
        raise AdapterError(path, f"cannot be read: {error.strerror or error}") from error


# ------------------------------------------------------------------------------------ configuration


@attrs.frozen(kw_only=True)
class _AdapterConfig:
    """Fields of adapter_config.json that matter for inference."""

    path: Path
    rank: int
    alpha: float
    is_rank_stabilized: bool
    ranks: tuple[tuple[re.Pattern[str], int], ...]
    alphas: tuple[tuple[re.Pattern[str], float], ...]
    has_bias: bool
    is_dora: bool

    @classmethod
    def parse(cls, path: Path, data: bytes) -> _AdapterConfig:
        try:
            values = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise AdapterError(path, f"is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise AdapterError(path, f"must hold a JSON object; got {type(values).__name__}")
        fields = Fields(path, values)
        if fields.text("peft_type", "") != "LORA":
            raise fields.wrong("peft_type", "LORA")
        if fields.text("bias", "none") != "none":
            raise fields.wrong("bias", "none: biases of the model itself are not adapted")
        start = values.get("init_lora_weights", True)
        changes_base = isinstance(start, str) and start.lower().startswith(
            ("pissa", "olora", "corda", "loftq", "lora_ga")
        )
        if changes_base:
            raise fields.wrong(
                "init_lora_weights", "one that leaves the model's weights as they are (convert the adapter)"
            )
        for name, value in values.items():
            # Absent, null, false and empty all say that a feature is not used.
            if name not in _IGNORED and value not in (None, False, 0, "", [], {}):
                raise AdapterError(path, f"{name} is not supported; got {shown(value)}")
        return cls(
            path=path,
            rank=fields.integer("r", 8),
            alpha=fields.number("lora_alpha", 8.0),
            is_rank_stabilized=fields.flag("use_rslora", False),
            ranks=tuple(
                (pattern, section.integer(text, 1))
                for section, text, pattern in _patterns(fields, "rank_pattern")
            ),
            alphas=tuple(
                (pattern, section.number(text, 1.0))
                for section, text, pattern in _patterns(fields, "alpha_pattern")
            ),
            has_bias=fields.flag("lora_bias", False),
            is_dora=fields.flag("use_dora", False),
        )

    def rank_of(self, name: str) -> int:
        """Return the rank of a module: the first pattern that matches its name, in the order of the file, decides."""
        return next((rank for pattern, rank in self.ranks if pattern.match(name)), self.rank)

    def scaling_of(self, name: str) -> float:
        alpha = next((alpha for pattern, alpha in self.alphas if pattern.match(name)), self.alpha)
        rank = self.rank_of(name)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def _patterns(fields: Fields, name: str) -> Iterator[tuple[Fields, str, re.Pattern[str]]]:
    section = fields.section(name)
    for text in () if section is None else section.values:
        try:
            pattern = re.compile(rf"(.*\.)?({text})$")
        except re.error as error:
            raise AdapterError(
                fields.path, f"{name} must hold regular expressions; got {shown(text)}: {error}"
            ) from error
        assert section is not None
        yield section, text, pattern


# ------------------------------------------------------------------------------------------ tensors


def stored_tensors(path: Path, data: bytes) -> Iterator[AdapterTensor]:
    """Iterate over the tensors in the header of a safetensors file, each checked to lie in the file."""
    if len(data) < 8:
        raise AdapterError(path, f"is truncated: a safetensors file has at least 8 bytes; got {len(data)}")
    (header_bytes,) = struct.unpack("<Q", data[:8])
    origin = 8 + header_bytes
    if origin > len(data):
        raise AdapterError(path, "is truncated or not a safetensors file: it ends within its header")
    try:
        header: dict[str, Any] = json.loads(data[8:origin])
        header.pop("__metadata__", None)
        entries = [
            AdapterTensor(
                name,
                str(entry["dtype"]),
                tuple(map(int, entry["shape"])),
                origin + int(entry["data_offsets"][0]),
                origin + int(entry["data_offsets"][1]),
            )
            for name, entry in header.items()
        ]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise AdapterError(path, f"is not a safetensors file: its header cannot be read: {error}") from error
    for tensor in entries:
        if tensor.dtype not in ITEM_BYTES:
            raise AdapterError(
                path, f"tensor {tensor.name!r} must be of dtype {', '.join(ITEM_BYTES)}; got {tensor.dtype}"
            )
        if not origin <= tensor.begin <= tensor.end <= len(data):
            raise AdapterError(path, f"is truncated: it ends within tensor {tensor.name!r}")
        num_bytes = math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        if tensor.end - tensor.begin != num_bytes:
            raise AdapterError(
                path, f"tensor {tensor.name!r} must take {num_bytes} bytes; got {tensor.end - tensor.begin}"
            )
        yield tensor


def _modules(
    path: Path, tensors: tuple[AdapterTensor, ...], config: _AdapterConfig, support: AdapterSupport
) -> tuple[AdaptedModule, ...]:
    known: dict[str, list[AdapterModule]] = {}
    for place in support.modules:  # a projection that gives keys and values has two places (Gemma 4)
        known.setdefault(place.name, []).append(place)
    parts: dict[str, dict[str, AdapterTensor]] = {}
    for tensor in tensors:
        bare = tensor.name.removeprefix(_PREFIX)
        if bare.endswith(_BASE_COPY) and _find(bare.removesuffix(_BASE_COPY), known, support):
            continue  # peft copies an adapted embedding or head into the file; the model has it
        ending = next((ending for ending in _PARTS if bare.endswith(ending)), None)
        if ending is None:
            raise AdapterError(
                path, f"tensor {tensor.name!r} is no part of a LoRA pair (modules_to_save is not supported)"
            )
        found = parts.setdefault(bare.removesuffix(ending), {})
        if _PARTS[ending] in found:
            raise AdapterError(path, f"tensor {tensor.name!r} must be there once")
        found[_PARTS[ending]] = tensor
    if not parts:
        raise AdapterError(path, "must hold tensors of adapted modules; got none")
    modules: dict[str, list[AdaptedModule]] = {}
    for name, found in parts.items():
        places = _find(name, known, support)
        if not places:
            raise AdapterError(
                path,
                f"tensor {next(iter(found.values())).name!r} is of a module that this model does not have, or that "
                "cannot be adapted",
            )
        if places[0].name in modules:
            raise AdapterError(path, f"module {name!r} must be adapted once")
        modules[places[0].name] = [
            _module(path, name, place, found, config, support.max_rank) for place in places
        ]
    return tuple(itertools.chain.from_iterable(modules.values()))


def _find(
    name: str, known: Mapping[str, Sequence[AdapterModule]], support: AdapterSupport
) -> Sequence[AdapterModule]:
    """Return the places of a module in the decoder; none if it cannot be adapted."""
    names = (name, *(name.removeprefix(prefix) for prefix in (support.prefix, *_WRAPPERS) if prefix))
    return next((known[one] for one in names if one in known), ())


def _module(
    path: Path,
    name: str,
    module: AdapterModule,
    found: Mapping[str, AdapterTensor],
    config: _AdapterConfig,
    max_rank: int,
) -> AdaptedModule:
    for part, what in (("a", "lora_A"), ("b", "lora_B")):
        if part not in found:
            raise AdapterError(path, f"lacks {what} of module {name!r}")
    rank = config.rank_of(name)
    if rank > max_rank:
        raise AdapterError(
            config.path,
            f"LoRA rank {rank} is greater than max_lora_rank {max_rank}. It is that of module {name!r}",
        )
    if ("bias" in found) != config.has_bias:
        rule = "true for" if "bias" in found else "false without"
        raise AdapterError(
            config.path, f"lora_bias must be {rule} a tensor lora_B.bias of {name!r}; got {config.has_bias}"
        )
    if ("magnitude" in found) != config.is_dora:
        rule = "true for" if "magnitude" in found else "false without"
        raise AdapterError(
            config.path,
            f"use_dora must be {rule} a lora_magnitude_vector of {name!r}; got {config.is_dora}",
        )
    if module.is_embedding and (config.is_dora or config.has_bias):
        field = "use_dora" if config.is_dora else "lora_bias"
        raise AdapterError(config.path, f"{field} is not supported for the embedding {name!r}; got True")
    shapes = {
        "a": (rank, module.num_in),
        "b": (module.num_out, rank),
        "bias": (module.num_out,),
        "magnitude": (module.num_out,),
    }
    for part, tensor in found.items():
        if tensor.shape != shapes[part]:
            raise AdapterError(
                path, f"tensor {tensor.name!r} must be of shape {shapes[part]}; got {tensor.shape}"
            )
    return AdaptedModule(
        module=module,
        a=found["a"],
        b=found["b"],
        scaling=config.scaling_of(name),
        bias=found.get("bias"),
        magnitude=found.get("magnitude"),
    )
