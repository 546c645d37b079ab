"""Triton is imported when a kernel is first launched, and nowhere else."""

from __future__ import annotations

import os

import pytest

from tests.kernels.dummy_driver import run_python

CPU_STEP = """
import sys
{prelude}
import torch
from triolet.kernels.kv_write import kv_write
from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.kernels.paged_attention import paged_attention
from triolet.kernels.rms_norm import rms_norm
from triolet.kernels.rotary import rotary
from triolet.kernels.silu_mul import gelu_tanh_mul, silu_mul

heads, cache, one = torch.ones(1, 1, 8), torch.zeros(1, 4, 1, 8), torch.tensor([1], dtype=torch.int32)
metadata = AttentionMetadata(
    cu_query_lens=torch.tensor([0, 1], dtype=torch.int32), seq_lens=one, block_tables=torch.zeros(1, 1).int(),
    slot_mapping=torch.tensor([0]), query_lens_host=(1,), seq_lens_host=(1,),
)
rotary(heads, heads.clone(), torch.zeros(4, 8), torch.tensor([0]))
kv_write(torch.ones(1, 1, 8), cache, metadata.slot_mapping)
out = paged_attention(heads, cache, cache, metadata, scale=1.0).flatten(1)
rms_norm(out, out[0], 1e-6), silu_mul(out), gelu_tanh_mul(out)
assert out.eq(1).all()
print("triton" in sys.modules)
"""


@pytest.mark.slow
def test_a_step_on_the_cpu_does_not_import_triton() -> None:
    assert run_python(CPU_STEP.format(prelude="")) == "False"


@pytest.mark.slow
def test_a_step_on_the_cpu_works_where_triton_is_not_installed() -> None:
    assert run_python(CPU_STEP.format(prelude="sys.modules['triton'] = None")) == "True"  # the bar itself


COMPILE = """
import itertools

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from triolet.kernels import kv_write, paged_attention, random_draw, rms_norm, rotary, silu_mul
from triolet.kernels.linear import scaled

FLOATS = {"scale", "key_scale", "value_scale", "soft_cap", "eps", "weight_offset"}
WIDE = {"codes_ptr": "*u8", "scales_ptr": "*fp32",
        "slot_mapping_ptr": "*i64", "positions_ptr": "*i64", "cos_sin_ptr": "*fp32", "partial_ptr": "*fp32",
        "max_ptr": "*fp32", "sum_ptr": "*fp32", "seq_lens_ptr": "*i32", "block_tables_ptr": "*i32",
        "cu_query_lens_ptr": "*i32", "top_k_ptr": "*i64", "top_p_ptr": "*fp64", "thresholds_ptr": "*i32",
        "last_ids_ptr": "*i32", "answers_ptr": "*i64", "ids_ptr": "*i32", "bits_ptr": "*i64", "tokens_ptr": "*i64"}

# What a launch for a model of 32 heads hands over. Triton compiles another binary for pointers and integers that are
# multiples of 16, with wider loads and more shared memory, and that is the one which runs.
VALUES = {"num_seqs": 8, "segment_tokens": 512, "split_queries": 1, "num_segments": 64, "num_heads": 32,
          "sliding_window": 4096, "block_tables_stride": 128, "dim": 8192, "gate_up_stride": 16384,
          "logits_stride": 151936, "vocab_size": 151936, "num_tiles": 149}

def is_aligned(name, type, constants):
    if type.startswith("*"):
        return True
    if type != "i32":
        return False
    width = constants.get("HEAD_DIM") or constants.get("DIM") or 2 * constants.get("HALF", 0)
    value = VALUES[name] if name in VALUES else width if name.endswith("stride_h") else 32 * width
    return value % 16 == 0

def compile_for(arch, kernel, dtype, num_warps=4, **constants):
    function = kernel.jitted()
    types = dict(WIDE, out_ptr="*fp32") if constants.get("SPLIT") else WIDE
    def type_of(name):
        if name in constants:
            return "constexpr"
        return types.get(name, "*" + dtype if name.endswith("_ptr") else "fp32" if name in FLOATS else "i32")
    types_of = {name: type_of(name) for name in function.arg_names}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(function.arg_names)
               if is_aligned(name, types_of[name], constants)}
    source = ASTSource(function, types_of, constexprs=constants, attrs=aligned)
    options = {"enable_fp_fusion": True, "num_warps": num_warps, "num_stages": 2 if "ROWS" in constants else 3}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    # Hints that are not taken would go unnoticed otherwise; the small kernels give each thread one number.
    if num_warps == 4 and {"ROWS", "DIM", "TILE"} & constants.keys():
        assert ".v4.b32" in compiled.asm["ptx"] or "cp.async" in compiled.asm["ptx"], function.__name__
    assert compiled.metadata.shared <= 99 * 1024, (function.__name__, constants, compiled.metadata.shared)
    print(function.__name__)

"""

KERNELS = """
attention = dict(GROUP=4, BLOCK_SIZE=16, FEW_QUERIES=4, MOST_SEGMENTS=64, WIDEN=False, MANTISSA=0, NATIVE=False)
compile_for(80, paged_attention._attention_kernel, "bf16", HEAD_DIM=80, PADDED_DIM=128, ROWS=16, QUERIES=4, KEYS=64,
            FEW=True, HAS_WINDOW=True, HAS_SOFT_CAP=False, SPLIT=True, HAS_SINKS=True, **attention)
compile_for(90, paged_attention._reduce_kernel, "bf16", HEAD_DIM=80, PADDED_DIM=128, MOST_SEGMENTS=64, FEW_QUERIES=4)
compile_for(90, kv_write._kv_write_kernel, "bf16", HEAD_DIM=80, PADDED_DIM=128, MANTISSA=0)
for flags in ((False, True), (True, False)):
    compile_for(90, rms_norm._rms_norm_kernel, "bf16", DIM=2560, PADDED_DIM=4096,
                HAS_RESIDUAL=flags[0], HAS_OFFSET=flags[1])
    compile_for(90, silu_mul._gate_mul_kernel, "bf16", GELU=flags[0], TILE=1024)
compile_for(90, rotary._rotary_kernel, "bf16", HALF=48, PADDED_HALF=64, INTERLEAVED=False)
compile_for(90, random_draw._limits_kernel, "fp32", num_warps=16, TOLERANCE=1e-6, TILE=1024)
compile_for(80, random_draw._draw_kernel, "fp32", WRITES_BITS=False, TILE=1024)
compile_for(90, random_draw._winner_kernel, "fp32", PADDED_TILES=256)
for dim, padded, num_warps in ((4096, 4096, 4), (14336, 16384, 8)):
    compile_for(90, scaled._round_tokens_kernel, "bf16", num_warps, DIM=dim, PADDED_DIM=padded, LEAST=1e-30)
"""

LARGEST = """
attention = dict(GROUP=4, BLOCK_SIZE=16, FEW_QUERIES=4, MOST_SEGMENTS=64, WIDEN=False, MANTISSA=0, NATIVE=False)
compile_for(90, paged_attention._attention_kernel, "bf16", HEAD_DIM=128, PADDED_DIM=128, ROWS=64, QUERIES=16, KEYS=64,
            FEW=False, HAS_WINDOW=False, HAS_SOFT_CAP=True, SPLIT=False, HAS_SINKS=False, **attention)
compile_for(90, paged_attention._attention_kernel, "fp32", HEAD_DIM=256, PADDED_DIM=256, ROWS=32, QUERIES=8, KEYS=16,
            FEW=True, HAS_WINDOW=True, HAS_SOFT_CAP=True, SPLIT=True, HAS_SINKS=True, **attention)
"""


@pytest.mark.slow
def test_every_kernel_compiles_for_nvidia_gpus_on_a_machine_without_one(tmp_path: os.PathLike[str]) -> None:
    pytest.importorskip("triton")
    compiled = run_python(COMPILE + KERNELS, TRITON_CACHE_DIR=str(tmp_path)).split()
    assert set(compiled) == {
        "_attention_kernel", "_reduce_kernel", "_kv_write_kernel", "_rms_norm_kernel", "_gate_mul_kernel",
        "_rotary_kernel", "_limits_kernel", "_draw_kernel", "_winner_kernel", "_round_tokens_kernel",
    }  # fmt: skip


@pytest.mark.slow
def test_the_largest_tiles_of_attention_compile_within_the_memory_of_a_multiprocessor(
    tmp_path: os.PathLike[str],
) -> None:
    pytest.importorskip("triton")
    compiled = run_python(COMPILE + LARGEST, TRITON_CACHE_DIR=str(tmp_path)).split()
    assert compiled == ["_attention_kernel", "_attention_kernel"]
