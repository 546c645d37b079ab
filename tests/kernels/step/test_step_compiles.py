"""Compilation of a step's kernels for a GPU that is not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.dummy_driver import PRELUDE, run_python

# A vocabulary that no tile divides, and logits in the dtype of a model.
PROGRAM = (
    PRELUDE
    + """
import random
from tests.kernels.step.rows import make_buffers, make_step
from triolet.kernels import _triton, random_draw
from triolet.kernels.step import edits, inputs, layout, logprobs, results, writes
from triolet.model.sampling.random_draw import draw_on_gpu

Launcher.keeps = False
compile_variant, variants = _triton.KernelVariant.compile, {}

def compile(variant, target=None):
    compiled = variants[variant.kernel.name] = compile_variant(variant, target)
    return compiled

_triton.KernelVariant.compile = compile
step = make_step(random.Random(1), [(4, 1)] * 3, 5003)
logits, buffers = torch.zeros(4, 5003, dtype=torch.bfloat16), make_buffers(4, 4, 5003)
packet, tables, out = step.packet, step.tables, torch.zeros(900, dtype=torch.int32)
writes.apply_writes_triton(packet, tables)
for is_decode in (True, False):
    inputs.make_inputs_triton(packet, tables, buffers, block_size=16, is_decode=is_decode)
edited = edits.edit_logits_triton(logits, packet, tables, buffers)
b = buffers
drawn = draw_on_gpu(
    b.work, edited.max_logits, temperature=b.temperature, log_min_p=b.log_min_p, top_k=b.top_k, top_p=b.top_p,
    answers=b.answers, positions=b.answer_positions,
)
results.note_results_triton(packet, tables, edited, drawn, out[:8].view(4, 2))
for is_normalised in (True, False):
    logprobs.note_logprobs_triton(logits, packet, tables, out[:8].view(4, 2), out[8:], is_normalised=is_normalised)
for name, compiled in variants.items():
    print(name, compiled.asm["ptx"].count("fma.rn.f32"), compiled.asm["ptx"].count(".local"))
"""
)
KERNELS = {
    "_writes_kernel",
    "_inputs_kernel",
    "_edits_kernel",
    "_largest_kernel",
    "_limits_kernel",
    "_draw_kernel",
    "_winner_kernel",
    "_results_kernel",
    "_tiles_kernel",
    "_joined_kernel",
}


@pytest.mark.slow
def test_every_kernel_compiles_without_local_memory_and_penalties_without_fused_additions(
    tmp_path: Path,
) -> None:
    pytest.importorskip("triton")
    lines = [line.split() for line in run_python(PROGRAM, TRITON_CACHE_DIR=str(tmp_path)).split("\n")]
    counts = {name: (int(fused), int(local)) for name, fused, local in lines}
    assert counts.keys() == KERNELS
    assert all(local == 0 for _, local in counts.values())
    assert counts["_draw_kernel"][0] > 0  # where it may be fused, it is
    assert counts["_edits_kernel"][0] == 0
