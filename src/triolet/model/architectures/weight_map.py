"""Which tensors of a checkpoint become which tensor of the decoder, and reading them in that form.

All names and shapes are compared with the checkpoint before a single weight is read, so that one error tells
everything that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

from triolet.errors import WeightsMismatch
from triolet.kernels.cpu.gemm.blocks import BlockFormat, BlockRows, MappedRows
from triolet.kernels.linear.weight_only import PackedWeight
from triolet.model.architectures.decoder_config import (
    DecoderConfig,
    LatentConfig,
    LayerConfig,
    LayerInputsConfig,
    NormConfig,
    TensorNames,
)
from triolet.model.architectures.kv_format import SCALE_ENDINGS
from triolet.model.architectures.recurrent.plans import plan_recurrent, plan_shared_block
from triolet.model.architectures.tensor_plans import Planner, Shape, TensorPlan


class UnreadTensor(Protocol):
    """One tensor of a checkpoint, of whatever file format."""

    @property
    def shape(self) -> Shape: ...

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes in its file."""
        ...


class WeightSource(Protocol):
    """Tensors of a checkpoint, by name."""

    @property
    def tensors(self) -> Mapping[str, UnreadTensor]: ...

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype that `read` gives the tensor in."""
        ...

    def read(self, name: str, out: Tensor | None = None) -> Tensor:
        """Read one tensor to the CPU, into `out` (of its shape and dtype) if that is given."""
        ...

    def block_format(self, name: str) -> BlockFormat | None:
        """Return how a tensor's blocks are stored if the kernels can multiply with them as they are, or None."""
        ...

    def read_blocks(self, name: str) -> BlockRows:
        """Read a tensor that has a `block_format` as it is stored."""
        ...

    def map_blocks(self, name: str) -> MappedRows | None:
        """Map the blocks of a tensor, if they lie in a file row after row."""
        ...


@runtime_checkable
class PackedSource(Protocol):
    """Checkpoint with tensors that the GPU kernels can multiply with as they are stored."""

    def is_packed(self, name: str) -> bool:
        """Tell whether a tensor is one of them."""
        ...

    def read_packed(self, name: str) -> PackedWeight:
        """Read one of them to the CPU."""
        ...


@runtime_checkable
class ZeroBiasSource(Protocol):
    """Checkpoint that may have biases of zeros where the architecture has none."""

    def is_zero_bias(self, name: str) -> bool:
        """Tell whether a tensor is one of them."""
        ...


def plan_tensors(config: DecoderConfig, available: Container[str]) -> dict[str, TensorPlan]:
    """Say what the decoder needs, by its own names, such as `layers.0.qkv.weight`.

    Args:
        config: the model.
        available: the checkpoint's names; decides whether they carry the family's prefix, and whether a tied
            head has weights of its own.
    """
    names, hidden = config.names, config.hidden_size
    # A checkpoint of the bare decoder, without the head around it, has no prefix.
    prefix = "" if f"{names.final_norm}.weight" in available else names.prefix
    planner = Planner(names, prefix, available)
    embedding, head = f"{prefix}{names.embedding}", head_name(names, available)
    has_embedding, has_head = f"{embedding}.weight" in available, f"{head}.weight" in available
    if config.tied_head and has_head and not has_embedding:
        embedding, has_head = head, False  # the two are one tensor, which may be stored under either name
    planner.table("embedding", embedding, config.vocab_size, hidden)
    if names.positions is not None:
        rows = config.max_position + config.position_offset
        planner.table("positions", f"{prefix}{names.positions}", rows, hidden)
    for index, layer in enumerate(config.layers):
        _plan_layer(planner, config, layer, index)
    if config.layer_inputs is not None:
        _plan_layer_inputs(planner, config, config.layer_inputs)
    planner.vector("final_norm", f"{prefix}{names.final_norm}", hidden, bias=_has_bias(config.norm))
    if has_head or not config.tied_head:
        planner.table("head", head, config.vocab_size, hidden)
    if config.head_bias:
        planner.plans["head.bias"] = TensorPlan(((f"{head}.bias", (config.vocab_size,)),))
    if not names.other_parts:
        return planner.plans
    return {ours: _as_stored(plan, names, available) for ours, plan in planner.plans.items()}


def _as_stored(plan: TensorPlan, names: TensorNames, available: Container[str]) -> TensorPlan:
    """Return a plan with the other names of tensors that the checkpoint does not have under the first one."""

    def stored(name: str) -> str:
        others = (name.replace(part, other) for part, other in names.other_parts if part in name)
        return name if name in available else next((other for other in others if other in available), name)

    return attrs.evolve(plan, sources=tuple((stored(name), shape) for name, shape in plan.sources))


def head_name(names: TensorNames, available: Container[str]) -> str:
    """Return what a checkpoint with these tensors calls its head."""
    is_other = names.other_head and f"{names.other_head}.weight" in available
    return names.other_head if is_other else names.head


def _plan_layer_inputs(planner: Planner, config: DecoderConfig, inputs: LayerInputsConfig) -> None:
    names, prefix, size = config.names, planner.prefix, len(config.layers) * inputs.size
    planner.table("layer_inputs.embedding", prefix + names.layer_inputs_embedding, inputs.vocab_size, size)
    projection = (prefix + names.layer_inputs_projection,)
    planner.linear("layer_inputs.projection", projection, (size,), config.hidden_size, bias=False)
    planner.vector("layer_inputs.norm", prefix + names.layer_inputs_norm, inputs.size)


def _plan_layer(planner: Planner, config: DecoderConfig, layer: LayerConfig, index: int) -> None:
    names, hidden = layer.names or config.names, config.hidden_size
    first, second = layer.stored_as or (index, index)
    ours, theirs = f"layers.{index}.", planner.prefix + names.layer.format(layer=first)
    if (block := layer.shared_block) is not None:
        plan_shared_block(planner, config, block, layer, ours, theirs)
        theirs += names.behind_shared_block
    if names.attention_norm:
        planner.vector(
            ours + "attention_norm", theirs + names.attention_norm, hidden, bias=_has_bias(config.norm)
        )
    if layer.recurrent is not None:
        plan_recurrent(planner, config, layer.recurrent, ours, theirs)
    if layer.attends and layer.shared_block is None:
        _plan_attention(planner, config, layer, ours, theirs)
    if names.post_attention_norm:
        planner.vector(ours + "post_attention_norm", theirs + names.post_attention_norm, hidden)
    if second is None:
        return
    theirs = planner.prefix + names.layer.format(layer=second)
    if names.mlp_norm:
        planner.vector(ours + "mlp_norm", theirs + names.mlp_norm, hidden, bias=_has_bias(config.norm))
    _plan_mlp(planner, config, layer, ours, theirs)
    if names.post_mlp_norm:
        planner.vector(ours + "post_mlp_norm", theirs + names.post_mlp_norm, hidden)
    if (inputs := config.layer_inputs) is not None:
        gate, out = (theirs + names.layer_input_gate,), (theirs + names.layer_input_out,)
        planner.linear(ours + "layer_input.in", gate, (inputs.size,), hidden, bias=False)
        planner.linear(ours + "layer_input.out", out, (hidden,), inputs.size, bias=False)
        planner.vector(ours + "post_layer_input_norm", theirs + names.post_layer_input_norm, hidden)
    if names.layer_scale:
        planner.plans[ours + "scale"] = TensorPlan(((theirs + names.layer_scale, (1,)),))


def _plan_attention(
    planner: Planner, config: DecoderConfig, layer: LayerConfig, ours: str, theirs: str
) -> None:
    names, hidden, head_dim = config.names, config.hidden_size, config.head_dim_of(layer)
    queries, keys = config.num_heads * head_dim, config.num_kv_heads_of(layer) * head_dim
    if layer.latent is not None:
        queries = _plan_latent(planner, config, layer.latent, ours, theirs)
    else:
        qkv = tuple(theirs + name for name in projections_of(layer, names.qkv))
        outs: Shape = (2 * queries if config.attention_gate else queries, keys, keys)
        if layer.reads_cache_of is not None:
            outs = outs[:1]
        planner.linear(ours + "qkv", qkv, outs, hidden, bias=config.qkv_bias)
        if names.joined_by_heads:
            for part in ("weight", "bias") if config.qkv_bias else ("weight",):
                plan = planner.plans[f"{ours}qkv.{part}"]
                planner.plans[f"{ours}qkv.{part}"] = attrs.evolve(plan, num_joined_heads=config.num_heads)
    if config.qk_norm:
        _plan_head_norm(planner, config, ours + "query_norm", theirs + names.query_norm, queries, head_dim)
        if layer.reads_cache_of is None:
            _plan_head_norm(planner, config, ours + "key_norm", theirs + names.key_norm, keys, head_dim)
    attention_out = (theirs + names.attention_out,)
    planner.linear(ours + "attention_out", attention_out, (hidden,), queries, bias=config.attention_out_bias)
    if config.head_gate:
        gate = (theirs + names.head_gate,)
        planner.linear(ours + "head_gate", gate, (config.num_heads,), hidden, bias=False)
    if names.sinks:
        planner.plans[ours + "sinks"] = TensorPlan(((theirs + names.sinks, (config.num_heads,)),))


def _plan_head_norm(
    planner: Planner, config: DecoderConfig, ours: str, theirs: str, size: int, head_dim: int
) -> None:
    """Plan a norm of queries or keys, of `size` numbers in all heads."""
    if config.qk_norm_of_heads:
        return planner.head_norms(ours, theirs, size // head_dim, head_dim)
    return planner.vector(
        ours, theirs, size if config.qk_norm_of_rows else head_dim, bias=config.qk_norm_bias
    )


def projections_of(layer: LayerConfig, qkv: tuple[str, ...]) -> tuple[str, ...]:
    """Return the projections of a layer's queries, keys and values, of the names of all three."""
    if layer.reads_cache_of is not None:
        return qkv[:1]
    return (*qkv[:2], qkv[1]) if layer.values_are_keys else qkv


def _plan_latent(
    planner: Planner, config: DecoderConfig, latent: LatentConfig, ours: str, theirs: str
) -> int:
    """Plan what latent attention has in place of queries, keys and values; return the size of its output."""
    names, hidden, bias = config.names, config.hidden_size, config.qkv_bias
    rotary, inner = latent.rotary_size, latent.latent_size
    size_in = hidden
    if latent.query_size is not None:
        size_in = latent.query_size
        planner.linear(ours + "query_down", (theirs + names.query_down,), (size_in,), hidden, bias=bias)
        planner.vector(ours + "query_down_norm", theirs + names.query_down_norm, size_in)
    queries = config.num_heads * (latent.plain_size + rotary)
    planner.linear(ours + "query_up", (theirs + names.query_up,), (queries,), size_in, bias=False)
    planner.linear(ours + "latent_down", (theirs + names.latent_down,), (inner + rotary,), hidden, bias=bias)
    planner.vector(ours + "latent_norm", theirs + names.latent_norm, inner)
    heads = config.num_heads * (latent.plain_size + latent.value_size)
    planner.linear(ours + "latent_up", (theirs + names.latent_up,), (heads,), inner, bias=False)
    return config.num_heads * latent.value_size


def _has_bias(norm: NormConfig) -> bool:
    return norm.centered and norm.biased


def _plan_mlp(planner: Planner, config: DecoderConfig, layer: LayerConfig, ours: str, theirs: str) -> None:
    names, hidden, bias = config.names, config.hidden_size, config.mlp_bias
    blocks = []
    if config.activation == "xielu":
        for number in ("alpha_p", "alpha_n"):
            planner.number(f"{ours}xielu.{number}", f"{theirs}{names.activation}.{number}", (1,))
        # Files may lack these, which are the same everywhere.
        for number in ("beta", "eps"):
            if (stored := f"{theirs}{names.activation}.{number}") in planner.available:
                planner.number(f"{ours}xielu.{number}", stored, ())
    if layer.has_dense_block:
        blocks = [("mlp", names.mlp_in, names.mlp_out, config.intermediate_size_of(layer))]
    if layer.moe is not None:
        router, num_experts = (theirs + names.router,), layer.moe.num_experts
        planner.linear(ours + "router", router, (num_experts,), hidden, bias=layer.moe.router_bias)
        blocks += [
            (
                f"experts.{expert}",
                tuple(name.format(expert=expert) for name in names.expert_in),
                names.expert_out.format(expert=expert),
                layer.moe.intermediate_size,
            )
            for expert in range(layer.moe.num_experts)
        ]
        if layer.moe.is_beside_dense:
            planner.plans[ours + "router_norm"] = TensorPlan(((theirs + names.router_scale, (hidden,)),))
            for norm, stored in (
                ("post_dense_norm", names.post_dense_norm),
                ("experts_norm", names.experts_norm),
                ("post_experts_norm", names.post_experts_norm),
            ):
                planner.vector(ours + norm, theirs + stored, hidden)
        if layer.moe.has_expert_scales:
            scales = theirs + names.expert_scales
            planner.plans[ours + "expert_scales"] = TensorPlan(((scales, (num_experts,)),))
        if names.router_correction:
            correction = theirs + names.router_correction
            shape: Shape = (1, num_experts) if names.correction_is_row else (num_experts,)
            planner.plans[ours + "router_correction"] = TensorPlan(((correction, shape),))
        if layer.moe.shared_size is not None:
            if layer.moe.has_shared_gate:
                planner.linear(ours + "shared_gate", (theirs + names.shared_gate,), (1,), hidden, bias=False)
            blocks.append(("shared", names.shared_in, names.shared_out, layer.moe.shared_size))
    for name, names_in, name_out, size in blocks:
        outs = (size, size) if config.gated else (size,)
        project_in = tuple(theirs + each for each in names_in)
        planner.linear(f"{ours}{name}.in", project_in, outs, hidden, bias=bias)
        planner.linear(f"{ours}{name}.out", (theirs + name_out,), (hidden,), size, bias=bias)


def check_fit(config: DecoderConfig, plans: dict[str, TensorPlan], checkpoint: WeightSource) -> None:
    """Compare plans and checkpoint, both ways.

    Raises:
        WeightsMismatch: with the names of all tensors that are missing, unused or misshapen.
    """
    wanted = dict(source for plan in plans.values() for source in plan.sources)
    stored = checkpoint.tensors
    missing = [name for name in wanted if name not in stored]
    ignored, prefixes = config.names.ignored, config.names.ignored_prefixes
    unused = [
        name
        for name in stored
        if name not in wanted
        and not name.endswith((*ignored, *SCALE_ENDINGS))
        and not name.startswith(prefixes)
        and not (isinstance(checkpoint, ZeroBiasSource) and checkpoint.is_zero_bias(name))
    ]
    misshapen = [
        f"{name} must be {shape}; got {stored[name].shape}"
        for name, shape in wanted.items()
        if name in stored and stored[name].shape != shape
    ]
    if missing or unused or misshapen:
        raise WeightsMismatch(missing=missing, unused=sorted(unused), misshapen=misshapen)


class Staging(Protocol):
    """Memory of the host from which a device copies without the host's waiting."""

    def room(self, shape: Shape, dtype: torch.dtype) -> Tensor | None:
        """Return memory for a tensor that is to be read, or None if it is too large."""
        ...

    def send(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy the tensor for which there was room last to the device, and convert it there."""
        ...


def parted_heads(rows: Tensor, num_heads: int) -> Tensor:
    """Return all rows of queries, then those of keys and of values, [rows, ...]; they lie head by head."""
    parted: Tensor = rows.unflatten(0, (num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    return parted


@attrs.define
class WeightReader:
    """Hands out the decoder's tensors by name, each read, joined and converted when it is asked for.

    Args:
        dtype: what they become.
        device: where they go.
        on_bytes: told (bytes read so far, bytes in all), in the checkpoint's own dtype.
        staging: pinned memory on the way to the device; None on a CPU.
    """

    _checkpoint: WeightSource
    _plans: dict[str, TensorPlan]
    dtype: torch.dtype
    device: torch.device
    _on_bytes: Callable[[int, int], None] | None = None
    _staging: Staging | None = None
    _done_bytes: int = attrs.field(default=0, init=False)
    _done: set[TensorPlan] = attrs.field(
        factory=set, init=False
    )  # an embedding may be read for the head, too
    _total_bytes: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._total_bytes = sum(map(self._bytes_of, self._plans.values()))

    def _bytes_of(self, plan: TensorPlan) -> int:
        return sum(self._checkpoint.tensors[name].num_bytes for name, _ in plan.sources)

    def get(self, name: str) -> Tensor | None:
        """Return the tensor, or None if this model has none of that name."""
        return self[name] if name in self._plans else None

    def __contains__(self, name: str) -> bool:
        return name in self._plans

    def __getitem__(self, name: str) -> Tensor:
        plan = self._plans[name]
        if plan.transposed:
            tensor = self._read_transposed(plan).to(self.device, self.dtype)
        else:
            tensor = self._read(plan, self.dtype)
        if plan.num_joined_heads:
            tensor = parted_heads(tensor, plan.num_joined_heads)
        self._add_done(plan)
        return tensor

    def read_float32(self, name: str) -> Tensor:
        """Return a tensor in float32, whatever the model's dtype is."""
        plan = self._plans[name]
        tensor = self._read(plan, torch.float32)
        self._add_done(plan)
        return tensor

    def block_formats(self, name: str) -> list[tuple[BlockFormat, int]] | None:
        """Return format and rows of each source of a tensor, or None if one of them has no blocks."""
        plan = self._plans[name]
        formats = [(self._checkpoint.block_format(source), shape[0]) for source, shape in plan.sources]
        if plan.transposed or plan.num_joined_heads:
            return None
        known = [(kind, rows) for kind, rows in formats if kind is not None]
        return known if len(known) == len(formats) else None

    def num_in(self, name: str) -> int:
        """Return the columns of a matrix that is not transposed."""
        return self._plans[name].sources[0][1][-1]

    def read_blocks(self, name: str) -> list[BlockRows]:
        """Read the sources of a tensor that has `block_formats`, as they are stored."""
        plan = self._plans[name]
        blocks = [self._checkpoint.read_blocks(source) for source, _ in plan.sources]
        self._add_done(plan)
        return blocks

    def read_packed(self, name: str) -> list[PackedWeight] | None:
        """Read the sources of a tensor as they are stored; None if one of them is not packed for the GPU kernels."""
        plan, source = self._plans[name], self._checkpoint
        names = [name for name, _ in plan.sources]
        is_other = plan.transposed or plan.num_joined_heads
        if is_other or not isinstance(source, PackedSource) or not all(map(source.is_packed, names)):
            return None
        parts = [source.read_packed(name).to(self.device) for name in names]
        self._add_done(plan)
        return parts

    def map_blocks(self, name: str) -> MappedRows | None:
        """Map the blocks of a tensor with a single source, if they lie in a file row after row."""
        plan = self._plans[name]
        mapped = self._checkpoint.map_blocks(plan.sources[0][0]) if len(plan.sources) == 1 else None
        if mapped is not None:
            self._add_done(plan)
        return mapped

    def count_read(self, name: str) -> None:
        """Count a tensor as read, whose values came from elsewhere."""
        if name in self._plans:
            self._add_done(self._plans[name])

    def _add_done(self, plan: TensorPlan) -> None:
        if plan not in self._done:
            self._done.add(plan)
            self._done_bytes += self._bytes_of(plan)
        if self._on_bytes is not None:
            self._on_bytes(self._done_bytes, self._total_bytes)

    def _read(self, plan: TensorPlan, dtype: torch.dtype) -> Tensor:
        """Return the sources stacked along rows, each read directly into its place, on the device."""
        names = [name for name, _ in plan.sources]
        dtypes = {self._checkpoint.dtype_of(name) for name in names}
        # `torch.cat` promotes them to a common dtype.
        if len(dtypes) > 1:
            return torch.cat([self._checkpoint.read(name) for name in names]).to(self.device, dtype)
        rows = [
            shape[0] if shape else 1 for _, shape in plan.sources
        ]  # a number without a shape is one of [1]
        shape, stored = (sum(rows), *plan.sources[0][1][1:]), dtypes.pop()
        room = None if self._staging is None else self._staging.room(shape, stored)
        joined = torch.empty(shape, dtype=stored) if room is None else room
        for name, part in zip(names, joined.split(rows), strict=True):
            self._checkpoint.read(name, part)
        if self._staging is not None and room is not None:
            return self._staging.send(room, dtype)
        return joined.to(self.device, dtype)

    def _read_transposed(self, plan: TensorPlan) -> Tensor:
        return torch.cat([self._checkpoint.read(name) for name, _ in plan.sources], dim=1).T.contiguous()
