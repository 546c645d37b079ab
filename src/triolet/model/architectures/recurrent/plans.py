"""Which tensors of a checkpoint a recurrent layer is read from."""

from __future__ import annotations

from triolet.model.architectures.decoder_config import DecoderConfig, LayerConfig, TensorNames
from triolet.model.architectures.recurrent.configs import (
    DeltaNetConfig,
    KimiDeltaConfig,
    LightningConfig,
    Mamba1Config,
    MambaConfig,
    RecurrentConfig,
    SharedBlockConfig,
    ShortConvolutionConfig,
)
from triolet.model.architectures.tensor_plans import Planner, Shape, TensorPlan


def plan_recurrent(
    planner: Planner, config: DecoderConfig, layer: RecurrentConfig, ours: str, theirs: str
) -> None:
    """Plan the tensors of a recurrent layer.

    Args:
        planner: takes them.
        config: the model.
        layer: the layer's shapes.
        ours: what the decoder's names begin with.
        theirs: likewise, the checkpoint's.
    """
    names, hidden, plans = config.names, config.hidden_size, planner.plans
    bias = convolution_bias = False
    vectors: dict[str, tuple[str, Shape]] = {}
    match layer:
        case MambaConfig():
            size = layer.inner_size
            bias, convolution_bias = layer.projection_bias, layer.convolution_bias
            outs: Shape = (size + layer.channels + layer.num_heads,)
            vectors = _of_heads(names, layer.num_heads)
            vectors["skip"] = names.recurrent_skip, (layer.num_heads,)
            if layer.is_normed:
                planner.vector(ours + "recurrent_norm", theirs + names.recurrent_norm, size)
        case Mamba1Config():
            size, outs = layer.channels, (2 * layer.channels,)
            bias, convolution_bias = layer.projection_bias, layer.convolution_bias
            vectors = _of_channels(names, layer)
            if layer.has_norm_weights:
                sizes = (layer.step_rank, layer.state_size, layer.state_size)
                parts = zip(("steps", "written", "read"), names.recurrent_select_norms, sizes, strict=True)
                for part, name, norm_size in parts:
                    planner.vector(f"{ours}recurrent_{part}_norm", theirs + name, norm_size)
        case DeltaNetConfig():
            size = layer.value_size
            rates = (layer.num_heads, layer.num_heads)
            # Queries, keys and values may be one projection.
            outs = (layer.channels, size) if len(names.recurrent_in) < 4 else (*_delta_parts(layer), size)
            project_rates = tuple(theirs + name for name in names.recurrent_rates)
            planner.linear(ours + "recurrent_rates", project_rates, rates, hidden, bias=False)
            vectors = _of_heads(names, layer.num_heads)
            planner.vector(ours + "recurrent_norm", theirs + names.recurrent_norm, layer.value_dim)
        case KimiDeltaConfig():
            size = layer.inner_size
            outs = (size,) * 3
            project_rates = tuple(theirs + name for name in names.recurrent_rates)
            planner.linear(ours + "recurrent_rates", project_rates, (layer.num_heads,), hidden, bias=False)
            for part, pair in (("decays", names.recurrent_decays), ("gate", names.recurrent_gates)):
                down, up = (theirs + name for name in pair)
                rank = layer.head_dim
                planner.linear(f"{ours}recurrent_{part}.in", (down,), (rank,), hidden, bias=False)
                planner.linear(f"{ours}recurrent_{part}.out", (up,), (size,), rank, bias=False)
            vectors = {
                "step_bias": (names.recurrent_step_bias, (size,)),
                "decay": (names.recurrent_decay, (1, 1, layer.num_heads, 1)),
            }
            planner.vector(ours + "recurrent_norm", theirs + names.recurrent_norm, layer.head_dim)
        case LightningConfig():
            size, outs = layer.inner_size, (layer.channels,)
            (gate,) = names.recurrent_gates
            planner.linear(ours + "recurrent_gate", (theirs + gate,), (size,), hidden, bias=False)
            if theirs + names.recurrent_decay in planner.available:
                vectors = {"decay": (names.recurrent_decay, (layer.num_heads, 1, 1))}
            planner.vector(ours + "recurrent_norm", theirs + names.recurrent_norm, size)
        case ShortConvolutionConfig():
            size, outs = layer.channels, (3 * layer.channels,)
            bias = convolution_bias = layer.bias
    project_in = tuple(theirs + name for name in names.recurrent_in)
    planner.linear(ours + "recurrent_in", project_in, outs, hidden, bias=bias)
    if not isinstance(layer, LightningConfig):
        _plan_convolution(planner, layer, ours, theirs, bias=convolution_bias)
    for name, (stored, shape_stored) in vectors.items():
        plans[f"{ours}recurrent_{name}"] = TensorPlan(((theirs + stored, shape_stored),))
    planner.linear(ours + "recurrent_out", (theirs + names.recurrent_out,), (hidden,), size, bias=bias)


def _plan_convolution(
    planner: Planner,
    layer: MambaConfig | Mamba1Config | DeltaNetConfig | KimiDeltaConfig | ShortConvolutionConfig,
    ours: str,
    theirs: str,
    *,
    bias: bool,
) -> None:
    names = planner.names
    parts: Shape = (layer.channels,)
    stored = [theirs + names.recurrent_convolution]
    if f"{stored[0]}.weight" not in planner.available and names.recurrent_convolutions:
        stored = [theirs + name for name in names.recurrent_convolutions]
        parts = _delta_parts(layer) if isinstance(layer, DeltaNetConfig) else (layer.channels // 3,) * 3
    pairs = list(zip(stored, parts, strict=True))
    planner.plans[ours + "convolution.weight"] = TensorPlan(
        tuple((f"{name}.weight", (part, 1, layer.kernel_size)) for name, part in pairs)
    )
    if bias:
        biases = tuple((f"{name}.bias", (part,)) for name, part in pairs)
        planner.plans[ours + "convolution.bias"] = TensorPlan(biases)


def _delta_parts(layer: DeltaNetConfig) -> Shape:
    """Return the numbers of all queries, all keys and all values."""
    return layer.key_size, layer.key_size, layer.value_size


def _of_heads(names: TensorNames, num_heads: int) -> dict[str, tuple[str, Shape]]:
    shape = (num_heads,)
    return {"step_bias": (names.recurrent_step_bias, shape), "decay": (names.recurrent_decay, shape)}


def _of_channels(names: TensorNames, layer: Mamba1Config) -> dict[str, tuple[str, Shape]]:
    """Return the tensors of channels, which have a first dimension for heads where there are several."""
    heads = () if layer.num_heads is None else (layer.num_heads,)
    channels = layer.channels // (layer.num_heads or 1)
    return {
        "select": (names.recurrent_select, (*heads, layer.step_rank + 2 * layer.state_size, channels)),
        "steps": (names.recurrent_steps, (*heads, channels, layer.step_rank)),
        "step_bias": (names.recurrent_step_bias, (*heads, channels)),
        "decay": (names.recurrent_decay, (*heads, channels, layer.state_size)),
        "skip": (names.recurrent_skip, (*heads, channels)),
    }


def plan_shared_block(
    planner: Planner,
    config: DecoderConfig,
    block: SharedBlockConfig,
    layer: LayerConfig,
    ours: str,
    theirs: str,
) -> None:
    """Plan the tensors of a shared block, and what the layer has of its own beside it.

    Args:
        planner: takes them.
        config: the model.
        block: the shared block.
        layer: whose recurrence it is in front of.
        ours: what the decoder's names of the layer begin with; those of the block begin with `shared.`.
        theirs: what the checkpoint's names of the layer begin with.
    """
    names, hidden, size = config.names, config.hidden_size, config.intermediate_size
    head_dim, num_kv_heads = config.head_dim_of(layer), config.num_kv_heads_of(layer)
    queries, keys = config.num_heads * head_dim, num_kv_heads * head_dim
    shared = shared_block_name(block)
    stored = planner.prefix + names.layer.format(layer=block.stored_in) + block.name
    planner.vector(shared + "attention_norm", stored + names.attention_norm, 2 * hidden)
    qkv = tuple(stored + name for name in names.qkv)
    planner.linear(shared + "qkv", qkv, (queries, keys, keys), 2 * hidden, bias=False)
    planner.linear(shared + "attention_out", (stored + names.attention_out,), (hidden,), queries, bias=False)
    planner.vector(shared + "mlp_norm", stored + names.mlp_norm, hidden)
    mlp_in = tuple(stored + name for name in names.mlp_in)
    planner.linear(shared + "mlp.in", mlp_in, (size, size), hidden, bias=config.mlp_bias)
    planner.linear(shared + "mlp.out", (stored + names.mlp_out,), (hidden,), size, bias=config.mlp_bias)
    planner.linear(ours + "shared_out", (theirs + names.shared_block_out,), (hidden,), hidden, bias=False)
    if block.adapter is None:
        return
    adapted = [("mlp", names.mlp_adapter, hidden, 2 * size)]
    if block.adapts_attention:
        outs = (queries, keys, keys)
        adapted += [
            (part, name, 2 * hidden, out)
            for part, name, out in zip(("query", "key", "value"), names.qkv_adapters, outs, strict=True)
        ]
    for part, name, size_in, size_out in adapted:
        down, up = (stored + name.format(adapter=block.adapter, part=number) for number in (0, 1))
        planner.linear(f"{ours}{part}_adapter.in", (down,), (block.adapter_rank,), size_in, bias=False)
        planner.linear(f"{ours}{part}_adapter.out", (up,), (size_out,), block.adapter_rank, bias=False)


def shared_block_name(block: SharedBlockConfig) -> str:
    """Return what the decoder's names of a shared block begin with."""
    return f"shared.{block.stored_in}."
