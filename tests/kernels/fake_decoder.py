"""Decoders on a CUDA device that is not there: their launches are recorded, and compiled for GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from triolet.kernels._triton import KernelVariant, record_launches
from triolet.kernels.linear.weight_only import PackedWeight
from triolet.model.architectures.families import parse_decoder_config
from triolet.model.architectures.kv_format import KvFormat
from triolet.model.architectures.weight_map import plan_tensors
from triolet.model.backends.layers.warm_up import compute_warm_up_steps
from triolet.model.backends.torch_decoder import Decoder
from triolet.model.backends.torch_loading import build_decoder
from triolet.model.cuda.steps import DeviceSteps
from triolet.model.input_batch import RowTable
from triolet.model.memory.kv_cache import allocate_kv_cache

CUDA = torch.device("cuda")
BLOCK_SIZE = 16
BASE = {
    "num_hidden_layers": 1, "vocab_size": 512, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **BASE, "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
    "llama-8b": {
        **BASE, "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "qwen3-moe-30b": {
        **BASE, "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "qwen2-0.5b": {
        **BASE, "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 4864,
        "num_attention_heads": 14, "num_key_value_heads": 2,
    },
}  # fmt: skip


class FakeWeights:
    """Weights without memory; with `packs`, those of linear layers are words of GPTQ."""

    def __init__(self, config: Any, dtype: torch.dtype, *, packs: bool) -> None:
        self._plans, self._packs = plan_tensors(config, ()), packs
        self.dtype, self.device = dtype, CUDA

    def __contains__(self, name: str) -> bool:
        return name in self._plans

    def get(self, name: str) -> Tensor | None:
        return self[name] if name in self else None  # noqa: SIM401

    def __getitem__(self, name: str) -> Tensor:
        shapes = [shape for _, shape in self._plans[name].sources]
        return torch.empty(sum(shape[0] for shape in shapes), *shapes[0][1:], dtype=self.dtype, device=CUDA)

    def read_packed(self, name: str) -> list[PackedWeight] | None:
        if not self._packs:
            return None
        weights = []
        for _, (num_out, num_in) in self._plans[name].sources:
            words = torch.empty(num_in // 8, num_out, dtype=torch.int32, device=CUDA)
            zeros = torch.empty(num_in // 128, num_out // 8, dtype=torch.int32, device=CUDA)
            scales = torch.empty(num_in // 128, num_out, dtype=torch.float16, device=CUDA)
            weights.append(
                PackedWeight(
                    bits=4,
                    num_in=num_in,
                    num_out=num_out,
                    group_size=128,
                    words=words,
                    zeros=zeros,
                    scales=scales,
                    stored_minus_one=True,
                )
            )
        return weights


def _fake_rope_table(rope: Any, num_positions: int, device: torch.device) -> Tensor:
    return torch.empty(num_positions, rope.rotary_dim, device=device)


class _WithoutDevice(TorchFunctionMode):
    """Index and copy tensors by operators: torch's own ways set the current device, which is not there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            return torch.ops.aten.copy_.default(*args)
        if func is not Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        tensor, place = args
        if isinstance(place, Tensor):
            return torch.ops.aten.index.Tensor(tensor, [place])
        if isinstance(place, int):
            return tensor.select(0, place)
        first, end, _ = place.indices(len(tensor))
        return tensor.narrow(0, first, end - first)


@contextmanager
def fake_decoder(
    model: str, dtype: torch.dtype, *, packs: bool = False, kv_dtype: torch.dtype | None = None
) -> Iterator[Decoder]:
    """Give a decoder whose tensors have no memory, and with it the mode in which it computes."""
    config = parse_decoder_config(MODELS[model], Path("config.json"), max_model_len=None)
    table = mock.patch("triolet.model.backends.decoder_facts.rope_table", _fake_rope_table)
    with table, FakeTensorMode(), _WithoutDevice():
        kv_format = None if kv_dtype is None else KvFormat(dtype=kv_dtype)
        weights: Any = FakeWeights(config, dtype, packs=packs)
        yield build_decoder(config, weights, kv_format=kv_format)


class _FakeDevice:
    """A `StepDevice` whose pinned memory is the host's, and which only allocates."""

    device = CUDA

    def pinned(self, num_words: int) -> Tensor:
        return torch.empty(num_words, dtype=torch.int32)

    def mark(self) -> Any:
        raise NotImplementedError

    def capture(self, work: Any) -> Any:
        raise NotImplementedError


def fake_steps(decoder: Decoder) -> DeviceSteps:
    """Return steps of a decoder, of 128 rows at most."""
    cache = allocate_kv_cache(decoder.spec, num_blocks=9, block_size=BLOCK_SIZE, device=CUDA)
    table = RowTable(
        num_blocks=8, block_size=BLOCK_SIZE, max_num_seqs=128, max_model_len=decoder.spec.max_position,
        vocab_size=decoder.spec.vocab_size, device=torch.device("cpu"),
    )  # fmt: skip
    return DeviceSteps(
        decoder, cache, table, block_size=BLOCK_SIZE, max_num_seqs=128,
        max_model_len=decoder.spec.max_position, max_num_tokens=2048, device=_FakeDevice(),
    )  # fmt: skip


def record_warm_up(decoder: Decoder, steps: DeviceSteps) -> dict[KernelVariant, None]:
    """Return what the warm-up launches, which is what a load does before it captures graphs."""
    with record_launches() as variants:
        compute_warm_up_steps(decoder, CUDA, BLOCK_SIZE, decoder.tile_lengths)
        steps.warm_up()
    return variants


def warm_up_list(
    model: str, dtype: torch.dtype, *, packs: bool = False, kv_dtype: torch.dtype | None = None
) -> list[KernelVariant]:
    """Return what the steps of the warm-up launch."""
    with fake_decoder(model, dtype, packs=packs, kv_dtype=kv_dtype) as decoder:
        return list(record_warm_up(decoder, fake_steps(decoder)))


def compile_and_report(model: str, dtype: str, arch: int, options: str = "") -> None:
    """Compile a warm-up list, and print a line of facts for each binary.

    Args:
        options: `packs` for packed weights, or the dtype of a KV cache in float8.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    kv_dtype = getattr(torch, options) if options.startswith("float8") else None
    for variant in warm_up_list(model, getattr(torch, dtype), packs=options == "packs", kv_dtype=kv_dtype):
        compiled = variant.compile(GPUTarget("cuda", arch, 32))
        with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
            file.write(compiled.asm["cubin"])
        used = _output(tool, "-res-usage", file.name)
        code = _output(tool, "-sass", file.name)
        os.unlink(file.name)
        registers = re.search(r"REG:(\d+)", used)
        assert registers is not None, used
        threads = 32 * variant.num_warps
        by_registers = 65536 // (-(-int(registers[1]) // 8) * 8 * threads)
        by_memory = (164 if arch == 80 else 228) * 1024 // (compiled.metadata.shared + 1024)
        constants = dict(variant.constants)
        part = {True: "decode", False: "prefill", None: "other"}[constants.get("FEW")]
        local = len(re.findall(r"\b(LDL|STL)\b", code))
        tensor_cores = compiled.asm["ptx"].count("wgmma.mma_async")
        print(variant.kernel.name, part, local, tensor_cores, min(by_registers, by_memory))


def _output(tool: Path, option: str, file: str) -> str:
    done = subprocess.run([str(tool), option, file], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
