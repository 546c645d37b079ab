"""The native decoder on a CPU: a whole step as one call into C++.

Loading makes a plan: every weight packed in the order in which the step reads it, and a struct per layer that says
where. A step is then the addresses of its input tensors and one call, without the interpreter lock; what torch would
spend on starting a dozen operations per layer is gone, and so is every copy between them. What the C++ step does not
know (other activations, float16) stays with `triolet.model.backends.torch_decoder`, which is also the truth that this
one is tested against.

Each weight is read, packed and let go before the next is read: loading needs little more memory than running. A tied
head serves as the embedding too, packed as it is.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from triolet.kernels.cpu.abi import (
    ArgmaxFilterStruct,
    CacheGroupStruct,
    ExpertsStruct,
    LayerStruct,
    LinearStruct,
    ModelStruct,
    MultiStepStruct,
    StepStruct,
    addresses,
)
from triolet.kernels.cpu.attention.paged_attention import DTYPES
from triolet.kernels.cpu.calibration import Calibration, calibrate
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
from triolet.model.backends.decoder_facts import DecoderFacts, decoder_facts
from triolet.model.backends.quant_method import QUANT_METHODS, UNQUANTIZED, QuantMethod
from triolet.model.backends.torch_decoder import rounded_scale
from triolet.model.interface import ForwardBatch, GreedyStep, InputEmbeddings, LayerCache, ModelSpec
from triolet.model.memory.out_of_memory import trim_heap

if TYPE_CHECKING:
    from triolet.kernels.cpu.gemm.lora import CppAdapter
    from triolet.model.adapters import AdapterBank, LayerPairs
    from triolet.model.weights_cache import WeightsCache


@attrs.frozen(eq=False)
class Found:
    """Output arrays of greedy steps, written by C++ while they run.

    Args:
        count: tokens of a step.
        max_logits: [steps, count], the largest logits.
        argmax: [steps, count], the tokens that have them.
        elapsed_s: [steps], seconds.
    """

    count: int
    max_logits: ctypes.Array[ctypes.c_float]
    argmax: ctypes.Array[ctypes.c_int64]
    elapsed_s: ctypes.Array[ctypes.c_float]

    @classmethod
    def of(cls, count: int, num_steps: int = 1) -> Found:
        """Allocate the arrays for `count` tokens of each step."""
        size = count * num_steps
        return cls(
            count, (ctypes.c_float * size)(), (ctypes.c_int64 * size)(), (ctypes.c_float * num_steps)()
        )

    def addresses(self) -> dict[str, int]:
        """Return the addresses for the fields of `StepStruct`."""
        return {"max_logits": ctypes.addressof(self.max_logits), "argmax": ctypes.addressof(self.argmax)}

    def step(self, index: int) -> GreedyStep:
        """Return the result of one step, which must be over."""
        place = slice(index * self.count, (index + 1) * self.count)
        return GreedyStep(self.max_logits[place], self.argmax[place], self.elapsed_s[index])


@attrs.define(eq=False)
class CpuRun:
    """`GreedyRun` of the C++ decoder.

    Args:
        step: with all it points at; read and written to its end.
        run: likewise.
        found: what the two write to.
    """

    _step: StepStruct
    _run: MultiStepStruct
    _found: Found
    _num_told: int = attrs.field(default=0, init=False)

    def steps(self, count: int) -> list[GreedyStep]:
        first, self._num_told = self._num_told, self._num_told + count
        return [self._found.step(index) for index in range(first, self._num_told)]

    @property
    def is_over(self) -> bool:
        return bool(self._run.num_done == -self._num_told)

    def halt(self) -> None:
        self._run.is_halted = 1


# The activations that the C++ step knows, as its struct numbers them.
_GELU = {"silu": 0, "gelu_tanh": 1}


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
    has_experts = any(layer.moe is not None for layer in config.layers)
    return not has_experts and QUANT_METHODS[quantization].accepts(*config.input_widths)


def _has_known_features(config: DecoderConfig) -> bool:
    # The C++ step adds up experts in the residual stream, where no norm can come between.
    takes_experts = config.gated and not config.parallel_block and not config.names.post_mlp_norm

    def knows(layer: LayerConfig) -> bool:
        moe = layer.moe
        # It does not look for the best groups of experts.
        plain = moe is None or (takes_experts and (moe.routing is None or moe.routing.takes_all_groups))
        return plain and layer.latent is None and layer.recurrent is None

    return config.activation in _GELU and not config.attention_gate and all(map(knows, config.layers))


class CpuDecoder:
    """A causal language model over a paged cache; see `triolet.model.interface.CausalModel`.

    Args:
        spec: what it is.
        model: the plan.
        kept: what the plan's addresses point at.
        cpp: the kernels.
        calibration: choices that the plan was given.
        adapters: LoRA adapters that change its layers; None for a model without them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        model: ModelStruct,
        kept: list[object],
        cpp: ctypes.CDLL,
        calibration: Calibration,
        adapters: AdapterBank[CppAdapter] | None = None,
    ) -> None:
        self.calibration = calibration
        self._spec = spec
        self._model = model
        self._kept = kept
        self._cpp = cpp
        self._adapters = adapters
        self._adapter_slots: Tensor | None = None  # of the tokens of the last step
        self._cache: tuple[LayerCache, ...] = ()
        self._cache_addresses = addresses(()), addresses(()), (ctypes.c_int32 * 0)()
        self._background: ctypes.c_void_p | None = None  # not before it is needed: most models do without

    @property
    def spec(self) -> ModelSpec:
        """Description of the model that the engine is built from."""
        return self._spec

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weights, norms and rotary tables."""
        packed = [kept.num_bytes for kept in self._kept if isinstance(kept, CppLinear | CppArgmaxFilter)]
        return sum(packed) + sum(kept.nbytes for kept in self._kept if isinstance(kept, Tensor))

    @property
    def has_blocks(self) -> bool:
        """Tell whether layers are multiplied in the blocks of a quantised checkpoint."""
        return any(isinstance(kept, CppLinear) and kept.panels is not None for kept in self._kept)

    def wake(self) -> None:
        """Wake the threads of the next step, while its input is being built."""
        self._cpp.triolet_wake()

    def forward(self, batch: ForwardBatch) -> Tensor:
        hidden = torch.empty(len(batch.token_ids), self._model.hidden, dtype=self._spec.dtype)
        step = self._step(batch, hidden=hidden.data_ptr())
        # Stop before the output head.
        step.num_logits = 0
        self._cpp.triolet_step(ctypes.byref(self._model), ctypes.byref(step))
        return hidden

    def compute_logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        taken = hidden[rows]
        logits = torch.empty(len(rows), self._spec.vocab_size, dtype=self._spec.dtype)
        step = StepStruct(
            hidden=taken.data_ptr(),
            logits=logits.data_ptr(),
            num_logits=len(rows),
            num_threads=torch.get_num_threads(),
        )
        if self._adapter_slots is not None:
            self._place_adapters(step, self._adapter_slots[rows])
        self._cpp.triolet_head(ctypes.byref(self._model), ctypes.byref(step))
        return logits

    def forward_logits(self, batch: ForwardBatch) -> Tensor:
        logits = torch.empty(len(batch.logits_indices), self._spec.vocab_size, dtype=self._spec.dtype)
        step = self._step(batch, logits=logits.data_ptr())
        self._cpp.triolet_step(ctypes.byref(self._model), ctypes.byref(step))
        return logits

    def forward_greedy(self, batch: ForwardBatch) -> tuple[list[float], list[int]]:
        found = Found.of(len(batch.logits_indices))
        step = self._step(batch, **found.addresses())
        self._cpp.triolet_step(ctypes.byref(self._model), ctypes.byref(step))
        step_done = found.step(0)
        return step_done.max_logits, step_done.token_ids

    def prepare(self) -> None:
        """Wake the threads of the next background step, while its input is being built."""
        self._cpp.triolet_background_wake(self._background_thread())

    def begin_greedy(self, batch: ForwardBatch, *, num_steps: int, done_fd: int) -> CpuRun:
        found = Found.of(len(batch.logits_indices), num_steps)
        step = self._step(batch, **found.addresses())
        run = MultiStepStruct(elapsed_s=ctypes.addressof(found.elapsed_s), num_steps=num_steps)
        self._cpp.triolet_background_run(
            self._background_thread(),
            ctypes.byref(self._model),
            ctypes.byref(step),
            ctypes.byref(run),
            done_fd,
        )
        return CpuRun(step, run, found)

    def _background_thread(self) -> ctypes.c_void_p:
        if self._background is None:
            # ctypes takes results for 32-bit integers, which would cut the address.
            self._cpp.triolet_background_open.restype = ctypes.c_void_p
            self._background = ctypes.c_void_p(self._cpp.triolet_background_open())
            # The thread ends with the model.
            weakref.finalize(self, self._cpp.triolet_background_close, self._background)
        return self._background

    def _step(self, batch: ForwardBatch, **outputs: int) -> StepStruct:
        """Fill in the struct of a batch; its tensors must be contiguous CPU tensors of the dtypes of `ForwardBatch`."""
        attention = batch.attention
        keys, values, group_of_layer = self._addresses_of(batch.cache)
        groups = (CacheGroupStruct * (1 + len(batch.further_attention)))(
            *(
                CacheGroupStruct(one.slot_mapping.data_ptr(), one.block_tables.data_ptr())
                for one in (attention, *batch.further_attention)
            )
        )
        step = StepStruct(
            token_ids=batch.token_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            logits_indices=batch.logits_indices.data_ptr(),
            cu_query_lens=attention.cu_query_lens.data_ptr(),
            seq_lens=attention.seq_lens.data_ptr(),
            groups=ctypes.addressof(groups),
            group_of_layer=ctypes.addressof(group_of_layer),
            keys=ctypes.addressof(keys),
            values=ctypes.addressof(values),
            block_tables_stride=attention.block_tables.stride(0),
            num_groups=len(groups),
            num_tokens=len(batch.token_ids),
            num_seqs=len(attention.query_lens_host),
            num_logits=len(batch.logits_indices),
            block_size=batch.cache[0].keys.shape[1],
            num_threads=torch.get_num_threads(),
            **outputs,
        )
        virtual = None
        if batch.embeddings is not None:
            virtual = _virtual_addresses(batch.embeddings, len(batch.token_ids))
            step.embeddings = ctypes.addressof(virtual)
        # C++ reads them by address: they must live as long as the struct.
        step.kept = batch, keys, values, groups, group_of_layer, virtual
        self._adapter_slots = batch.adapter_slots
        if batch.adapter_slots is not None:
            self._place_adapters(step, batch.adapter_slots)
        return step

    def _place_adapters(self, step: StepStruct, slots: Tensor) -> None:
        """Point a step at the adapters of its rows."""
        assert self._adapters is not None  # no row has a slot otherwise
        used = set(slots.tolist())
        table = (ctypes.c_void_p * (max(used) + 1))()
        adapters = []
        for slot in used:
            if slot >= 0 and (adapter := self._adapters.in_slot(slot)) is not None:
                table[slot] = adapter.address
                adapters.append(adapter)
        step.adapter_slots, step.adapters = slots.data_ptr(), ctypes.addressof(table)
        step.kept += (slots, table, adapters)

    def _addresses_of(
        self, cache: tuple[LayerCache, ...]
    ) -> tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_int32]]:
        """Return the addresses of keys and values of each layer, and its cache group."""
        if cache is not self._cache:  # it is the same one for the life of an engine
            self._cache_addresses = (
                addresses([layer.keys for layer in cache]),
                addresses([layer.values for layer in cache]),
                (ctypes.c_int32 * len(cache))(*(layer.group for layer in cache)),
            )
            self._cache = cache
        return self._cache_addresses


def _virtual_addresses(embeddings: InputEmbeddings, num_tokens: int) -> ctypes.Array[ctypes.c_void_p]:
    """Return the address of each token's own embedding, null for most; valid as long as `embeddings` lives."""
    virtual = (ctypes.c_void_p * num_tokens)()
    for token, value in zip(embeddings.tokens.tolist(), embeddings.values, strict=True):
        virtual[token] = value.data_ptr()
    return virtual


# ------------------------------------------------------------------------------- building from weights


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
    return CpuDecoder(facts.spec, model, planner.kept, cpp, chosen, adapters)


def adapter_packing(config: DecoderConfig) -> Callable[[LayerPairs], CppAdapter]:
    """Return the function that packs adapters of a model that `can_plan` accepts."""
    # imported here because most engines have no adapters
    from triolet.kernels.cpu.gemm.lora import AdaptedShape, pack_adapter

    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    mlp_in = config.intermediate_size * (2 if config.gated else 1)
    layers = [
        shape
        for index in range(len(config.layers))
        for shape in (
            AdaptedShape(f"layers.{index}.qkv", qkv),
            AdaptedShape(f"layers.{index}.attention_out", config.hidden_size),
            AdaptedShape(f"layers.{index}.mlp.in", mlp_in, gated=config.gated),
            AdaptedShape(f"layers.{index}.mlp.out", config.hidden_size),
        )
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
        positions = self.weights.get("positions.weight")
        self.kept += (layers, positions, self.facts.query_factors)
        return ModelStruct(
            layers=ctypes.addressof(layers),
            embedding=embedding.address if isinstance(embedding, MappedRows) else pointer(embedding),
            embedding_format=embedding.format.number if isinstance(embedding, MappedRows) else 0,
            learned_positions=pointer(positions),
            query_factors=pointer(self.facts.query_factors),
            final_norm=self._norm("final_norm"),
            final_norm_bias=self._norm_bias("final_norm"),
            head=head.struct(),
            argmax_filter=argmax_filter.struct() if argmax_filter else ArgmaxFilterStruct(),
            num_layers=len(config.layers),
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=DTYPES[self.weights.dtype],
            gelu=_GELU[config.activation],
            norms_rows=config.qk_norm_of_rows,
            parallel=config.parallel_block,
            eps=config.norm.eps,
            attention_soft_cap=config.attention_soft_cap or 0.0,
            logit_soft_cap=config.logit_soft_cap or 0.0,
            embedding_scale=rounded_scale(config.embedding_scale, self.weights.dtype) or 1.0,
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
        elif (head := self.method.pack_kept(self.cpp, self.weights, name)) is None:
            weight = self.weights[f"{name}.weight"]
            head = self.method.pack_head(self.cpp, weight)
            # The filter's bounds are of logits without a cap.
            has_filter = head.bits == 0 and self.config.logit_soft_cap is None
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
        block: dict[str, LinearStruct | int]
        if layer.moe is None:
            block = {
                "gate_up": self._linear(prefix + "mlp.in", gated=self.config.gated).struct(),
                "down": self._linear(prefix + "mlp.out").struct(),
            }
        else:
            block = {"experts": ctypes.addressof(self._experts(layer.moe, prefix))}
        return LayerStruct(
            **block,
            qkv=self._linear(prefix + "qkv").struct(),
            attention_out=self._linear(prefix + "attention_out").struct(),
            sinks=self._floats(prefix + "sinks"),
            attention_norm=self._norm(prefix + "attention_norm"),
            query_norm=self._norm(prefix + "query_norm"),
            key_norm=self._norm(prefix + "key_norm"),
            mlp_norm=self._norm(prefix + "mlp_norm"),
            post_attention_norm=self._norm(prefix + "post_attention_norm"),
            post_mlp_norm=self._norm(prefix + "post_mlp_norm"),
            attention_norm_bias=self._norm_bias(prefix + "attention_norm"),
            mlp_norm_bias=self._norm_bias(prefix + "mlp_norm"),
            cos_sin=pointer(table),
            rotary_dim=0 if table is None else table.shape[1],
            sliding_window=layer.sliding_window or 0,
            interleaved=layer.rope is not None and layer.rope.interleaved,
            scale=layer.attention_scale,
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
        # The products of experts know plain weights only.
        kept = None
        if not is_expert:
            kept = self.method.pack_kept(self.cpp, self.weights, name, gated=gated)
        if kept is not None:
            linear = kept
        else:
            read = self.method.read(self.weights, name)
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
        zeros = torch.zeros(self.config.hidden_size)
        self.kept.append(zeros)
        return zeros.data_ptr()

    def _floats(self, name: str, offset: float = 0.0) -> int | None:
        """Return the address of a vector with `offset` added, float32; None if there is none of that name."""
        stored = self.weights.get(name)
        if stored is None:
            return None
        wide = stored.float() + offset
        self.kept.append(wide)
        return wide.data_ptr()
