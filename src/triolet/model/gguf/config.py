"""From the metadata of a GGUF file to the configuration of the native decoder.

The metadata is translated into the fields that the architecture's config.json would have, and the family's own parser
reads those, so that a model has one definition whatever file it comes in. The decoder's tensors keep the names that
they have in the file: error messages speak of those.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import attrs
import torch

from triolet.core.request.model_info import GenerationDefaults
from triolet.errors import InvalidParams, ModelFileError, UnsupportedModel
from triolet.model.architectures.decoder_config import DecoderConfig, TensorNames
from triolet.model.architectures.families import parse_decoder_fields
from triolet.model.architectures.family_common import FULL, SLIDING
from triolet.model.folder.json_fields import Fields
from triolet.model.gguf.checkpoint import GgufCheckpoint, gguf_checkpoint
from triolet.model.gguf.file import GgufArray, GgufFile
from triolet.model.gguf.metadata import GgufMetadata
from triolet.model.gguf.rope import DIVISORS, LONGROPE, rope_parameters

_NAMES = TensorNames(
    prefix="",
    embedding="token_embd",
    final_norm="output_norm",
    head="output",
    layer="blk.{layer}.",
    attention_norm="attn_norm",
    qkv=("attn_q", "attn_k", "attn_v"),
    query_norm="attn_q_norm",
    key_norm="attn_k_norm",
    attention_out="attn_output",
    mlp_norm="ffn_norm",
    mlp_in=("ffn_gate", "ffn_up"),
    mlp_out="ffn_down",
    router="ffn_gate_inp",
    expert_in=("ffn_gate_exps.{expert}", "ffn_up_exps.{expert}"),
    expert_out="ffn_down_exps.{expert}",
    # rotary factors go into the configuration
    ignored=(
        DIVISORS,
        *LONGROPE.values(),
        "attn_rot_embd.weight",
    ),
)
_PHI3_NAMES = attrs.evolve(_NAMES, qkv=("attn_qkv",), mlp_in=("ffn_up",))
_GPT_OSS_NAMES = attrs.evolve(_NAMES, mlp_norm="post_attention_norm", sinks="attn_sinks.weight")
_GEMMA_NAMES = attrs.evolve(_NAMES, post_attention_norm="post_attention_norm", post_mlp_norm="post_ffw_norm")
_GEMMA4_NAMES = attrs.evolve(
    _GEMMA_NAMES,
    layer_scale="layer_output_scale.weight",
    layer_inputs_embedding="per_layer_token_embd",
    layer_inputs_projection="per_layer_model_proj",
    layer_inputs_norm="per_layer_proj_norm",
    layer_input_gate="inp_gate",
    layer_input_out="proj",
    post_layer_input_norm="post_norm",
    router_scale="ffn_gate_inp.scale",
    expert_in=("ffn_gate_up_exps.{expert}",),
    expert_scales="ffn_down_exps.scale",
    post_dense_norm="post_ffw_norm_1",
    experts_norm="pre_ffw_norm_2",
    post_experts_norm="post_ffw_norm_2",
)

# Keys that would change what is computed, and that no family here honours.
_NOT_HONOURED = (
    "attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias", "attention.temperature_scale",
    "attention.temperature_length", "attention.output_scale", "attention.shared_kv_layers", "attention.key_length_swa",
    "logit_scale", "embedding_scale", "residual_scale", "expert_shared_count", "leading_dense_block_count",
    "expert_weights_scale", "nextn_predict_layers", "rope.scaling.alpha", "rope.scaling.yarn_log_multiplier",
    "rope.dimension_sections",
)  # fmt: skip

# Texts of special tokens that end a turn; files name only one of them as the end of the sequence. Source: llama.cpp,
# which looks for them by their text, too.
_TURN_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|eom_id|> <|end_of_text|> <EOT> <end_of_utterance> "
    "<|return|> <|call|> <eos> <turn|> <|tool_response>".split()
)
# In a vocabulary with both of these a message ends with `<|end|>`, and an answer goes on behind it (gpt-oss).
_ENDS_OF_HARMONY = frozenset({"<|return|>", "<|call|>"})
# By `pooling_type`. Source: llama.cpp, `llama_pooling_type`; 0 is for files that say nothing of it.
_POOLING_METHODS = {0: "LAST", 1: "MEAN", 2: "CLS", 3: "LAST"}
CONTROL, USER_DEFINED = 3, 4
"""Types of tokens in the metadata: special tokens, and texts that are always one token."""


@attrs.frozen
class _Architecture:
    """How the files of one architecture become a config.json."""

    hf_name: str
    names: TensorNames = _NAMES
    permutes_heads: bool = False  # the rows of the query and key projections are permuted
    norm_offset: float = 0.0  # added to stored norm weights
    rotates_part: bool = False  # rope.dimension_count may be less than a head
    # Keys of `_NOT_HONOURED` that it honours, and those that may hold an array of a number per layer.
    honours: frozenset[str] = frozenset()
    varies: frozenset[str] = frozenset()
    is_written: bool = True  # `writer.py` writes its files, too
    more: Callable[[GgufMetadata], dict[str, Any]] = lambda metadata: {}  # fields beyond the common ones


def _window(metadata: GgufMetadata) -> dict[str, Any]:
    # converters write 0 for a model without a window
    return {"sliding_window": metadata.fields.optional_integer("attention.sliding_window", minimum=0) or None}


def _phi3(metadata: GgufMetadata) -> dict[str, Any]:
    share = metadata.rotary_dimensions / metadata.head_dim
    return {**_window(metadata), "partial_rotary_factor": share}


def _experts(metadata: GgufMetadata) -> dict[str, Any]:
    # older files do not say how wide an expert is
    widths = (tensor.shape[1] for tensor in metadata.expert_stacks if ".ffn_gate_exps." in tensor.name)
    routers = [f"blk.{layer}.ffn_gate_inp.weight" for layer in range(metadata.num_layers)]
    return {
        "num_experts": metadata.num_experts,
        "num_experts_per_tok": metadata.required("expert_used_count"),
        "moe_intermediate_size": metadata.fields.integer("expert_feed_forward_length", next(widths, 1)),
        "norm_topk_prob": metadata.fields.flag("expert_weights_norm", True),
        "mlp_only_layers": [
            layer for layer, router in enumerate(routers) if router not in metadata.file.tensors
        ],
    }


def _mixtral(metadata: GgufMetadata) -> dict[str, Any]:
    return {
        **_window(metadata),
        "num_local_experts": metadata.num_experts,
        "num_experts_per_tok": metadata.required("expert_used_count"),
    }


# Layers of the 27B models, whose scale is not that of a head. Source: llama.cpp, which tells them by it.
_LAYERS_OF_GEMMA_27B = {"gemma2": 46, "gemma3": 62}


def _gemma2(metadata: GgufMetadata) -> dict[str, Any]:
    head_dim = metadata.head_dim
    if metadata.num_layers == _LAYERS_OF_GEMMA_27B[metadata.architecture]:
        head_dim = metadata.required("embedding_length") // metadata.required("attention.head_count")
    fields = metadata.fields
    return {
        "query_pre_attn_scalar": head_dim,
        "sliding_window": fields.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: GgufMetadata) -> dict[str, Any]:
    fields = metadata.fields
    local = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10_000.0)}
    return {
        **_gemma2(metadata),
        "attn_logit_softcapping": fields.optional_number("attn_logit_softcapping"),
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping"),
        "sliding_window_pattern": fields.integer("attention.sliding_window_pattern", 6),
        "rope_parameters": {FULL: rope_parameters(metadata, 1_000_000.0), SLIDING: local},
    }


def _gemma4(metadata: GgufMetadata) -> dict[str, Any]:
    fields, tensors = metadata.fields, metadata.file.tensors
    pattern = fields.values.get("attention.sliding_window_pattern")
    if not isinstance(pattern, GgufArray):
        raise fields.wrong("attention.sliding_window_pattern", "a truth value for each layer")
    slides = pattern.numbers()
    if len(slides) != metadata.num_layers or all(slides):
        raise fields.wrong("attention.sliding_window_pattern", "a truth value for each layer, not all true")
    head_dim = fields.integer("attention.key_length_swa", metadata.head_dim)
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if fields.integer(name, head_dim) != head_dim:
            raise fields.wrong(name, f"attention.key_length_swa ({head_dim})")
    heads = metadata.per_layer("attention.head_count_kv", metadata.required("attention.head_count"))
    whole = [index for index, is_sliding in enumerate(slides) if not is_sliding]
    shared = fields.integer("attention.shared_kv_layers", 0, minimum=0)
    widths = metadata.per_layer("feed_forward_length", 1)
    own = widths[0]
    is_wide = any(width != own for width in widths)
    if is_wide and widths != [own] * (len(widths) - shared) + [2 * own] * shared:
        raise fields.wrong("feed_forward_length", "one number, or twice as many in layers that share a cache")
    local = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10_000.0)}
    table = tensors.get("per_layer_token_embd.weight")
    more: dict[str, Any] = {}
    if fields.values.get("expert_count"):
        more = {
            "enable_moe_block": True,
            "num_experts": metadata.num_experts,
            "top_k_experts": metadata.required("expert_used_count"),
            "moe_intermediate_size": metadata.required("expert_feed_forward_length"),
        }
    return more | {
        "head_dim": head_dim,
        "num_key_value_heads": next((heads[i] for i, slide in enumerate(slides) if slide), heads[0]),
        "intermediate_size": own,
        "use_double_wide_mlp": is_wide,
        "layer_types": [SLIDING if is_sliding else FULL for is_sliding in slides],
        "per_layer_config": {
            str(index): {"head_dim": metadata.head_dim, "num_key_value_heads": heads[index]}
            for index in whole
        },
        "attention_k_eq_v": f"blk.{whole[0]}.attn_v.weight" not in tensors,
        "sliding_window": fields.integer("attention.sliding_window", 512),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": fields.integer("embedding_length_per_layer_input", 0, minimum=0),
        "vocab_size_per_layer_input": 1 if table is None else table.shape[0],
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping"),
        "rope_parameters": {FULL: rope_parameters(metadata, 1_000_000.0), SLIDING: local},
    }


def _gpt_oss(metadata: GgufMetadata) -> dict[str, Any]:
    width = metadata.fields.integer(
        "expert_feed_forward_length", metadata.fields.integer("feed_forward_length", 1)
    )
    rope = rope_parameters(metadata, 150_000.0)
    if rope["rope_type"] == "yarn":  # the model's own, which no key tells
        rope["truncate"] = False
    return {
        "intermediate_size": width,
        "num_local_experts": metadata.num_experts,
        "num_experts_per_tok": metadata.required("expert_used_count"),
        "sliding_window": metadata.fields.integer("attention.sliding_window", 128),
        "rope_parameters": rope,
    }


_ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture("LlamaForCausalLM", permutes_heads=True),
    "qwen2": _Architecture("Qwen2ForCausalLM"),
    "qwen3": _Architecture("Qwen3ForCausalLM"),
    "qwen3moe": _Architecture("Qwen3MoeForCausalLM", more=_experts),
    "phi3": _Architecture("Phi3ForCausalLM", names=_PHI3_NAMES, rotates_part=True, more=_phi3),
    "gemma": _Architecture("GemmaForCausalLM", norm_offset=-1.0),
    "gemma2": _Architecture("Gemma2ForCausalLM", names=_GEMMA_NAMES, norm_offset=-1.0, more=_gemma2),
    "gemma3": _Architecture("Gemma3ForCausalLM", names=_GEMMA_NAMES, norm_offset=-1.0, more=_gemma3),
    "gemma4": _Architecture(
        "Gemma4ForCausalLM",
        names=_GEMMA4_NAMES,
        honours=frozenset({"attention.shared_kv_layers", "attention.key_length_swa"}),
        varies=frozenset({"attention.head_count_kv", "feed_forward_length"}),
        is_written=False,
        more=_gemma4,
    ),
    "gpt-oss": _Architecture("GptOssForCausalLM", names=_GPT_OSS_NAMES, more=_gpt_oss),
}
ARCHITECTURES = tuple(_ARCHITECTURES)
"""What `general.architecture` may be."""

_VARIANTS = {"MistralForCausalLM": "llama", "MixtralForCausalLM": "llama"}
"""Architectures that share a name in GGUF with another one; their metadata tells them apart."""


@attrs.frozen
class WrittenArchitecture:
    """Form of a native architecture in a GGUF file: the opposite of what reading undoes."""

    name: str  # of `general.architecture`
    names: TensorNames
    permutes_heads: bool  # rows of the query and key projections
    norm_offset: float  # added to the weights of norms


def written_architecture(hf_name: str) -> WrittenArchitecture | None:
    """Return how the files of an architecture of config.json are written; None for one that GGUF files do not have."""
    written = {name: found for name, found in _ARCHITECTURES.items() if found.is_written}
    by_hf_name = {found.hf_name: name for name, found in written.items()} | _VARIANTS
    if (name := by_hf_name.get(hf_name)) is None:
        return None
    found = _ARCHITECTURES[name]
    return WrittenArchitecture(name, found.names, found.permutes_heads, -found.norm_offset)


def _architecture_of(metadata: GgufMetadata) -> _Architecture:
    name, fields = metadata.architecture, metadata.fields
    if name not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"{metadata.file.path}: general.architecture must be one of {', '.join(ARCHITECTURES)}; got {name!r}"
        )
    for key in _NOT_HONOURED:
        if fields.values.get(key) and key not in _ARCHITECTURES[name].honours:
            raise UnsupportedModel(
                f"{metadata.file.path}: {name}.{key} must be absent or zero; got {fields.values[key]!r}"
            )
    if not fields.flag("attention.causal", True):
        raise UnsupportedModel(
            f"{metadata.file.path}: {name}.attention.causal must be true: tokens that see later ones are not supported"
        )
    found = _ARCHITECTURES[name]
    if name == "llama" and fields.integer("expert_count", 0, minimum=0):
        return attrs.evolve(found, hf_name="MixtralForCausalLM", more=_mixtral)
    if name == "llama" and _window(metadata)["sliding_window"]:
        return attrs.evolve(found, hf_name="MistralForCausalLM", more=_window)
    return found


def _config_of(metadata: GgufMetadata, architecture: _Architecture) -> dict[str, Any]:
    """Return what config.json would say."""
    fields, tensors = metadata.fields, metadata.file.tensors
    head_dim, rotated = metadata.head_dim, metadata.rotary_dimensions
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise fields.wrong("attention.value_length", f"that of the keys ({head_dim})")
    if rotated != head_dim and not architecture.rotates_part:
        raise fields.wrong("rope.dimension_count", f"the size of a head ({head_dim})")
    if (embedding := tensors.get("token_embd.weight")) is None:
        raise ModelFileError(metadata.file.path, "tensor 'token_embd.weight' is missing")
    if "attention.layer_norm_rms_epsilon" not in fields:
        raise ModelFileError(
            metadata.file.path, f"{fields.prefix}attention.layer_norm_rms_epsilon is missing"
        )
    heads = metadata.required("attention.head_count")

    def one_of(name: str, default: int) -> int:
        if name in architecture.varies:
            return metadata.per_layer(name, default)[0]
        return fields.integer(name, default)

    common = {
        "architectures": [architecture.hf_name],
        "vocab_size": embedding.shape[0],
        "hidden_size": metadata.required("embedding_length"),
        "intermediate_size": one_of("feed_forward_length", 1),
        "num_hidden_layers": metadata.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": one_of("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.required("context_length"),
        "original_max_position_embeddings": fields.optional_integer("rope.scaling.original_context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", 0.0),
        "rope_parameters": rope_parameters(metadata),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    return common | architecture.more(metadata)


def read_decoder_config(file: GgufFile, *, max_model_len: int | None = None) -> DecoderConfig:
    """Read what the native decoder needs from a file's metadata.

    Args:
        file: the model.
        max_model_len: longest sequence that is wanted, tokens; decides which factors a LongRoPE model uses.

    Raises:
        ModelFileError: a key is missing, of the wrong type or out of its range.
        UnsupportedModel: the architecture, or a feature that the metadata asks for, is not known.
    """
    metadata = GgufMetadata(file)
    architecture = _architecture_of(metadata)
    config = _config_of(metadata, architecture)
    parsed = parse_decoder_fields(Fields(file.path, config), max_model_len=max_model_len)
    unused = tuple(
        f"blk.{index}.{name}.weight"
        for index, layer in enumerate(parsed.layers)
        if layer.reads_cache_of is not None
        for name in ("attn_k", "attn_v", "attn_k_norm")
    )
    return attrs.evolve(
        parsed,
        names=attrs.evolve(architecture.names, ignored=(*architecture.names.ignored, *unused)),
        module_names=parsed.names,
        # the converter writes a bias exactly where the model has one
        qkv_bias=f"blk.0.{architecture.names.qkv[0]}.bias" in file.tensors,
        attention_out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias=not {"blk.0.ffn_down.bias", "blk.0.ffn_down_exps.bias"}.isdisjoint(file.tensors),
    )


def stored_dtype(file: GgufFile) -> torch.dtype:
    """Return the dtype for `dtype="auto"`: that of the matrices if they are all of one, else bfloat16."""
    kinds = {tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if kinds == {"F32"}:
        return torch.float32
    return torch.float16 if kinds == {"F16"} else torch.bfloat16


def describe_types(file: GgufFile, kept: Container[str], dtype: str) -> str:
    """Say what became of a model's matrices, the type with the most values first.

    Args:
        file: the model.
        kept: names of the tensors that stay in their blocks.
        dtype: what the others were converted to.
    """
    values: Counter[tuple[bool, str]] = Counter()
    for name, tensor in file.tensors.items():
        if len(tensor.shape) > 1:
            stem, _, part = name.rpartition(".")
            # A stack of experts is read, and kept, one by one.
            is_kept = name in kept or f"{stem}.0.{part}" in kept
            values[is_kept, tensor.type.name] += math.prod(tensor.shape)
    kept_types, converted = (
        ", ".join(name for (is_kept, name), _ in values.most_common() if is_kept == wanted)
        for wanted in (True, False)
    )
    said = [f"{kept_types}, are kept"] if kept_types else []
    return "; ".join([*said, f"{converted}, are converted to {dtype}"] if converted else said)


def open_checkpoint(file: GgufFile, config: DecoderConfig, dtype: torch.dtype) -> GgufCheckpoint:
    """Return the model's tensors, which become `dtype` when they are read."""
    architecture = _architecture_of(GgufMetadata(file))
    permuted = (
        {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if architecture.permutes_heads else {}
    )
    return gguf_checkpoint(
        dict(file.tensors), dtype, permuted_heads=permuted, norm_offset=architecture.norm_offset
    )


def read_pooling_method(file: GgufFile) -> str:
    """Read from which tokens an embedding is made: `LAST`, where a file says nothing, `MEAN` or `CLS`.

    Raises:
        ModelFileError: the file says something else.
    """
    fields = GgufMetadata(file).fields
    number = fields.integer("pooling_type", 3, minimum=0)
    if number not in _POOLING_METHODS:
        raise fields.wrong("pooling_type", "1 (mean), 2 (first token) or 3 (last token)")
    return _POOLING_METHODS[number]


def turn_ends(tokens: Sequence[str], types: Sequence[float]) -> list[int]:
    """Return the ids of the special tokens that end a turn by their text.

    Args:
        tokens: of the vocabulary, by their ids.
        types: of the tokens, in the metadata's numbers.
    """
    found = [
        (text, index)
        for index, (text, kind) in enumerate(zip(tokens, types, strict=False))
        if text in _TURN_ENDS and kind in (CONTROL, USER_DEFINED)
    ]
    is_harmony = {text for text, _ in found} >= _ENDS_OF_HARMONY
    return [index for text, index in found if not (is_harmony and text == "<|end|>")]


def read_gguf_defaults(file: GgufFile) -> GenerationDefaults:
    """Read the ids that end an answer, and the sampling parameters that the metadata recommends.

    Raises:
        ModelFileError: a key is not what it should be.
    """
    fields = Fields(file.path, file.metadata)
    named = [
        fields.optional_integer(f"tokenizer.ggml.{kind}_token_id", minimum=0)
        for kind in ("eos", "eot", "eom")
    ]
    by_text: list[int] = []
    tokens, types = file.metadata.get("tokenizer.ggml.tokens"), file.metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, GgufArray) and isinstance(types, GgufArray):
        by_text = turn_ends(tokens.texts(), types.numbers())
    ids = [token_id for token_id in (*named, *by_text) if token_id is not None]
    defaults = GenerationDefaults(
        eos_token_ids=tuple(dict.fromkeys(ids)),
        temperature=fields.optional_number("general.sampling.temp"),
        top_p=fields.optional_number("general.sampling.top_p"),
        top_k=fields.optional_integer("general.sampling.top_k", minimum=-1),
        min_p=fields.optional_number("general.sampling.min_p"),
        repetition_penalty=fields.optional_number("general.sampling.penalty_repeat"),
    )
    try:
        defaults.sampling_params()
    except InvalidParams as error:
        raise ModelFileError(file.path, f"general.sampling: {error}".rstrip(".")) from error
    return defaults
