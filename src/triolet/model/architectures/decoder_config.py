"""Configuration of a native decoder: shapes, flags, one entry per layer, and the checkpoint's tensor names.

`families.py` fills it in from a folder's config.json; nothing after it looks at that file again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import torch

from triolet.errors import ModelFileError, ModelNotFound, UnsupportedModel
from triolet.model.architectures.recurrent.configs import RecurrentConfig, SharedBlockConfig
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
    other_head: str = ""  # what older files of the family call it; empty if they do not differ
    # What a layer's names begin with, after the prefix; `{layer}` is filled in.
    layer: str = "layers.{layer}."
    attention_norm: str = "input_layernorm"  # empty: attention reads the residual stream as it is (OLMo 2)
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    # The rows of the one projection in `qkv` lie head by head: a head's query, its key, its value (GPT-NeoX).
    joined_by_heads: bool = False
    # Latent attention: down to a latent, its norm, and up again; `query_up` alone where queries have no latent.
    query_down: str = "self_attn.q_a_proj"
    query_down_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    latent_down: str = "self_attn.kv_a_proj_with_mqa"
    latent_norm: str = "self_attn.kv_a_layernorm"
    latent_up: str = "self_attn.kv_b_proj"
    # With `qk_norm_of_heads`, `{head}` is filled in where each head's norm is a tensor of its own.
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    attention_out: str = "self_attn.o_proj"
    post_attention_norm: str = ""  # norm of the attention's output, before it is added (Gemma 2 and 3)
    mlp_norm: str = "post_attention_layernorm"  # empty: likewise, or it reads what attention reads
    mlp_in: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    mlp_out: str = "mlp.down_proj"
    activation: str = "mlp.act_fn"  # of `xielu`, which has learned numbers
    post_mlp_norm: str = ""  # norm of the feed-forward's output, before it is added (Gemma 2 and 3)
    sinks: str = ""  # whole name of the attention's sinks; empty if it has none (gpt-oss)
    layer_scale: str = (
        ""  # whole name of a number that a layer's output is multiplied by; empty without one (Gemma 4)
    )
    # Of the inputs of the layers (Gemma 4): table and projection for all layers, and its norm; then those of a layer.
    layer_inputs_embedding: str = "embed_tokens_per_layer"
    layer_inputs_projection: str = "per_layer_model_projection"
    layer_inputs_norm: str = "per_layer_projection_norm"
    layer_input_gate: str = "per_layer_input_gate"
    layer_input_out: str = "per_layer_projection"
    post_layer_input_norm: str = "post_per_layer_input_norm"
    router: str = "mlp.gate"
    router_correction: str = (
        ""  # whole name of what is added to scores where experts are chosen (DeepSeek V3)
    )
    correction_is_row: bool = False  # it is stored as [1, num_experts]
    expert_in: tuple[str, ...] = ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj")
    expert_out: str = "mlp.experts.{expert}.down_proj"
    # A checkpoint's experts are stacked, and their gate and up rows interleaved (gpt-oss); they are read as `expert_in`
    # and `expert_out` name them.
    stacked_experts: bool = False
    # Tensors that a checkpoint may have for all experts together, [num_experts, out, in], each with the tensors that an
    # expert's rows are read as, the same number for each; whole names.
    expert_stacks: tuple[tuple[str, tuple[str, ...]], ...] = ()
    router_scale: str = (
        "router.scale"  # whole name of the weights of the router's norm, with `is_beside_dense`
    )
    expert_scales: str = "router.per_expert_scale"  # whole name, with `has_expert_scales`
    # Norms with `is_beside_dense`: of what the dense block gives, and of what experts read and give.
    post_dense_norm: str = "post_feedforward_layernorm_1"
    experts_norm: str = "pre_feedforward_layernorm_2"
    post_experts_norm: str = "post_feedforward_layernorm_2"
    shared_in: tuple[str, ...] = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    shared_out: str = "mlp.shared_expert.down_proj"
    head_gate: str = "self_attn.gate_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    # Of a layer with a shared block in front of its recurrence (Zamba): what the names of the recurrence begin with,
    # the projection between the two, and the matrices of the block's adapters, of which `{part}` is 0 or 1.
    behind_shared_block: str = "mamba_decoder."
    shared_block_out: str = "linear"
    qkv_adapters: tuple[str, ...] = (
        "self_attn.linear_q_adapter_list.{adapter}.{part}",
        "self_attn.linear_k_adapter_list.{adapter}.{part}",
        "self_attn.linear_v_adapter_list.{adapter}.{part}",
    )
    mlp_adapter: str = "feed_forward.gate_up_proj_adapter_list.{adapter}.{part}"
    # What a recurrent layer has in place of attention; the last five are whole names.
    recurrent_in: tuple[str, ...] = ("mamba.in_proj",)
    recurrent_rates: tuple[str, ...] = ()  # of a gated delta net
    # Two matrices each of Kimi's delta attention, for decays and for the gate; one for the gate of lightning attention.
    recurrent_decays: tuple[str, ...] = ()
    recurrent_gates: tuple[str, ...] = ()
    recurrent_convolution: str = "mamba.conv1d"
    # Those of queries, keys and values, where a checkpoint has them one by one.
    recurrent_convolutions: tuple[str, ...] = ()
    recurrent_norm: str = "mamba.norm"
    recurrent_out: str = "mamba.out_proj"
    # Of Mamba: norms of what steps come from, of what is written and of what is read.
    recurrent_select_norms: tuple[str, ...] = ("mamba.dt_layernorm", "mamba.b_layernorm", "mamba.c_layernorm")
    recurrent_select: str = "mamba.x_proj.weight"  # of Mamba
    recurrent_steps: str = "mamba.dt_proj.weight"  # of Mamba
    recurrent_step_bias: str = "mamba.dt_bias"
    recurrent_decay: str = "mamba.A_log"
    recurrent_skip: str = "mamba.D"  # of both Mambas
    transposed: bool = False  # linear weights lie as [in, out] (GPT-2's Conv1D)
    # Endings of names that hold no weights, such as masks that old versions stored.
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    ignored_prefixes: tuple[str, ...] = ()  # of modules that generation does without
    # Parts of names, and what stands in their place in files that have no tensor of the name itself.
    other_parts: tuple[tuple[str, str], ...] = ()


@attrs.frozen(kw_only=True)
class NormConfig:
    """Root-mean-square norm, or with `centered` a layer norm; `weight_offset` is added to stored weights."""

    eps: float
    centered: bool = False
    biased: bool = True  # of a layer norm: it has a bias
    weight_offset: float = 0.0


@attrs.frozen(kw_only=True)
class QueryGrowth:
    """Factor of rotated queries: 1 + beta * ln(1 + floor(position / length)). Source: Llama 4's attention scaling."""

    beta: float
    length: int  # tokens


@attrs.frozen(kw_only=True)
class ClampedGate:
    """An activation (up + 1) * gate * sigmoid(alpha * gate), with the gate at most `limit` and up within +-`limit`."""

    alpha: float
    limit: float


@attrs.frozen(kw_only=True)
class GroupedRouting:
    """Choice of experts within the best groups of experts. Source: DeepSeek-V3, arXiv 2412.19437.

    A group's score is the sum of the `group_top` best scores of its experts. Experts are weighted by their scores.
    """

    num_groups: int
    groups_per_token: int
    group_top: int
    scale: float  # the weights are multiplied by it
    is_sigmoid: bool = False  # scores are sigmoids of the router's output, not a softmax
    is_corrected: bool = False  # a learned number per expert is added to its score for the choice alone

    @property
    def takes_all_groups(self) -> bool:
        """True if a token's experts may be of any group."""
        return self.groups_per_token == self.num_groups


@attrs.frozen(kw_only=True)
class LatentConfig:
    """Multi-head latent attention: heads share one latent per token and one rotated key. Source: arXiv 2405.04434."""

    query_size: int | None  # of the queries' latent; None without one
    latent_size: int  # of the latent of keys and values
    rotary_size: int  # rotated dimensions of a head, and of the shared key
    plain_size: int  # other dimensions of a head's keys
    value_size: int  # of a head

    @property
    def cached_size(self) -> int:
        """Numbers in the cache per token: rotated key, then latent."""
        return self.rotary_size + self.latent_size


@attrs.frozen(kw_only=True)
class LayerInputsConfig:
    """An input for each layer beside the residual stream, of a token's own rows and its embedding. Source: Gemma 3n."""

    size: int  # numbers of a token for one layer
    vocab_size: int  # rows of the table


@attrs.frozen(kw_only=True)
class MoeConfig:
    """A feed-forward block of which each token uses `experts_per_token` of `num_experts`."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize: bool  # the chosen experts' probabilities are scaled to a sum of one
    router_bias: bool = False
    gate: ClampedGate | None = None  # what the experts have in place of the model's activation
    shared_size: int | None = None  # width of an expert that all tokens use; None without one
    has_shared_gate: bool = True  # its output is multiplied by the sigmoid of a gate of its own
    routing: GroupedRouting | None = None  # None: the best of a softmax over all experts
    # A dense block of the model's width is computed beside the experts, and each of the two, and the router, reads the
    # residual stream through a norm of its own (Gemma 4).
    is_beside_dense: bool = False
    has_expert_scales: bool = False  # a learned number per expert multiplies its share

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the widths of the experts."""
        return tuple(filter(None, (self.intermediate_size, self.shared_size)))


@attrs.frozen(kw_only=True)
class ParallelMixers:
    """Attention and a recurrence of one layer, which read the same norm and are added. Source: arXiv 2507.22448."""

    attention_scale: float  # what attention gives is multiplied by it
    recurrent_scale: float  # so is what the recurrence gives


@attrs.frozen(kw_only=True)
class NormResiduals:
    """Factors of a layer whose blocks are added to what they read behind its norm, not to the stream (MiniMax-01).

    Of attention and of the feed-forward block: what it reads, and what it gives, are multiplied by them.
    """

    attention: tuple[float, float]
    mlp: tuple[float, float]


@attrs.frozen(kw_only=True)
class LayerConfig:
    """Part of the configuration that may differ from layer to layer."""

    attention_scale: float  # scores are multiplied by it
    # Shape of its heads and of its feed-forward block where they are not the model's (Gemma 4).
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    values_are_keys: bool = False  # values are what keys are before their norm: one projection gives both
    reads_cache_of: int | None = (
        None  # an earlier layer whose keys and values it reads; it has none of its own
    )
    sliding_window: int | None = None  # how many tokens a token sees, itself included; None for all
    rope: Rope | None = None  # None where positions are learned vectors, or not encoded at all
    moe: MoeConfig | None = None  # None for a dense feed-forward block
    latent: LatentConfig | None = None  # None for attention with keys and values of its heads
    # What the layer has in place of attention; None for attention.
    recurrent: RecurrentConfig | None = None
    parallel_mixers: ParallelMixers | None = None  # where it has that beside attention (Falcon-H1)
    norm_residuals: NormResiduals | None = None  # None where the residual stream goes past the norms
    names: TensorNames | None = None  # of its norms, where they are not the model's (OLMo Hybrid)
    shared_block: SharedBlockConfig | None = None  # in front of its recurrence (Zamba)
    # Numbers of the checkpoint's layers that hold attention and the feed-forward block, where each is one of its own
    # (Nemotron-H), the second None without such a block; None where a layer holds both.
    stored_as: tuple[int, int | None] | None = None

    @property
    def attends(self) -> bool:
        """True if it has attention."""
        return self.recurrent is None or self.parallel_mixers is not None or self.shared_block is not None

    @property
    def has_dense_block(self) -> bool:
        """True if its feed-forward block is one that all tokens use, or has such a block beside its experts."""
        return self.moe is None or self.moe.is_beside_dense

    @property
    def has_feed_forward(self) -> bool:
        """True if it has a feed-forward block."""
        return self.stored_as is None or self.stored_as[1] is not None


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
    # `silu`, `gelu_tanh`, `gelu`, `relu`, `relu2`, its square, or `xielu`, of numbers that each layer has learned.
    activation: str
    names: TensorNames
    # How the family's own checkpoints name the modules, where the tensors have other names (GGUF); adapters use these.
    module_names: TensorNames | None = None
    gated: bool = True  # the feed-forward block multiplies its activation with a second projection
    qkv_bias: bool = False
    attention_out_bias: bool = False
    # What attention gives is multiplied by the sigmoid of a gate, which comes with each head's query (Qwen3-Next).
    attention_gate: bool = False
    # So is what each head gives, by one gate of its own, which comes from what attention reads (LFM3).
    head_gate: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    # The gate of the feed-forward block is multiplied by it before the activation.
    mlp_gate_scale: float = 1.0
    mlp_scale: float = 1.0  # what the feed-forward block gives is multiplied by it
    qk_norm: bool = False  # queries and keys are normalised per head
    qk_norm_of_rows: bool = False  # with `qk_norm`: over all heads of a token together (OLMo 2)
    qk_norm_of_heads: bool = False  # with `qk_norm`: each head has weights of its own (StableLM)
    qk_norm_bias: bool = False  # with `qk_norm`, as layer norms: with biases (Phi)
    qk_norm_after_rope: bool = False  # with `qk_norm`: after queries and keys have turned (HunYuan)
    value_norm: bool = False  # values are normalised per head, without weights (Gemma 4)
    layer_inputs: LayerInputsConfig | None = None
    # Both blocks of a layer are added to the residual stream at once, and read it at once: through the same norm
    # (Cohere), or through norms of their own, where the feed-forward block has one (GPT-NeoX).
    parallel_block: bool = False
    position_offset: int = 0  # rows in front of that of the first learned position (OPT)
    residual_scale: float = 1.0  # what a block adds to the residual stream is multiplied by it
    logit_scale: float = 1.0  # logits are multiplied by it; positive
    query_growth: QueryGrowth | None = None
    embedding_scale: float | None = None  # embeddings are multiplied by it
    # So are embeddings that are given in the place of tokens (Granite): the model multiplies, not its table (Gemma).
    scales_given_embeddings: bool = False
    attention_soft_cap: float | None = None  # attention scores are squeezed into this range by a tanh
    logit_soft_cap: float | None = None  # logits are squeezed into this range by a tanh
    tied_head: bool = False  # the head uses the embedding's weights if the checkpoint brings none of its own
    runs_on_cpu_decoder: bool = False  # the C++ decoder computes this family; set in the table of families

    @property
    def input_widths(self) -> tuple[int, ...]:
        """Widths of the inputs of its linear layers, the head's included."""
        widths = {self.hidden_size}
        if self.layer_inputs is not None:
            widths.add(self.layer_inputs.size)
        for layer in self.layers:
            widths.add(self.num_heads * self.head_dim_of(layer))
            if layer.has_dense_block:
                widths.add(self.intermediate_size_of(layer))
            widths |= set(() if layer.moe is None else layer.moe.widths)
        return tuple(widths)

    def num_kv_heads_of(self, layer: LayerConfig) -> int:
        """Return the heads of a layer's keys and values."""
        return self.num_kv_heads if layer.num_kv_heads is None else layer.num_kv_heads

    def head_dim_of(self, layer: LayerConfig) -> int:
        """Return the numbers of each head of a layer."""
        return self.head_dim if layer.head_dim is None else layer.head_dim

    def intermediate_size_of(self, layer: LayerConfig) -> int:
        """Return the width of a layer's dense feed-forward block."""
        return self.intermediate_size if layer.intermediate_size is None else layer.intermediate_size

    @property
    def has_equal_layers(self) -> bool:
        """True if all layers have heads and feed-forward blocks of the same shape, and caches of their own."""
        return all(
            layer.num_kv_heads is layer.head_dim is layer.intermediate_size is layer.reads_cache_of is None
            for layer in self.layers
        )

    @property
    def is_recurrent(self) -> bool:
        """True if a layer keeps a state in place of keys and values, or beside them."""
        return any(layer.recurrent is not None for layer in self.layers)


_EARLY_FILES = {
    "gptq": "quantize_config.json",
    "awq": "quant_config.json",
    "modelopt": "hf_quant_config.json",
}


def read_config(folder: Path) -> dict[str, Any]:
    """Read a model folder's config.json.

    Raises:
        ModelNotFound: there is no such folder.
        ModelFileError: the file is missing or not a JSON object.
    """
    if not folder.is_dir():
        raise ModelNotFound(f"model must be a folder with a config.json or a hub id; got {str(folder)!r}")
    config = read_json_object(folder / "config.json")
    # The name that compressed-tensors' section had at first.
    early = config.get("compression_config")
    if isinstance(early, dict) and config.get("quantization_config") is None:
        config["quantization_config"] = {"quant_method": "compressed-tensors", **early}
    # Early AutoGPTQ, AutoAWQ and ModelOpt had it in a file of its own.
    for method, name in _EARLY_FILES.items():
        if config.get("quantization_config") is None and (folder / name).is_file():
            config["quantization_config"] = {"quant_method": method, **read_json_object(folder / name)}
    return config


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
