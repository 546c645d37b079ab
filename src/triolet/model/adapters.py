"""LoRA adapters of a decoder: their weights by slot, and what they add to the layers of the torch decoder.

A step may have tokens of several adapters and of none. `AdapterBank` reads adapters and puts them into slots; weights
outlive a slot: up to `max_adapters` are kept by digest, so that an adapter that gets a slot again is not read again.
`LayerAdapters.begin` groups the tokens of a step by slot; each adapted layer then computes its plain output for all
tokens, and adds scaling * B (A x) to the tokens of each group. The C++ decoder does the same within its own step
(kernels/cpu/gemm/lora.h).

Source: LoRA, arXiv 2106.09685; DoRA, arXiv 2402.09353; S-LoRA, arXiv 2311.03285.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from triolet.core.request.lora import AdapterModule, AdapterSupport
from triolet.core.step_plan import AdapterStart
from triolet.errors import AdapterError
from triolet.kernels._triton import run_or_reference
from triolet.kernels.lora import AdapterTiles, LowRankPair, LowRankTable, add_low_rank, add_low_rank_triton
from triolet.model.architectures.decoder_config import DecoderConfig
from triolet.model.architectures.tensor_plans import TensorPlan
from triolet.model.architectures.weight_map import parted_heads
from triolet.model.folder.adapter_files import AdapterFiles, AdapterTensor, read_adapter

EMBEDDING, HEAD = "embedding", "head"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def adapter_support(config: DecoderConfig, plans: Mapping[str, TensorPlan], max_rank: int) -> AdapterSupport:
    """Return the modules of a decoder that can be adapted: its projections, embedding and head, but no experts."""
    prefix, names = config.names.prefix, config.module_names or config.names
    known_as = _module_names(config)
    modules: list[AdapterModule] = []
    for layer, plan in plans.items():
        name = layer.removesuffix(".weight")
        is_projection = name.endswith((".qkv", ".attention_out", ".mlp.in", ".mlp.out"))
        if name == layer or not (is_projection or name in (EMBEDDING, HEAD)):
            continue
        start = 0
        for source, shape in plan.sources:
            num_out, num_in = reversed(shape) if plan.transposed else shape
            bare = source.removesuffix(".weight").removeprefix(prefix)
            bare = known_as.get(bare, bare)
            is_embedding = name == EMBEDDING
            if is_embedding:
                num_out, num_in = num_in, num_out  # B A is added to its transpose
                bare = names.embedding  # also where a tied one is stored under the name of the head
            joined = plan.num_joined_heads
            modules.append(AdapterModule(bare, name, start, num_out, num_in, is_embedding, joined))
            start += num_out
    if "head.weight" not in plans:  # tied: a module of its own, with the weights of the embedding
        modules.append(AdapterModule(names.head, HEAD, 0, config.vocab_size, config.hidden_size))
    return AdapterSupport(tuple(modules), names.prefix, max_rank)


def _module_names(config: DecoderConfig) -> dict[str, str]:
    """Return the names of the modules by the names of their tensors, where the two differ."""
    if (theirs := config.module_names) is None:
        return {}
    ours, found = config.names, {config.names.head: theirs.head}
    for layer in range(len(config.layers)):
        pairs = (
            *zip(ours.qkv, theirs.qkv, strict=True),
            (ours.attention_out, theirs.attention_out),
            *zip(ours.mlp_in, theirs.mlp_in, strict=True),
            (ours.mlp_out, theirs.mlp_out),
        )
        before, after = ours.layer.format(layer=layer), theirs.layer.format(layer=layer)
        found |= {before + name: after + module for name, module in pairs}
    return found


LayerPairs = Mapping[str, tuple[LowRankPair, ...]]
"""Pairs of an adapter by layer of the decoder."""

Weights = TypeVar("Weights")


class AdapterBank(Generic[Weights]):
    """Adapters of one model, loaded and in slots.

    Args:
        support: the modules that can be adapted.
        pack: makes of the pairs of an adapter what the decoder computes with.
        max_adapters: most adapters whose weights are kept, without those in slots.
        dtype: of their weights.
        device: where they are.
    """

    def __init__(
        self,
        support: AdapterSupport,
        pack: Callable[[LayerPairs], Weights],
        *,
        max_adapters: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.support, self._pack = support, pack
        self._max_adapters, self.dtype, self.device = max_adapters, dtype, device
        self._layers: dict[str, Callable[[], tuple[Tensor, Tensor | None]]] = {}
        # An adapter may be read in another thread than that of the steps. A step waits for `_reading` only if it needs
        # an adapter that is not there yet.
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._pinned: dict[str, None] = {}
        self._kept: OrderedDict[str, Weights] = OrderedDict()  # by digest, the latest last
        self._slots: dict[int, Weights] = {}
        self._problems: dict[int, str] = {}  # of slots whose adapter could not be loaded

    def add_layer(self, name: str, weights: Callable[[], tuple[Tensor, Tensor | None]]) -> None:
        """Note how to get the weight and the bias of a layer, for the norms of DoRA."""
        self._layers[name] = weights

    def prepare(self, path: str, digest: str) -> Weights:
        """Read an adapter, unless it is kept, and keep it. May be called from any thread.

        Raises:
            AdapterError: it cannot be read, or its files have changed since the digest was computed.
        """
        if (weights := self._find(digest)) is not None:
            return weights
        with self._reading:
            if (weights := self._find(digest)) is not None:
                return weights
            files = read_adapter(Path(path), self.support)
            if files.digest != digest:
                raise AdapterError(path, "has changed since it was loaded; load it again with load_inplace")
            weights = self._pack(self._pairs(files))
            with self._lock:
                self._kept[digest] = weights
                unpinned = [kept for kept in self._kept if kept not in self._pinned]
                for kept in unpinned[: max(0, len(self._kept) - self._max_adapters)]:
                    del self._kept[kept]
            return weights

    def _find(self, digest: str) -> Weights | None:
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
            return self._kept.get(digest)

    def pin(self, digest: str) -> None:
        """Keep an adapter that was prepared for as long as there is room for it."""
        with self._lock:
            self._pinned[digest] = None
            while len(self._pinned) > self._max_adapters:  # of adapters that were removed since
                del self._pinned[next(iter(self._pinned))]

    def place(self, start: AdapterStart) -> None:
        """Put an adapter into a slot; if it cannot be loaded, the rows of the slot fail (`failure`)."""
        self._slots.pop(start.slot, None)
        self._problems.pop(start.slot, None)
        try:
            self._slots[start.slot] = self.prepare(start.path, start.digest)
        except Exception as error:
            # Whatever is wrong with it concerns the requests that name it, not the others of the step.
            problem = str(error) if isinstance(error, AdapterError) else f"{type(error).__name__}: {error}"
            self._problems[start.slot] = f"adapter {start.name!r} could not be loaded: {problem}"

    def failure(self, slot: int) -> str | None:
        """Return why the adapter of a slot could not be loaded; None if it was."""
        return None if slot in self._slots else self._problems.get(slot, "its adapter was not loaded")

    def in_slot(self, slot: int) -> Weights | None:
        """Return the adapter of a slot; None if there is none, or it could not be loaded."""
        return self._slots.get(slot)

    def clear(self) -> None:
        """Forget which adapter is in which slot."""
        self._slots.clear()
        self._problems.clear()

    def _pairs(self, files: AdapterFiles) -> LayerPairs:
        pairs: dict[str, list[LowRankPair]] = {}
        for adapted in files.modules:
            module = adapted.module
            a = self._tensor(files, adapted.a).to(self.device, self.dtype)
            # Scaled in float32: bfloat16 would round twice.
            scaled = self._rows(files, adapted.b, module) * adapted.scaling
            bias = None
            if adapted.bias is not None:
                bias = (self._rows(files, adapted.bias, module) * adapted.scaling).to(self.device, self.dtype)
            magnitude = layer_bias = None
            if adapted.magnitude is not None:
                weight, layer_bias = self._plain(module)
                merged = weight.float() + (scaled @ self._tensor(files, adapted.a).float()).to(weight.device)
                stored = self._rows(files, adapted.magnitude, module).to(weight.device)
                magnitude = (stored / merged.norm(dim=1)).to(self.dtype)
            b = scaled.to(self.device, self.dtype)
            pair = LowRankPair(
                start=module.start, a=a, b=b, bias=bias, magnitude=magnitude, layer_bias=layer_bias
            )
            pairs.setdefault(module.layer, []).append(pair)
        return {layer: tuple(parts) for layer, parts in pairs.items()}

    def _plain(self, module: AdapterModule) -> tuple[Tensor, Tensor | None]:
        weight, bias = self._layers[module.layer]()
        rows = slice(module.start, module.start + module.num_out)
        return weight[rows], None if bias is None else bias[rows]

    def _rows(self, files: AdapterFiles, stored: AdapterTensor, module: AdapterModule) -> Tensor:
        """Return what an adapter has for each output of a module, float32, in the order of the decoder's layer."""
        rows = self._tensor(files, stored).float()
        return parted_heads(rows, module.num_joined_heads) if module.num_joined_heads else rows

    @staticmethod
    def _tensor(files: AdapterFiles, stored: AdapterTensor) -> Tensor:
        return stored_tensor(files.data, stored)


Groups = list[tuple[LayerPairs, "Tensor | None"]]


class LayerAdapters:
    """What the adapters of a step add to the layers of the torch decoder.

    Args:
        bank: holds the adapters.
        all_at_once: adds the pairs of all adapters in two launches of Triton; None = on a GPU.
    """

    def __init__(self, bank: AdapterBank[LayerPairs], *, all_at_once: bool | None = None) -> None:
        self.bank = bank
        self._all_at_once = bank.device.type == "cuda" if all_at_once is None else all_at_once
        self._token_slots: Tensor | None = None
        self._groups: Groups = []
        self._tiles: AdapterTiles | None = None
        # of the adapters of the last step, which are mostly those of the next one
        self._tables: dict[str, LowRankTable | None] = {}
        self._tabled: list[LayerPairs] = []

    def adapted(self, plain: Callable[[Tensor], Tensor], name: str) -> AdaptedLinear:
        """Return a layer that adds what the adapters of a step make of its input.

        Args:
            plain: the layer.
            name: of the layer in the decoder, such as `layers.0.qkv`.
        """
        return AdaptedLinear(plain, self, name)

    def begin(self, token_slots: Tensor | None) -> None:
        """Prepare for the tokens of a step.

        Args:
            token_slots: [num_tokens] int64 on the CPU, the slot of each token, negative for none; None for no adapter.
        """
        self._token_slots = token_slots
        self._groups, self._tiles = [], None
        if token_slots is None:
            return
        split = self._split(token_slots)
        self._groups = self._on_device(split, len(token_slots))
        if split and self._all_at_once:
            self._tiles = AdapterTiles.of([tokens for _, tokens in split], self.bank.device)
            adapters = [pairs for pairs, _ in split]
            if list(map(id, adapters)) != list(map(id, self._tabled)):
                self._tables, self._tabled = {}, adapters

    def _split(self, token_slots: Tensor) -> list[tuple[LayerPairs, Tensor]]:
        # the tokens of each adapter, on the CPU
        return [
            (pairs, (token_slots == slot).nonzero()[:, 0])
            for slot in token_slots.unique().tolist()
            if slot >= 0 and (pairs := self.bank.in_slot(slot)) is not None
        ]

    def _on_device(self, split: list[tuple[LayerPairs, Tensor]], num_tokens: int) -> Groups:
        return [
            (pairs, None if len(tokens) == num_tokens else tokens.to(self.bank.device))
            for pairs, tokens in split
        ]

    def _table(self, layer: str) -> LowRankTable | None:
        if layer not in self._tables:
            self._tables[layer] = LowRankTable.of([pairs.get(layer, ()) for pairs in self._tabled])
        return self._tables[layer]

    def add_to(self, layer: str, y: Tensor, x: Tensor) -> None:
        """Add to the output `y` of a layer what the adapters make of its input `x`."""
        if self._tiles is not None and (table := self._table(layer)) is not None:
            one_by_one = functools.partial(self._add_one_by_one, layer)
            run_or_reference(add_low_rank_triton, one_by_one, y, x, table, self._tiles)
        else:
            self._add_one_by_one(layer, y, x)

    def _add_one_by_one(self, layer: str, y: Tensor, x: Tensor, *_: object) -> None:
        for pairs, tokens in self._groups:
            for pair in pairs.get(layer, ()):
                add_low_rank(y, x, pair, tokens)

    def add_to_logits(self, logits: Tensor, x: Tensor, rows: Tensor) -> None:
        """Add to the output of the head for the tokens `rows` of the step."""
        if self._token_slots is None or not any(HEAD in pairs for pairs, _ in self._groups):
            return
        for pairs, tokens in self._on_device(self._split(self._token_slots[rows.cpu()]), len(rows)):
            for pair in pairs.get(HEAD, ()):
                add_low_rank(logits, x, pair, tokens)

    def add_to_embeddings(self, x: Tensor, token_ids: Tensor) -> None:
        """Add to the embeddings `x` of tokens."""
        for pairs, tokens in self._groups:
            for pair in pairs.get(EMBEDDING, ()):
                columns = pair.a[:, token_ids if tokens is None else token_ids[tokens]]  # [rank, num]
                added = functional.linear(columns.T, pair.b).to(x.dtype)
                if tokens is None:
                    x += added
                else:
                    x.index_add_(0, tokens, added)


def stored_tensor(data: bytes, stored: AdapterTensor) -> Tensor:
    """Return a tensor of a file."""
    own = bytearray(data[stored.begin : stored.end])  # writable, and aligned
    return torch.frombuffer(own, dtype=_DTYPES[stored.dtype]).view(stored.shape)


class AdaptedLinear:
    """Linear layer with what the adapters of a step add to its output.

    Args:
        plain: the layer.
        adapters: what is added.
        name: of the layer in the decoder, such as `layers.0.qkv`.
    """

    __slots__ = ("_adapters", "_name", "_plain")

    def __init__(self, plain: Callable[[Tensor], Tensor], adapters: LayerAdapters, name: str) -> None:
        self._plain, self._adapters, self._name = plain, adapters, name

    def __call__(self, x: Tensor) -> Tensor:
        # [num_tokens, in] -> [num_tokens, out]
        y = self._plain(x)
        self._adapters.add_to(self._name, y, x)
        return y
