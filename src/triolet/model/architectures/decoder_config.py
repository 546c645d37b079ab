"""Configuration of a native decoder: shapes, flags, one entry per layer, and the checkpoint's tensor names.

`families.py` fills it in from a folder's config.json; nothing after it looks at that file again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import torch

from triolet.errors import ModelFileError, ModelNotFound, UnsupportedModel
from triolet.model.architectures.rope import Rope
from triolet.model.folder.json_fields import Fields, read_json_object

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@attrs.frozen(kw_only=True)
class TensorNames:
    """How a family's checkpoint names the decoder's tensors; the defaults are Llama's.

    Several names for one tensor are joined along the output dimension. A name comes without its `.weight` or `.bias`;
    `{expert}` is filled in.
    """

    prefix: str = "model."  # what all names but the head's begin with; some checkpoints leave it out
    embedding: str = "embed_tokens"
    positions: str | None = None
    final_norm: str = "norm"
    head: str = "lm_head"
    # What a layer's names begin with, after the prefix; `{layer}` is filled in.
    layer: str = "layers.{layer}."
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    attention_out: str = "self_attn.o_proj"
    post_attention_norm: str = ""  # norm of the attention's output, before it is added (Gemma 2 and 3)
    mlp_norm: str = "post_attention_layernorm"
    mlp_in: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    mlp_out: str = "mlp.down_proj"
    post_mlp_norm: str = ""  # norm of the feed-forward's output, before it is added (Gemma 2 and 3)
    sinks: str = ""  # whole name of the attention's sinks; empty if it has none (gpt-oss)
    router: str = "mlp.gate"
    expert_in: tuple[str, ...] = ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj")
    expert_out: str = "mlp.experts.{expert}.down_proj"
    # A checkpoint's experts are stacked, and their gate and up rows interleaved (gpt-oss); they are read as `expert_in`
    # and `expert_out` name them.
    stacked_experts: bool = False
    transposed: bool = False  # linear weights lie as [in, out] (GPT-2's Conv1D)
    # Endings of names that hold no weights, such as masks that old versions stored.
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)


@attrs.frozen(kw_only=True)
class NormConfig:
    """Root-mean-square norm, or with `centered` a layer norm with bias; `weight_offset` is added to stored weights."""

    eps: float
    centered: bool = False
    weight_offset: float = 0.0


@attrs.frozen(kw_only=True)
class ClampedGate:
    """An activation (up + 1) * gate * sigmoid(alpha * gate), with the gate at most `limit` and up within +-`limit`."""

    alpha: float
    limit: float


@attrs.frozen(kw_only=True)
class MoeConfig:
    """A feed-forward block of which each token uses `experts_per_token` of `num_experts`."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize: bool  # the chosen experts' probabilities are scaled to a sum of one
    router_bias: bool = False
    gate: ClampedGate | None = None  # what the experts have in place of the model's activation


@attrs.frozen(kw_only=True)
class LayerConfig:
    """Part of the configuration that may differ from layer to layer."""

    attention_scale: float  # scores are multiplied by it
    sliding_window: int | None = None  # how many tokens a token sees, itself included; None for all
    rope: Rope | None = None  # None where positions are learned vectors
    moe: MoeConfig | None = None  # None for a dense feed-forward block


@attrs.frozen(kw_only=True)
class DecoderConfig:
    """One model of the native decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # longest sequence that the position encoding covers, tokens
    layers: tuple[LayerConfig, ...]
    norm: NormConfig
    activation: str  # `silu`, `gelu_tanh`, `gelu` or `relu`
    names: TensorNames
    # How the family's own checkpoints name the modules, where the tensors have other names (GGUF); adapters use these.
    module_names: TensorNames | None = None
    gated: bool = True  # the feed-forward block multiplies its activation with a second projection
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # queries and keys are normalised per head
    embedding_scale: float | None = None  # embeddings are multiplied by it
    attention_soft_cap: float | None = None  # attention scores are squeezed into this range by a tanh
    logit_soft_cap: float | None = None  # logits are squeezed into this range by a tanh
    tied_head: bool = False  # the head uses the embedding's weights if the checkpoint brings none of its own
    runs_on_cpu_decoder: bool = False  # the C++ decoder computes this family; set in the table of families


def read_config(folder: Path) -> dict[str, Any]:
    """Read a model folder's config.json.

    Raises:
        ModelNotFound: there is no such folder.
        ModelFileError: the file is missing or not a JSON object.
    """
    if not folder.is_dir():
        raise ModelNotFound(f"model must be a folder with a config.json or a hub id; got {str(folder)!r}")
    return read_json_object(folder / "config.json")


def architecture_of(config: dict[str, Any], folder: Path) -> str:
    """Return the first of a config's `architectures`.

    Raises:
        ModelFileError: there is none.
    """
    return first_architecture(Fields(folder / "config.json", config))


def first_architecture(fields: Fields) -> str:
    """Return the first of the `architectures` in a config's fields.

    Raises:
        ModelFileError: there is none.
    """
    names = fields.texts("architectures")
    if not names:
        raise ModelFileError(fields.path, "architectures must name the model's class; got none")
    return names[0]


def checkpoint_dtype(config: dict[str, Any], folder: Path) -> torch.dtype:
    """Return the dtype that a config gives for its weights; float32 if it gives none.

    Raises:
        UnsupportedModel: a dtype other than float32, bfloat16 and float16.
    """
    fields = Fields(folder / "config.json", config)
    sections = [fields, *filter(None, [fields.section("text_config")])]
    named = [section.text(key, "") for section in sections for key in ("dtype", "torch_dtype")]
    name = next(filter(None, named), "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModel(f"{fields.path}: dtype must be one of {', '.join(DTYPES)}; got {name!r}")
    return DTYPES[name]
