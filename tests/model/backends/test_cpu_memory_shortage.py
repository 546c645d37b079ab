"""What the CPU kernels do where there is no memory for a step: it fails by itself, and what needs no more goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model.tiny import make_model
from triolet.kernels.cpu.library import SWITCH, library

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS and the C library of Linux"),
    pytest.mark.skipif(library() is None, reason="torch computes all steps"),
]

PRELUDE = """
import ctypes, resource, sys
from pathlib import Path
from tests.model.test_runner import start
from triolet.config.engine import EngineConfig
from triolet.core.step_plan import PlanRow, StepPlan
from triolet.model.loading.runner import load_runner

malloc = ctypes.CDLL(None).malloc
malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
kept = resource.getrlimit(resource.RLIMIT_AS)

def take_all(piece):
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped, kept[1]))
    while malloc(piece):
        pass

def give_back():
    resource.setrlimit(resource.RLIMIT_AS, kept)
"""

STEPS = """
config = EngineConfig(model=sys.argv[1], num_kv_blocks=64, block_size=16, max_num_seqs=4, max_num_batched_tokens=1024)
runner, _ = load_runner(config)
long, short = (1, 2) * 120, (1, 2, 3)

def answers(num_tokens):
    first = StepPlan(1, (), (start(0, short),), (PlanRow(0, 0, 3, (0, 1), True),))
    yield runner.execute(first)
    for step_id in range(2, 2 + num_tokens):
        yield runner.execute(StepPlan(step_id, (), (), (PlanRow(0, step_id + 1, 1, (), True),)))

def tokens(results):
    return [result.tokens[0].token_id for result in results]

right = tokens(answers(8))
runner.reset()
take_all(2**15)
lost = runner.execute(StepPlan(1, (), (start(1, long),), (PlanRow(1, 0, len(long), tuple(range(2, 17)), True),)))
assert lost.out_of_memory is not None and not lost.rows, lost
runner.reset()
assert tokens(answers(8)) == right
runner.reset()
give_back()
(token,) = runner.execute(
    StepPlan(1, (), (start(1, long),), (PlanRow(1, 0, len(long), tuple(range(2, 17)), True),))
).tokens
print(token.token_id)
"""

PRODUCT = """
import torch
from torch import nn
from triolet.kernels.cpu.library import library
from triolet.model.backends.cpu.linear import CppLinearLayer

layer = CppLinearLayer(nn.Linear(64, 32, dtype=torch.bfloat16), library())
few, many = torch.ones(4, 64, dtype=torch.bfloat16), torch.ones(2**14, 64, dtype=torch.bfloat16)
right = layer(few)
space = torch.empty(2**15, 32, dtype=torch.bfloat16)  # for the results, and as much for Python: freed just before
take_all(2**15)
del space
try:
    layer(many)
except MemoryError as error:
    assert "there is no memory for what the CPU kernels compute" in str(error), error
else:
    raise AssertionError("there was memory")
assert torch.equal(layer(few), right)
give_back()
assert torch.equal(layer(many)[:4], right)
"""


def in_another_process(script: str, *arguments: str, target: str = "auto") -> str:
    command = [sys.executable, "-c", PRELUDE + script, *arguments]
    variables = os.environ | {SWITCH: target}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_step_without_memory_fails_alone_and_smaller_ones_are_exact_while_it_lasts(tmp_path: Path) -> None:
    model = str(make_model("llama", tmp_path))
    answer = in_another_process(STEPS, model)
    assert answer.strip().isdigit()


def test_a_product_without_memory_raises_and_smaller_ones_are_exact_while_it_lasts() -> None:
    in_another_process(PRODUCT, target="portable")  # whose products widen their inputs
