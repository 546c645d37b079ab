"""GGUF files of small models with random weights, written by gguf-py as llama.cpp's converter would write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from safetensors.torch import load_file

from tests.model.tiny import ASSISTANT_ID, BOS_ID, CHAT_TEMPLATE, EOS_ID, SPECIAL_TOKENS, SYSTEM_ID, USER_ID

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "phi3": "phi3", "gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
}  # fmt: skip
"""Architecture in GGUF by `model_type`."""

Metadata = Callable[[gguf.GGUFWriter], None]


def write_gguf(
    folder: Path,
    path: Path,
    kind: str = "F32",
    *,
    other_kind: str | None = None,
    metadata: Metadata = lambda writer: None,
    with_tokenizer: bool = False,
    split_max_tensors: int = 0,
    seed: int = 0,
) -> Path:
    """Write the model of a folder as a GGUF file.

    Args:
        folder: config.json and model.safetensors.
        path: the file.
        kind: type of the matrices. Types that gguf-py cannot quantise to get random bytes: any are valid.
        other_kind: type of every second matrix, as in the mixtures of llama.cpp.
        metadata: adds keys.
        with_tokenizer: that of `tiny.write_tokenizer`.
        split_max_tensors: most tensors in a part; 0 for one file.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(None, architecture, split_max_tensors=split_max_tensors)
    writer.add_name(f"tiny {config['model_type']}")
    _write_sizes(writer, config)
    if with_tokenizer:
        write_byte_tokenizer(writer)
    metadata(writer)
    generator = np.random.default_rng(seed)
    matrices = 0
    weights = {
        name: weight.float().numpy() for name, weight in load_file(folder / "model.safetensors").items()
    }
    for name, weight in sorted(_converted(weights, config).items()):
        chosen = kind
        is_matrix = weight.ndim > 1 and name.endswith(".weight") and "gate_inp" not in name
        if weight.ndim > 1:
            matrices += 1
            chosen = other_kind if other_kind is not None and matrices % 2 else kind
        add_tensor(writer, name, weight, chosen if is_matrix else "F32", generator)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(
    writer: gguf.GGUFWriter, name: str, weight: NDArray[Any], kind: str, generator: np.random.Generator
) -> None:
    quantised = Type[kind]
    if kind in ("F32", "F16"):
        writer.add_tensor(name, weight.astype(np.float32 if kind == "F32" else np.float16))
        return
    try:
        data = gguf.quantize(weight.astype(np.float32), quantised)
    except NotImplementedError:
        data = random_blocks(weight.shape, quantised, generator)
    writer.add_tensor(name, data, raw_dtype=quantised)


# Where a block has its scale, and maybe that of its minima, and the spread of the values that a scale of 1 would give.
_SCALES = {
    "Q2_K": {80: 14.0, 82: 14.0 / 1.5},
    "Q3_K": {108: 43.0},
    "IQ4_NL": {0: 69.0},
    "IQ4_XS": {0: 1276.0},
}


def random_blocks(shape: tuple[int, ...], kind: Type, generator: np.random.Generator) -> NDArray[np.uint8]:
    """Return random bytes of a type, with scales that give values like those of `tiny.randomise`."""
    values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (int(np.prod(shape)) // values, num_bytes), dtype=np.uint8)
    if kind is Type.Q6_K:  # the scale of the whole block, for int8 scales and 6-bit values
        scales = {208: 0.12 / 1350}
    elif kind.name in _SCALES:
        scales = {at: 0.12 / steps for at, steps in _SCALES[kind.name].items()}
    else:  # that of the values, with one of the minima that puts their mean near zero
        steps = 140 if kind is Type.Q4_K else 290
        scales = {0: 0.12 / steps, 2: 0.12 / steps * (7.5 if kind is Type.Q4_K else 15.5)}
    for at, scale in scales.items():
        spread = generator.uniform(0.8 * scale, 1.2 * scale, (len(blocks), 1))
        blocks[:, at : at + 2] = spread.astype(np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _write_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_vocab_size(config["vocab_size"])
    for key, add in (
        ("sliding_window", writer.add_sliding_window),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
    ):
        if config.get(key):
            add(config[key])
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(experts)


def _converted(weights: dict[str, NDArray[Any]], config: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """Return the tensors under GGUF's names, changed as llama.cpp's converter changes them."""
    architecture = ARCHITECTURES[config["model_type"]]
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    if architecture == "gpt-oss":
        weights = _unstacked(weights)
    converted: dict[str, NDArray[Any]] = {}
    experts: dict[str, dict[int, NDArray[Any]]] = {}
    for name, weight in weights.items():
        if architecture == "llama" and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            weight = _permuted(
                weight, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            )
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            weight = weight + 1
        if ".experts." in name and architecture != "gpt-oss":
            prefix, _, rest = name.partition(".experts.")
            expert, _, part = rest.partition(".")
            experts.setdefault(f"{prefix}.experts.{part}", {})[int(expert)] = weight
        elif name != "lm_head.weight" or not config["tie_word_embeddings"]:
            converted[name] = weight
    for name, each in experts.items():
        converted[name] = np.stack([each[expert] for expert in range(len(each))])
    return {str(names.get_name(name, (".weight", ".bias"))): weight for name, weight in converted.items()}


def _unstacked(weights: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return gpt-oss's weights as the converter names them: gate and up apart, outputs before inputs."""
    parts: dict[str, NDArray[Any]] = {}
    for name, weight in weights.items():
        if name.endswith("sinks"):
            parts[f"{name}.weight"] = weight
        elif ".experts." not in name:
            parts[name] = weight
        else:
            kind = "bias" if name.endswith("_bias") else "weight"
            stem = name.removesuffix("_bias")
            outputs_last = weight if kind == "bias" else np.ascontiguousarray(weight.swapaxes(1, 2))
            if stem.endswith("down_proj"):
                parts[f"{stem}.{kind}"] = outputs_last
            else:
                for first, part in enumerate(("gate_proj", "up_proj")):
                    rows = np.ascontiguousarray(outputs_last[:, first::2])
                    parts[f"{stem.replace('gate_up_proj', part)}.{kind}"] = rows
    return parts


def _permuted(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Return the rows of each head from halves to pairs, as `LlamaModel.permute` of the converter does."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_byte_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Add the tokenizer of `tiny.write_tokenizer`: bytes and five special tokens."""
    from tokenizers import pre_tokenizers

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL_TOKENS]
    special = (BOS_ID, EOS_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index in special else 1 for index in range(len(tokens))])
    writer.add_token_merges([])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
