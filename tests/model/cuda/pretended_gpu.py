"""A pretended GPU: tensors that lie in main memory and say that they are on `cuda:0`.

What would be a copy between host and device is counted, and so is what the host would wait for; mixing the two is an
error, as it is on a GPU. Kernels of ours run as their references in torch. A graph repeats all operators and kernels
that were launched while it was captured, on the same tensors and with the same numbers of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import attrs
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from triolet.kernels import kv_write, paged_attention, qkv_prepare, rms_norm, rotary, silu_mul
from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.kernels.linear import grouped
from triolet.kernels.step import edits, inputs, logprobs, results, writes
from triolet.model.backends.layers.linear import Linear, PackedLinear
from triolet.model.cuda.step_device import Graph, Mark
from triolet.model.sampling import random_draw

# Without it torch refuses to look at a tensor that says that it is on a GPU.
torch._C._ensureCUDADeviceGuardSet()

READS = {"tolist", "numpy", "item", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__"}
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "is_nonzero", "equal", "unique"}


@attrs.define
class Traffic:
    """What the host had to do with the device."""

    copies_in: list[int] = attrs.field(factory=list)  # bytes of each
    copies_out: list[int] = attrs.field(factory=list)
    waits: list[str] = attrs.field(factory=list)
    num_replays: int = 0
    num_launches: int = 0

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]


TRAFFIC = Traffic()


class GpuTensor(Tensor):
    """A tensor on the pretended GPU."""

    on_host: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Self:
        made: Self = Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            layout=inner.layout, device=torch.device("cuda", 0), requires_grad=False,
        )  # fmt: skip
        made.on_host = inner
        return made

    def __init__(self, inner: Tensor) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS:
            note_read(func.__name__)
            return getattr(args[0].on_host, func.__name__)(*args[1:])
        if func is Tensor.__getitem__:  # torch's own would set the device
            with torch._C.DisableTorchFunctionSubclass():
                return item_of(*args)
        if func is Tensor.copy_ and isinstance(args[0], GpuTensor) != isinstance(args[1], GpuTensor):
            note_copy(args[0], args[1], is_waited_for=not (kwargs or {}).get("non_blocking", False))
            unwrapped(args[0]).copy_(unwrapped(args[1]))
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if name in WAITING:
            note_read(name)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if any(each.dim() and not isinstance(each, GpuTensor) for each in tensors):
            raise AssertionError(f"{name} mixes tensors of host and device")
        if name.startswith("index") and any(each.dtype == torch.bool for each in tensors[1:]):
            note_read(f"{name} by a mask")
        plain_args, plain_kwargs = tree_map(unwrapped, (args, kwargs))
        if "device" in plain_kwargs:
            plain_kwargs["device"] = torch.device("cpu")
        result = func(*plain_args, **plain_kwargs)
        if not func.is_view:
            TRAFFIC.num_launches += 1
        record(func, plain_args, plain_kwargs, result)
        if name.endswith("_") and isinstance(args[0], GpuTensor):
            return args[0]
        return tree_map(wrapped, result)


def item_of(tensor: Tensor, place: Any) -> Tensor:
    if isinstance(place, Tensor):
        found: Tensor = torch.ops.aten.index.Tensor(tensor, [place])
        return found
    assert all(isinstance(each, slice | int) for each in (place if isinstance(place, tuple) else [place]))
    return GpuTensor(unwrapped(tensor)[place])


def unwrapped(x: Any) -> Any:
    return x.on_host if isinstance(x, GpuTensor) else x


def wrapped(x: Any) -> Any:
    return GpuTensor(x) if isinstance(x, Tensor) and not isinstance(x, GpuTensor) else x


def note_read(what: str) -> None:
    if _recording:
        raise AssertionError(f"{what} while a graph is captured")
    TRAFFIC.waits.append(what)


def note_copy(target: Tensor, source: Tensor, *, is_waited_for: bool) -> None:
    assert not _recording, "a copy from or to the host while a graph is captured"
    copies = TRAFFIC.copies_in if isinstance(target, GpuTensor) else TRAFFIC.copies_out
    copies.append(target.numel() * target.element_size())
    if is_waited_for:
        TRAFFIC.waits.append("copy")


# ----------------------------------------------------------------------------------------------------- graphs

Launch = tuple[Callable[..., Any], Any, dict[str, Any], Any]
_recording: list[list[Launch]] = []


def record(function: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any) -> None:
    if _recording:
        _recording[-1].append((function, args, kwargs, result))


class PretendedGpu:
    """A `StepDevice`; what it allocates goes to the GPU with `to_gpu`."""

    device = torch.device("cpu")

    def pinned(self, num_words: int) -> Tensor:
        return torch.zeros(num_words, dtype=torch.int32)

    def mark(self) -> Mark:
        return _Event()

    def capture(self, work: Callable[[], None]) -> Graph:
        work()
        launches: list[Launch] = []
        _recording.append(launches)
        try:
            work()
        finally:
            _recording.pop()
        return _PretendedGraph(launches)


class _Event:
    def wait(self) -> None:
        TRAFFIC.waits.append("event")


class _PretendedGraph:
    def __init__(self, launches: list[Launch]) -> None:
        self._launches = launches

    def replay(self) -> None:
        TRAFFIC.num_replays += 1
        for function, args, kwargs, result in self._launches:
            again = function(*args, **kwargs)
            for old, new in zip(tensors_of(result), tensors_of(again), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


def tensors_of(result: Any) -> list[Tensor]:
    if attrs.has(type(result)):
        result = attrs.asdict(result, recurse=False)
    return [each for each in tree_leaves(result) if isinstance(each, Tensor)]


# ----------------------------------------------------------------------------------------------------- kernels


def attention_in_torch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Attention that has all lengths from tensors, as a kernel has them."""
    assert sliding_window is None
    assert soft_cap is None
    assert sinks is None
    ends = metadata.cu_query_lens[1:].long()
    token = torch.arange(len(query))
    sequence = torch.searchsorted(ends, token, right=True).clamp(max=len(ends) - 1)
    position = metadata.seq_lens[sequence] - (ends[sequence] - token)
    k, v = (
        (cache.float() * scale_of_cache)[metadata.block_tables.long()].flatten(1, 2)[sequence]
        for cache, scale_of_cache in ((keys, key_scale), (values, value_scale))
    )
    group = query.shape[1] // keys.shape[2]
    k, v = (each.repeat_interleave(group, dim=2) for each in (k, v))
    scores = torch.einsum("thd,tkhd->thk", query, k) * scale
    hidden = torch.arange(k.shape[1]) > position[:, None]
    weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
    return torch.einsum("thk,tkhd->thd", weights, v.nan_to_num())


def gate(gate_up: Tensor, *, gelu: bool) -> Tensor:
    return (silu_mul.gelu_tanh_mul_reference if gelu else silu_mul.silu_mul_reference)(gate_up)


def norm(x: Tensor, weight: Tensor, eps: float, **options: Any) -> Any:
    return rms_norm.rms_norm_reference(x, weight, eps, **options)


KERNELS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (kv_write, "kv_write_triton", kv_write.kv_write_reference),
    (paged_attention, "paged_attention_triton", attention_in_torch),
    (qkv_prepare, "qkv_prepare_triton", qkv_prepare.qkv_prepare_reference),
    (rms_norm, "rms_norm_triton", norm),
    (rotary, "rotary_triton", rotary.rotary_reference),
    (silu_mul, "_gate_mul_triton", gate),
    (grouped, "grouped_linear_triton", grouped.grouped_linear_reference),
    (writes, "apply_writes_triton", writes.apply_writes_reference),
    (inputs, "make_inputs_triton", inputs.make_inputs_reference),
    (edits, "edit_logits_triton", edits.edit_logits_reference),
    (results, "note_results_triton", results.note_results_reference),
    (logprobs, "note_logprobs_triton", logprobs.note_logprobs_reference),
    (random_draw, "draw_on_gpu", random_draw.draw_columns_in_torch),
)


def launched(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Run a kernel's reference as a launch: what it reads, no host waits for."""

    def launch(*args: Any, **kwargs: Any) -> Any:
        plain = [moved(each, unwrapped) for each in args]
        plain_kwargs = {name: moved(each, unwrapped) for name, each in kwargs.items()}
        result = reference(*plain, **plain_kwargs)
        TRAFFIC.num_launches += 1
        record(reference, plain, plain_kwargs, result)
        return moved(result, wrapped)

    return launch


def moved(value: Any, move: Callable[[Any], Any]) -> Any:
    """Move a value with all tensors in it, which may be fields of ours."""
    if isinstance(value, PackedLinear) and move is wrapped:
        return moved(Linear(*value.stored()), move)
    if attrs.has(type(value)):
        fields = [field for field in attrs.fields(type(value)) if field.init]
        return type(value)(**{field.name: moved(getattr(value, field.name), move) for field in fields})
    if isinstance(value, tuple | list):
        return type(value)(moved(each, move) for each in value)
    return move(value)


@contextmanager
def kernels_of_the_gpu() -> Iterator[None]:
    """Put the launches in the places of the Triton kernels."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, reference in KERNELS:
            patch.setattr(module, name, launched(reference))
        yield
