"""Plan of a CPU decoder: every weight packed in the order in which the C++ step reads it, and a struct per layer.

Each weight is read, packed and let go before the next is read: loading needs little more memory than running. A tied
head serves as the embedding too, packed as it is.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from triolet.kernels.cpu.abi import (
    ArgmaxFilterStruct,
    ExpertsStruct,
    LayerInputsStruct,
    LayerStruct,
    LinearStruct,
    ModelStruct,
)
from triolet.kernels.cpu.attention.paged_attention import DTYPES
from triolet.kernels.cpu.calibration import calibrate
from triolet.kernels.cpu.gemm.blocks import MappedRows
from triolet.kernels.cpu.gemm.packing import (
    MODEL_DTYPES,
    CppArgmaxFilter,
    CppLinear,
    pack_argmax_filter,
    pack_linear,
    pointer,
)
from triolet.kernels.cpu.library import library
from triolet.model.architectures.decoder_config import DecoderConfig, LayerConfig, MoeConfig
from triolet.model.architectures.weight_map import WeightReader
from triolet.model.backends.cpu.decoder import CpuDecoder
from triolet.model.backends.decoder_facts import DecoderFacts, decoder_facts
from triolet.model.backends.layers.layer_inputs import layer_input_scales
from triolet.model.backends.quant_method import QUANT_METHODS, UNQUANTIZED, QuantMethod
from triolet.model.backends.torch_loading import (
    embedding_scale_of,
    learned_positions_of,
    router_norm_weight,
    xielu_of,
)
from triolet.model.memory.out_of_memory import trim_heap

if TYPE_CHECKING:
    from triolet.kernels.cpu.gemm.lora import CppAdapter
    from triolet.model.adapters import AdapterBank, LayerPairs
    from triolet.model.weights_cache import WeightsCache


# The activations that the C++ step knows, as its struct numbers them.
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu": 2, "relu2": 3, "gelu": 4, "xielu": 5}


def can_plan(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether this model's step can run as one call here: its family says so, and all its features are known."""
    return (
        config.runs_on_cpu_decoder
        and device.type == "cpu"
        and dtype in MODEL_DTYPES
        and _has_known_features(config)
        and UNQUANTIZED.accepts(*config.input_widths)
        and library() is not None
    )


def can_quantise(config: DecoderConfig, quantization: str) -> bool:
    """Tell whether a model that can be planned can have its weights or activations rounded."""
    method = QUANT_METHODS[quantization]
    # The products of experts know plain weights and blocks, and nothing that is rounded while it is loaded.
    has_experts = any(layer.moe is not None for layer in config.layers)
    return (method.keeps_blocks or not has_experts) and method.accepts(*config.input_widths)


def _has_known_features(config: DecoderConfig) -> bool:
    # The C++ step adds up experts in the residual stream, where no norm can come between.
    takes_experts = config.gated and not config.parallel_block

    def knows(layer: LayerConfig) -> bool:
        moe = layer.moe
        has_place = moe is None or moe.is_beside_dense or not config.names.post_mlp_norm
        # It does not look for the best groups of experts.
        finds = moe is None or (takes_experts and (moe.routing is None or moe.routing.takes_all_groups))
        plain = has_place and finds
        return plain and layer.latent is None and layer.recurrent is None

    has_gates = config.attention_gate or config.head_gate
    return config.activation in _ACTIVATIONS and not has_gates and all(map(knows, config.layers))


def build_cpu_decoder(
    config: DecoderConfig,
    weights: WeightReader,
    *,
    max_model_len: int | None = None,
    quantization: str | None = None,
    adapters: AdapterBank[CppAdapter] | None = None,
    cache: WeightsCache | None = None,
    calibration: str = "auto",
) -> CpuDecoder:
    """Read and pack the weights, tensor by tensor.

    Args:
        config: a model that `can_plan` accepts.
        weights: loaded by the plans of `config`.
        max_model_len: longest sequence that will be asked for, tokens; bounds the rotary tables.
        quantization: how to round, as the model `can_quantise`; None to keep the weights as they are.
        adapters: LoRA adapters that change its layers, packed by `adapter_packing`.
        cache: packed weights of this model and these arguments.
        calibration: whether the choices of the kernels are measured; see `EngineConfig`.
    """
    cpp = library()
    if cpp is None:
        raise RuntimeError("there are no compiled kernels: ask can_plan first")
    facts = decoder_facts(config, weights, max_model_len)
    planner = _Planner(config, weights, cpp, facts, QUANT_METHODS[quantization], cache)
    model = planner.model()
    chosen = calibrate(cpp, model, weights.dtype, calibration)
    return CpuDecoder(facts.spec, model, planner.kept, cpp, chosen, facts.cache_places, adapters)


def adapter_packing(config: DecoderConfig) -> Callable[[LayerPairs], CppAdapter]:
    """Return the function that packs adapters of a model that `can_plan` accepts."""
    # imported here because most engines have no adapters
    from triolet.kernels.cpu.gemm.lora import AdaptedShape, pack_adapter

    def shapes(layer: LayerConfig, prefix: str) -> tuple[AdaptedShape, ...]:
        kv_heads = 0 if layer.reads_cache_of is not None else 2 * config.num_kv_heads_of(layer)
        qkv = (config.num_heads + kv_heads) * config.head_dim_of(layer)
        mlp_in = config.intermediate_size_of(layer) * (2 if config.gated else 1)
        return (
            AdaptedShape(f"{prefix}.qkv", qkv),
            AdaptedShape(f"{prefix}.attention_out", config.hidden_size),
            AdaptedShape(f"{prefix}.mlp.in", mlp_in, gated=config.gated),
            AdaptedShape(f"{prefix}.mlp.out", config.hidden_size),
        )

    layers = [
        shape for index, layer in enumerate(config.layers) for shape in shapes(layer, f"layers.{index}")
    ]
    embedding = AdaptedShape("embedding", config.hidden_size)
    head = AdaptedShape("head", config.vocab_size)
    cpp = library()
    if cpp is None:
        raise RuntimeError("there are no compiled kernels: ask can_plan first")
    return functools.partial(pack_adapter, cpp, layers=layers, embedding=embedding, head=head)


@attrs.define
class _Planner:
    """Builder of the structs; owns the memory that they point at."""

    config: DecoderConfig
    weights: WeightReader
    cpp: ctypes.CDLL
    facts: DecoderFacts
    method: QuantMethod
    cache: WeightsCache | None
    kept: list[object] = attrs.field(factory=list, init=False)

    def model(self) -> ModelStruct:
        config = self.config
        head, argmax_filter, embedding = self._head_and_embedding()
        layers = (LayerStruct * len(config.layers))(
            *(self._layer(layer, f"layers.{index}.") for index, layer in enumerate(config.layers))
        )
        positions = learned_positions_of(config, self.weights)
        self.kept += (layers, positions, self.facts.query_factors)
        return ModelStruct(
            layers=ctypes.addressof(layers),
            **_table(embedding),
            learned_positions=pointer(positions),
            query_factors=pointer(self.facts.query_factors),
            final_norm=self._norm("final_norm"),
            final_norm_bias=self._norm_bias("final_norm"),
            head=head.struct(),
            argmax_filter=argmax_filter.struct() if argmax_filter else ArgmaxFilterStruct(),
            layer_inputs=self._layer_inputs(),
            num_layers=len(config.layers),
            hidden=config.hidden_size,
            num_heads=config.num_heads,
            dtype=DTYPES[self.weights.dtype],
            activation=_ACTIVATIONS[config.activation],
            norms_rows=config.qk_norm_of_rows,
            norms_heads=config.qk_norm_of_heads,
            norms_turned=config.qk_norm_after_rope,
            parallel=config.parallel_block,
            eps=config.norm.eps,
            attention_soft_cap=config.attention_soft_cap or 0.0,
            logit_soft_cap=config.logit_soft_cap or 0.0,
            embedding_scale=embedding_scale_of(config, self.weights.dtype) or 1.0,
            residual_scale=config.residual_scale,
            logit_scale=config.logit_scale,
        )

    def _head_and_embedding(self) -> tuple[CppLinear, CppArgmaxFilter | None, Tensor | MappedRows | None]:
        """Return the output head, its argmax filter, and the embedding if its weights are not the head's."""
        is_tied = "head.weight" not in self.weights
        name = "embedding" if is_tied else "head"
        head, argmax_filter = (None, None) if self.cache is None else self.cache.head()
        if head is not None:
            self._count_read(name)
            self.weights.count_read("head.bias")
        # The blocks of an embedding know no bias of a head.
        elif (is_tied and self.config.head_bias) or (
            head := self.method.pack_kept(self.cpp, self.weights, name)
        ) is None:
            weight = self.weights[f"{name}.weight"]
            head = self.method.pack_head(self.cpp, weight, self.weights.get("head.bias"))
            # The filter's bounds are of logits without a cap and without a bias.
            has_bound = self.config.logit_soft_cap is None and not self.config.head_bias
            has_filter = head.bits == 0 and has_bound
            argmax_filter = pack_argmax_filter(self.cpp, weight) if has_filter else None
            # Packed by now: its memory goes back before the layers are read.
            del weight
        if self.cache is not None:
            self.cache.add_head(head, argmax_filter)
        self.kept += (head, argmax_filter)
        embedding: Tensor | MappedRows | None = None
        # Blocks for products with integers are in an order from which no row is unpacked.
        if not is_tied or (head.panels is not None and head.bits):
            embedding = self.method.map_kept(self.weights, "embedding") or self.weights["embedding.weight"]
            self.kept.append(embedding)
        trim_heap()
        return head, argmax_filter, embedding

    def _layer(self, layer: LayerConfig, prefix: str) -> LayerStruct:
        table = None if layer.rope is None else self.facts.rope_tables[layer.rope]
        self.kept.append(table)
        block: dict[str, LinearStruct | int] = {}
        if self.config.layer_inputs is not None:
            block["input_gate"] = self._linear(prefix + "layer_input.in").struct()
            block["input_out"] = self._linear(prefix + "layer_input.out").struct()
        if layer.has_dense_block:
            block["gate_up"] = self._linear(prefix + "mlp.in", gated=self.config.gated).struct()
            block["down"] = self._linear(prefix + "mlp.out").struct()
        if layer.moe is not None:
            block["experts"] = ctypes.addressof(self._experts(layer.moe, prefix))
        return LayerStruct(
            **block,
            qkv=self._linear(prefix + "qkv").struct(),
            attention_out=self._linear(prefix + "attention_out").struct(),
            sinks=self._floats(prefix + "sinks"),
            attention_norm=self._norm(prefix + "attention_norm"),
            query_norm=self._norm(prefix + "query_norm"),
            key_norm=self._norm(prefix + "key_norm"),
            value_norm=self._ones(self.config.head_dim_of(layer)) if self.config.value_norm else None,
            mlp_norm=self._norm(prefix + "mlp_norm"),
            post_attention_norm=self._norm(prefix + "post_attention_norm"),
            post_mlp_norm=self._norm(prefix + "post_mlp_norm"),
            post_input_norm=self._norm(prefix + "post_layer_input_norm"),
            attention_norm_bias=self._norm_bias(prefix + "attention_norm"),
            mlp_norm_bias=self._norm_bias(prefix + "mlp_norm"),
            query_norm_bias=self._head_norm_bias(prefix + "query_norm", layer),
            key_norm_bias=self._head_norm_bias(prefix + "key_norm", layer),
            **self._xielu(prefix),
            cos_sin=pointer(table),
            num_kv_heads=self.config.num_kv_heads_of(layer),
            head_dim=self.config.head_dim_of(layer),
            rotary_dim=0 if table is None else table.shape[1],
            sliding_window=layer.sliding_window or 0,
            interleaved=layer.rope is not None and layer.rope.interleaved,
            only_queries=layer.reads_cache_of is not None,
            scale=layer.attention_scale,
            output_scale=1.0 if (scale := self.weights.get(prefix + "scale")) is None else scale.item(),
        )

    def _layer_inputs(self) -> LayerInputsStruct:
        if (inputs := self.config.layer_inputs) is None:
            return LayerInputsStruct()
        name = "layer_inputs.embedding"
        table = self.method.map_kept(self.weights, name) or self.weights[f"{name}.weight"]
        self.kept.append(table)
        scales = layer_input_scales(self.config, inputs, self.weights.dtype)
        return LayerInputsStruct(
            **_table(table),
            projection=self._linear("layer_inputs.projection").struct(),
            norm=self._norm("layer_inputs.norm"),
            size=inputs.size,
            embedding_scale=scales.embedding,
            projection_scale=scales.projection,
            scale=scales.sum,
        )

    def _experts(self, moe: MoeConfig, prefix: str) -> ExpertsStruct:
        names = [f"{prefix}experts.{expert}" for expert in range(moe.num_experts)]
        has_shared, routing = moe.shared_size is not None, moe.routing
        if has_shared:
            names.append(prefix + "shared")
        ins, outs = (
            (LinearStruct * len(names))(
                *(self._linear(f"{name}.{part}", gated=gated, is_expert=True).struct() for name in names)
            )
            for part, gated in (("in", True), ("out", False))
        )
        experts = ExpertsStruct(
            router=self._router(prefix, has_gate=has_shared and moe.has_shared_gate).struct(),
            out=ctypes.addressof(outs),
            correction=self._floats(prefix + "router_correction"),
            scales=self._floats(prefix + "expert_scales"),
            router_norm=self._router_norm(prefix) if moe.is_beside_dense else None,
            norm=self._norm(prefix + "experts_norm"),
            post_norm=self._norm(prefix + "post_experts_norm"),
            post_dense_norm=self._norm(prefix + "post_dense_norm"),
            num_experts=moe.num_experts,
            per_token=moe.experts_per_token,
            is_sigmoid=routing is not None and routing.is_sigmoid,
            is_normalised=moe.normalize,
            has_shared=has_shared,
            has_shared_gate=moe.has_shared_gate,
            share_scale=1.0 if routing is None else routing.scale,
            gate_alpha=moe.gate.alpha if moe.gate else 0.0,
            gate_limit=moe.gate.limit if moe.gate else 0.0,
        )
        setattr(experts, "in", ctypes.addressof(ins))  # a keyword of Python
        self.kept += (ins, outs, experts)
        return experts

    def _router_norm(self, prefix: str) -> int:
        weight = router_norm_weight(self.config, prefix, self.weights).float()
        self.kept.append(weight)
        return weight.data_ptr()

    def _router(self, prefix: str, *, has_gate: bool) -> CppLinear:
        """Pack the router, and the gate of the shared expert as its last output if that has one."""
        read = UNQUANTIZED.read(self.weights, prefix + "router")
        weight, bias = read.weight, read.bias
        if has_gate:
            weight = torch.cat((weight, self.weights[prefix + "shared_gate.weight"]))
            bias = None if bias is None else torch.cat((bias, bias.new_zeros(1)))
        packed = pack_linear(self.cpp, weight, bias)
        self.kept.append(packed)
        return packed

    def _linear(self, name: str, *, gated: bool = False, is_expert: bool = False) -> CppLinear:
        linear = None if self.cache is None else self.cache.linear(name)
        if linear is None:
            linear = self._packed(name, gated=gated, is_expert=is_expert)
            if self.cache is not None:
                self.cache.add(name, linear)
        else:
            self._count_read(name)
        self.kept.append(linear)
        return linear

    def _packed(self, name: str, *, gated: bool, is_expert: bool) -> CppLinear:
        linear = self.method.pack_kept(self.cpp, self.weights, name, gated=gated)
        if linear is None:
            read = self.method.read(self.weights, name)
            # The products of experts do not split float32.
            pack = pack_linear if is_expert else self.method.pack
            linear = pack(self.cpp, read.weight, read.bias, gated=gated)
            del read
        trim_heap()
        return linear

    def _count_read(self, name: str) -> None:
        for part in ("weight", "bias"):
            self.weights.count_read(f"{name}.{part}")

    def _norm(self, name: str) -> int | None:
        return self._floats(f"{name}.weight", self.config.norm.weight_offset)

    def _norm_bias(self, name: str) -> int | None:
        """Return the address of a layer norm's bias, zeros if it has none; None for other norms."""
        if not self.config.norm.centered or self.config.norm.biased:
            return self._floats(f"{name}.bias")
        return self._zeros(self.config.hidden_size)

    def _head_norm_bias(self, name: str, layer: LayerConfig) -> int | None:
        """Return the address of the bias of a layer norm of queries or keys, zeros if it has none; None for others."""
        if not self.config.norm.centered or not self.config.qk_norm:
            return None
        if self.config.qk_norm_bias:
            return self._floats(f"{name}.bias")
        return self._zeros(self.config.head_dim_of(layer))

    def _xielu(self, prefix: str) -> dict[str, float]:
        """Return the learned numbers of a layer's activation, if it has them, as fields of its struct."""
        if self.config.activation != "xielu":
            return {}
        numbers = attrs.asdict(xielu_of(prefix, self.weights))
        return {f"xielu_{name}": number for name, number in numbers.items()}

    def _zeros(self, size: int) -> int:
        zeros = torch.zeros(size)
        self.kept.append(zeros)
        return zeros.data_ptr()

    def _ones(self, size: int) -> int:
        """Return the address of the weights of a norm without any."""
        ones = torch.ones(size)
        self.kept.append(ones)
        return ones.data_ptr()

    def _floats(self, name: str, offset: float = 0.0) -> int | None:
        """Return the address of a vector with `offset` added, float32; None if there is none of that name."""
        stored = self.weights.get(name)
        if stored is None:
            return None
        wide = stored.float() + offset
        self.kept.append(wide)
        return wide.data_ptr()


def _table(rows: Tensor | MappedRows | None) -> dict[str, int | None]:
    """Return the address and the format of an embedding, as fields of a struct."""
    if isinstance(rows, MappedRows):
        return {"embedding": rows.address, "embedding_format": rows.format.number}
    return {"embedding": pointer(rows), "embedding_format": 0}
