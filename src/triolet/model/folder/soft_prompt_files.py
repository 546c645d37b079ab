"""Reading of a soft prompt as peft saves it: adapter_config.json and adapter_model.safetensors, without torch.

PROMPT_TUNING and P_TUNING store an embedding for each virtual token: peft saves what the encoder of P_TUNING gives.
PREFIX_TUNING stores keys and values of all layers for each virtual token; keys as they stand in the cache, after the
rotary embedding.

Source: peft 0.21, `PeftModel.get_prompt_embedding_to_save` and `get_prompt`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

import attrs

from triolet.core.request.prompt_adapter import SoftPromptSupport
from triolet.errors import AdapterError
from triolet.model.folder.adapter_files import (
    CONFIG,
    WEIGHTS,
    AdapterTensor,
    read_adapter_file,
    stored_tensors,
)

TENSOR: Final = "prompt_embeddings"
PREFIX_TUNING: Final = "PREFIX_TUNING"
_KINDS: Final = ("PROMPT_TUNING", "P_TUNING", PREFIX_TUNING)


@attrs.frozen
class SoftPromptFiles:
    """Contents of a soft prompt's folder that fit the model."""

    digest: str
    is_prefix: bool  # whether keys and values are stored, instead of embeddings
    num_virtual_tokens: int
    tensor: AdapterTensor  # [num_virtual_tokens, hidden_size], or [num_virtual_tokens, numbers of all keys and values]
    data: bytes = attrs.field(repr=False)  # of the file with the weights


def read_soft_prompt(folder: Path, support: SoftPromptSupport) -> SoftPromptFiles:
    """Read the folder of a soft prompt and check it against the model.

    Raises:
        AdapterError: a file is missing, truncated or malformed, the type is not one of the three, or the tensor does
            not fit the model; names the file and the field or the tensor.
    """
    try:
        return _checked(folder, support)
    except AdapterError as error:
        # what is wrong with any adapter is said of a LoRA adapter
        raise AdapterError(error.path, error.problem, "prompt_adapter") from error


def _checked(folder: Path, support: SoftPromptSupport) -> SoftPromptFiles:
    config_data, data = (read_adapter_file(folder / name, folder) for name in (CONFIG, WEIGHTS))
    config = _parsed(folder / CONFIG, config_data)
    is_prefix = config["peft_type"] == PREFIX_TUNING
    tensors = {tensor.name: tensor for tensor in stored_tensors(folder / WEIGHTS, data)}
    if tensors.keys() != {TENSOR}:
        raise AdapterError(folder / WEIGHTS, f"must hold {TENSOR} alone; got {sorted(tensors)}")
    tensor = tensors[TENSOR]
    width = sum(2 * heads * size for heads, size in support.kv_shapes) if is_prefix else support.hidden_size
    if len(tensor.shape) != 2 or tensor.shape[0] < 1 or tensor.shape[1] != width:
        rule = f"of shape (virtual tokens, {width}) for this model"
        raise AdapterError(folder / WEIGHTS, f"{TENSOR} must be {rule}; got {tensor.shape}")
    stated = config.get("num_virtual_tokens")
    if stated not in (None, tensor.shape[0]):
        problem = f"num_virtual_tokens must be that of {TENSOR}, {tensor.shape[0]}; got {stated!r}"
        raise AdapterError(folder / CONFIG, problem)
    digest = hashlib.blake2b(digest_size=16)
    for part in (config_data, data):
        digest.update(len(part).to_bytes(8, "big") + part)
    return SoftPromptFiles(digest.hexdigest(), is_prefix, tensor.shape[0], tensor, data)


def _parsed(path: Path, data: bytes) -> dict[str, Any]:
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AdapterError(path, f"is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(path, f"must hold a JSON object; got {type(config).__name__}")
    if config.get("peft_type") not in _KINDS:
        rule = f"one of {', '.join(_KINDS)} for a prompt adapter"
        raise AdapterError(path, f"peft_type must be {rule}; got {config.get('peft_type')!r}")
    if config.get("num_transformer_submodules") not in (None, 1):  # 2 = encoder and decoder
        got = config["num_transformer_submodules"]
        raise AdapterError(path, f"num_transformer_submodules must be 1; got {got!r}")
    return config
