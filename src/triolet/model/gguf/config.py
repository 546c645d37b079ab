"""From the metadata of a GGUF file to the configuration of the native decoder.

The metadata is translated into the fields that the architecture's config.json would have, and the family's own parser
reads those, so that a model has one definition whatever file it comes in. The decoder's tensors keep the names that
they have in the file: error messages speak of those.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Mapping
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
from triolet.model.gguf.file import GgufArray, GgufFile, GgufTensor

# Tensors of divisors of the rotary frequencies: one for every length, and two that LongRoPE chooses from.
_DIVISORS = "rope_freqs.weight"
_LONGROPE = {"short": "rope_factors_short.weight", "long": "rope_factors_long.weight"}

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
        _DIVISORS,
        *_LONGROPE.values(),
        "attn_rot_embd.weight",
    ),
)
_PHI3_NAMES = attrs.evolve(_NAMES, qkv=("attn_qkv",), mlp_in=("ffn_up",))
_GPT_OSS_NAMES = attrs.evolve(_NAMES, mlp_norm="post_attention_norm", sinks="attn_sinks.weight")
_GEMMA_NAMES = attrs.evolve(_NAMES, post_attention_norm="post_attention_norm", post_mlp_norm="post_ffw_norm")

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
TURN_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|eom_id|> <|end_of_text|> <EOT> <end_of_utterance> "
    "<|return|> <|call|>".split()
)
_MAX_LAYERS = 1024
_MAX_CONTEXT = 2**24
"""Longest context, tokens: above any model's."""

CONTROL, USER_DEFINED = 3, 4
"""Types of tokens in the metadata: special tokens, and texts that are always one token."""


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


@attrs.frozen
class _Architecture:
    """How the files of one architecture become a config.json."""

    hf_name: str
    names: TensorNames = _NAMES
    permutes_heads: bool = False  # the rows of the query and key projections are permuted
    norm_offset: float = 0.0  # added to stored norm weights
    rotates_part: bool = False  # rope.dimension_count may be less than a head
    more: Callable[[GgufMetadata], dict[str, Any]] = lambda metadata: {}  # fields beyond the common ones


def _window(metadata: GgufMetadata) -> dict[str, Any]:
    # converters write 0 for a model without a window
    return {"sliding_window": metadata.fields.optional_integer("attention.sliding_window", minimum=0) or None}


def _phi3(metadata: GgufMetadata) -> dict[str, Any]:
    share = _rotary_dimensions(metadata) / _head_dim(metadata)
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
    head_dim = _head_dim(metadata)
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
        "rope_parameters": {FULL: _rope_parameters(metadata, 1_000_000.0), SLIDING: local},
    }


def _gpt_oss(metadata: GgufMetadata) -> dict[str, Any]:
    width = metadata.fields.integer(
        "expert_feed_forward_length", metadata.fields.integer("feed_forward_length", 1)
    )
    rope = _rope_parameters(metadata, 150_000.0)
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
    by_hf_name = {found.hf_name: name for name, found in _ARCHITECTURES.items()} | _VARIANTS
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
        if fields.values.get(key):
            raise UnsupportedModel(
                f"{metadata.file.path}: {name}.{key} must be absent or zero; got {fields.values[key]!r}"
            )
    found = _ARCHITECTURES[name]
    if name == "llama" and fields.integer("expert_count", 0, minimum=0):
        return attrs.evolve(found, hf_name="MixtralForCausalLM", more=_mixtral)
    if name == "llama" and _window(metadata)["sliding_window"]:
        return attrs.evolve(found, hf_name="MistralForCausalLM", more=_window)
    return found


def _head_dim(metadata: GgufMetadata) -> int:
    heads = metadata.required("attention.head_count")
    return metadata.fields.integer(
        "attention.key_length", max(1, metadata.required("embedding_length") // heads)
    )


def _rotary_dimensions(metadata: GgufMetadata) -> int:
    return metadata.fields.integer("rope.dimension_count", _head_dim(metadata))


def _rope_parameters(metadata: GgufMetadata, default_theta: float = 10_000.0) -> dict[str, Any]:
    fields = metadata.fields
    base = {"rope_theta": fields.number("rope.freq_base", default_theta)}
    if base["rope_theta"] <= 1.0:
        raise fields.wrong("rope.freq_base", "a number greater than 1")
    context_length = metadata.required("context_length")
    if context_length > _MAX_CONTEXT:  # there is a row of cosines for each position
        raise fields.wrong("context_length", f"at most {_MAX_CONTEXT}")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    kind = _scaling_type(metadata, factor)
    original = fields.integer("rope.scaling.original_context_length", context_length, minimum=2)
    attention_factor = fields.optional_number("rope.scaling.attn_factor")
    has_divisors = _DIVISORS in metadata.file.tensors
    match kind:
        case "none" | "linear" if has_divisors or attention_factor not in (None, 1.0):
            # A divisor per frequency, such as Llama 3.1's rule worked out, and an attention factor: what LongRoPE does
            # without its two lengths.
            stretch = (factor or 1.0) if kind == "linear" else 1.0
            given = (
                _factors(metadata, _DIVISORS) if has_divisors else [1.0] * (_rotary_dimensions(metadata) // 2)
            )
            divisors = [stretch * divisor for divisor in given]
            longrope = {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors}
            magnitude = 1.0 if attention_factor is None else attention_factor
            return {
                **base, **longrope, "attention_factor": magnitude, "original_max_position_embeddings": context_length
            }  # fmt: skip
        case "none":
            return {**base, "rope_type": "default"}
        case "linear":
            return {**base, "rope_type": "linear", "factor": factor or 1.0}
        case "yarn":
            beta_fast = fields.number("rope.scaling.yarn_beta_fast", 32.0)
            beta_slow = fields.number("rope.scaling.yarn_beta_slow", 1.0)
            if not 0 < beta_slow <= beta_fast:
                raise fields.wrong(
                    "rope.scaling.yarn_beta_fast", f"at least yarn_beta_slow ({beta_slow}), above 0"
                )
            yarn = {"rope_type": "yarn", "factor": factor, "beta_fast": beta_fast, "beta_slow": beta_slow}
            magnitude = fields.number("rope.scaling.yarn_attn_factor", attention_factor or 1.0)
            if magnitude != 1.0 and factor > 1.0:
                yarn["attention_factor"] = magnitude * (0.1 * math.log(factor) + 1.0)
            return {**base, **yarn, "original_max_position_embeddings": original}
        case "longrope":
            factors: dict[str, Any] = {
                f"{length}_factor": _factors(metadata, name) for length, name in _LONGROPE.items()
            }
            if attention_factor is not None:
                factors["attention_factor"] = attention_factor
            return {**base, "rope_type": "longrope", **factors, "original_max_position_embeddings": original}
        case _:
            raise UnsupportedModel(
                f"{metadata.file.path}: {fields.prefix}rope.scaling.type must be one of none, linear, yarn, longrope; "
                f"got {kind!r}"
            )


def _scaling_type(metadata: GgufMetadata, factor: float) -> str:
    """Return the rule of rotary positions, by its key or, where that is missing, by the tensors that it needs.

    Raises:
        UnsupportedModel: the file has factors that this rule does not use.
    """
    fields, tensors = metadata.fields, metadata.file.tensors
    # llama.cpp's converter writes LongRoPE's tensors and not its name
    is_longrope = all(name in tensors for name in _LONGROPE.values())
    implied = "longrope" if is_longrope else "none" if factor in (0.0, 1.0) else "linear"
    kind = fields.text("rope.scaling.type", implied)
    uses: tuple[str, ...] = {"longrope": tuple(_LONGROPE.values()), "yarn": ()}.get(kind, (_DIVISORS,))
    for name in (_DIVISORS, *_LONGROPE.values()):
        if name in tensors and name not in uses:
            raise UnsupportedModel(
                f"{metadata.file.path}: tensor {name!r} must be absent where {fields.prefix}rope.scaling.type is "
                f"{kind!r}; got a tensor of shape {list(tensors[name].shape)}"
            )
    return kind


def _factors(metadata: GgufMetadata, name: str) -> list[float]:
    tensor = metadata.file.tensors.get(name)
    if tensor is None or len(tensor.shape) != 1 or tensor.num_bytes > 2**16:
        raise ModelFileError(
            metadata.file.path, f"tensor {name!r} must be there, with a number per pair of a head"
        )
    values = gguf_checkpoint({name: tensor}, torch.float32, permuted_heads={}, norm_offset=0.0).read(name)
    factors: list[float] = values.tolist()
    return factors


def _config_of(metadata: GgufMetadata, architecture: _Architecture) -> dict[str, Any]:
    """Return what config.json would say."""
    fields, tensors = metadata.fields, metadata.file.tensors
    head_dim, rotated = _head_dim(metadata), _rotary_dimensions(metadata)
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
    common = {
        "architectures": [architecture.hf_name],
        "vocab_size": embedding.shape[0],
        "hidden_size": metadata.required("embedding_length"),
        "intermediate_size": fields.integer("feed_forward_length", 1),
        "num_hidden_layers": metadata.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.required("context_length"),
        "original_max_position_embeddings": fields.optional_integer("rope.scaling.original_context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", 0.0),
        "rope_parameters": _rope_parameters(metadata),
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
    return attrs.evolve(
        parsed,
        names=architecture.names,
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
            values[name in kept, tensor.type.name] += math.prod(tensor.shape)
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
        special = [index for index, kind in enumerate(types.numbers()) if kind in (CONTROL, USER_DEFINED)]
        texts = tokens.texts() if special else []
        by_text = [index for index in special if index < len(texts) and texts[index] in TURN_ENDS]
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
