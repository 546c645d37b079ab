"""LoRA adapters in the torch decoder: their weights by slot, and what they add to the layers of a step.

A step may have tokens of several adapters and of none. `AdapterBank.begin` groups the tokens by slot; each adapted
layer then computes its plain output for all tokens, and adds scaling * B (A x) to the tokens of each group. The scaling
is folded into B. A layer that joins several modules of the checkpoint (q, k and v) has a pair for each of them, which
adds to that module's range of the output. Weights outlive a slot: up to `max_adapters` are kept by digest, so that an
adapter that gets a slot again is not read again.

Source: LoRA, arXiv 2106.09685; DoRA, arXiv 2402.09353; S-LoRA, arXiv 2311.03285.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from triolet.core.request.lora import AdapterModule, AdapterSupport
from triolet.core.step_plan import AdapterStart
from triolet.errors import AdapterError
from triolet.model.architectures.decoder_config import DecoderConfig
from triolet.model.architectures.weight_map import TensorPlan
from triolet.model.folder.adapter_files import AdapterFiles, AdapterTensor, read_adapter

EMBEDDING, HEAD = "embedding", "head"
NO_SLOT = -1
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def adapter_support(config: DecoderConfig, plans: Mapping[str, TensorPlan], max_rank: int) -> AdapterSupport:
    """Return the modules of a decoder that can be adapted: its projections, embedding and head, but no experts."""
    prefix, names = config.names.prefix, config.names
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
            is_embedding = name == EMBEDDING
            if is_embedding:
                num_out, num_in = num_in, num_out  # B A is added to its transpose
                bare = names.embedding  # also where a tied one is stored under the name of the head
            modules.append(AdapterModule(bare, name, start, num_out, num_in, is_embedding))
            start += num_out
    if "head.weight" not in plans:  # tied: a module of its own, with the weights of the embedding
        modules.append(AdapterModule(names.head, HEAD, 0, config.vocab_size, config.hidden_size))
    return AdapterSupport(tuple(modules), prefix, max_rank)


@attrs.frozen(eq=False)
class _Pair:
    """A and B of one module."""

    start: int  # first of its outputs in the layer
    a: Tensor  # [rank, num_in]
    b: Tensor  # [num_out, rank], with the scaling
    bias: Tensor | None  # [num_out], with the scaling
    # DoRA: the plain output, without the bias of the layer, and that of the pair are multiplied by it; [num_out].
    magnitude: Tensor | None
    layer_bias: Tensor | None  # [num_out], where there is a magnitude

    def add_to(self, y: Tensor, x: Tensor, tokens: Tensor | None) -> None:
        """Add to the output `y` of a layer, in place; `tokens` are those of the adapter, None for all."""
        x = x if tokens is None else x[tokens]
        added = functional.linear(functional.linear(x.to(self.a.dtype), self.a), self.b, self.bias)
        part = y[:, self.start : self.start + len(self.b)]
        if self.magnitude is not None:
            plain = part if tokens is None else part[tokens]
            if self.layer_bias is not None:
                plain = plain - self.layer_bias
            added = added * self.magnitude + plain * (self.magnitude - 1)
        if tokens is None:
            part += added.to(y.dtype)
        else:
            part.index_add_(0, tokens, added.to(y.dtype))


@attrs.frozen(eq=False)
class AdapterWeights:
    """Weights of one adapter, by layer of the decoder."""

    pairs: Mapping[str, tuple[_Pair, ...]]


Groups = list[tuple[AdapterWeights, "Tensor | None"]]


class AdapterBank:
    """Adapters of one model.

    Args:
        support: the modules that can be adapted.
        max_adapters: most adapters whose weights are kept, without those in slots.
        dtype: of their weights.
        device: where they are.
    """

    def __init__(
        self, support: AdapterSupport, *, max_adapters: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.support = support
        self._max_adapters, self._dtype, self._device = max_adapters, dtype, device
        self._layers: dict[str, Callable[[], tuple[Tensor, Tensor | None]]] = {}
        # An adapter may be read in another thread than that of the steps. A step waits for `_reading` only if it needs
        # an adapter that is not there yet.
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._pinned: dict[str, None] = {}
        self._kept: OrderedDict[str, AdapterWeights] = OrderedDict()  # by digest, the latest last
        self._slots: dict[int, AdapterWeights | str] = {}  # the problem of one that could not be loaded
        self._token_slots: Tensor | None = None
        self._groups: Groups = []

    def add_layer(self, name: str, weights: Callable[[], tuple[Tensor, Tensor | None]]) -> None:
        """Note how to get the weight and the bias of a layer, for the norms of DoRA."""
        self._layers[name] = weights

    def adapted(self, plain: Callable[[Tensor], Tensor], name: str) -> AdaptedLinear:
        """Return a layer that adds what the adapters of a step make of its input.

        Args:
            plain: the layer.
            name: of the layer in the decoder, such as `layers.0.qkv`.
        """
        return AdaptedLinear(plain, self, name)

    # ---------------------------------------------------------------------------------------- loading

    def prepare(self, path: str, digest: str) -> AdapterWeights:
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
            weights = self._weights(files)
            with self._lock:
                self._kept[digest] = weights
                unpinned = [kept for kept in self._kept if kept not in self._pinned]
                for kept in unpinned[: max(0, len(self._kept) - self._max_adapters)]:
                    del self._kept[kept]
            return weights

    def _find(self, digest: str) -> AdapterWeights | None:
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
        try:
            self._slots[start.slot] = self.prepare(start.path, start.digest)
        except Exception as error:
            # Whatever is wrong with it concerns the requests that name it, not the others of the step.
            problem = str(error) if isinstance(error, AdapterError) else f"{type(error).__name__}: {error}"
            self._slots[start.slot] = f"adapter {start.name!r} could not be loaded: {problem}"

    def failure(self, slot: int) -> str | None:
        """Return why the adapter of a slot could not be loaded; None if it was."""
        held = self._slots.get(slot, "its adapter was not loaded")
        return held if isinstance(held, str) else None

    def clear(self) -> None:
        """Forget which adapter is in which slot."""
        self._slots.clear()

    def _weights(self, files: AdapterFiles) -> AdapterWeights:
        pairs: dict[str, list[_Pair]] = {}
        for adapted in files.modules:
            module = adapted.module
            a = self._tensor(files, adapted.a).to(self._device, self._dtype)
            # Scaled in float32: bfloat16 would round twice.
            scaled = self._tensor(files, adapted.b).float() * adapted.scaling
            bias = None
            if adapted.bias is not None:
                bias = (self._tensor(files, adapted.bias).float() * adapted.scaling).to(
                    self._device, self._dtype
                )
            magnitude = layer_bias = None
            if adapted.magnitude is not None:
                weight, layer_bias = self._plain(module)
                merged = weight.float() + (scaled @ self._tensor(files, adapted.a).float()).to(weight.device)
                stored = self._tensor(files, adapted.magnitude).float().to(weight.device)
                magnitude = (stored / merged.norm(dim=1)).to(self._dtype)
            b = scaled.to(self._device, self._dtype)
            pairs.setdefault(module.layer, []).append(_Pair(module.start, a, b, bias, magnitude, layer_bias))
        return AdapterWeights({layer: tuple(parts) for layer, parts in pairs.items()})

    def _plain(self, module: AdapterModule) -> tuple[Tensor, Tensor | None]:
        weight, bias = self._layers[module.layer]()
        rows = slice(module.start, module.start + module.num_out)
        return weight[rows], None if bias is None else bias[rows]

    @staticmethod
    def _tensor(files: AdapterFiles, stored: AdapterTensor) -> Tensor:
        data = bytearray(files.data[stored.begin : stored.end])  # writable, and aligned
        return torch.frombuffer(data, dtype=_DTYPES[stored.dtype]).view(stored.shape)

    # ------------------------------------------------------------------------------------------ steps

    def begin(self, token_slots: Tensor | None) -> None:
        """Prepare for the tokens of a step.

        Args:
            token_slots: [num_tokens] int64 on the CPU, the slot of each token, negative for none; None for no adapter.
        """
        self._token_slots = token_slots
        self._groups = [] if token_slots is None else self._grouped(token_slots)

    def _grouped(self, token_slots: Tensor) -> Groups:
        groups: Groups = []
        for slot in token_slots.unique().tolist():
            if slot >= 0 and isinstance(weights := self._slots.get(slot), AdapterWeights):
                tokens = (token_slots == slot).nonzero()[:, 0]
                groups.append((weights, None if len(tokens) == len(token_slots) else tokens.to(self._device)))
        return groups

    def add_to(self, layer: str, y: Tensor, x: Tensor) -> None:
        """Add to the output `y` of a layer what the adapters make of its input `x`."""
        for weights, tokens in self._groups:
            for pair in weights.pairs.get(layer, ()):
                pair.add_to(y, x, tokens)

    def add_to_logits(self, logits: Tensor, x: Tensor, rows: Tensor) -> None:
        """Add to the output of the head for the tokens `rows` of the step."""
        if self._token_slots is None or not any(HEAD in weights.pairs for weights, _ in self._groups):
            return
        for weights, tokens in self._grouped(self._token_slots[rows.cpu()]):
            for pair in weights.pairs.get(HEAD, ()):
                pair.add_to(logits, x, tokens)

    def add_to_embeddings(self, x: Tensor, token_ids: Tensor) -> None:
        """Add to the embeddings `x` of tokens."""
        for weights, tokens in self._groups:
            for pair in weights.pairs.get(EMBEDDING, ()):
                columns = pair.a[:, token_ids if tokens is None else token_ids[tokens]]  # [rank, num]
                added = functional.linear(columns.T, pair.b).to(x.dtype)
                if tokens is None:
                    x += added
                else:
                    x.index_add_(0, tokens, added)


class AdaptedLinear:
    """Linear layer with what the adapters of a step add to its output.

    Args:
        plain: the layer.
        bank: holds the adapters.
        name: of the layer in the decoder, such as `layers.0.qkv`.
    """

    __slots__ = ("_bank", "_name", "_plain")

    def __init__(self, plain: Callable[[Tensor], Tensor], bank: AdapterBank, name: str) -> None:
        self._plain, self._bank, self._name = plain, bank, name

    def __call__(self, x: Tensor) -> Tensor:
        # [num_tokens, in] -> [num_tokens, out]
        y = self._plain(x)
        self._bank.add_to(self._name, y, x)
        return y
