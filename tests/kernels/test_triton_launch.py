"""What a launch costs the host, and which launches share a binary, with a driver that does nothing."""

from __future__ import annotations

import os

import pytest

from tests.kernels.dummy_driver import PRELUDE, run_python

NORM = (
    PRELUDE
    + """
from triolet.kernels.rms_norm import _rms_norm_kernel as norm

constants = dict(DIM=1024, PADDED_DIM=1024, HAS_RESIDUAL=True, HAS_OFFSET=False)

def args(dtype=torch.bfloat16, rows=1, first=0, stride=1024):
    x, residual, out, total = (torch.zeros(rows * 1024 + 16, dtype=dtype)[first:] for _ in range(4))
    return x, residual, torch.zeros(1024, dtype=dtype), out, total, 1e-6, 0.0, stride, 1024, stride, 1024

def launch(*args, grid=(3, 1), **options):
    norm[grid](*args, **constants, **options)
"""
)

SAME_ARGUMENTS = """
given = args()
launch(*given)
norm.jitted()[3, 1](*given, **constants)
(grid, ours), (jit_grid, theirs) = launched
assert grid == jit_grid == (3, 1, 1)
assert ours.keys() == theirs.keys()
assert all(ours[name] is theirs[name] or ours[name] == theirs[name] for name in ours)
launch(*given)
assert launched[2][1].keys() == ours.keys()
"""

BINARIES = """
for given in (args(), args(rows=7), args(rows=300, stride=2048)):  # rows and strides are those of another step
    launch(*given)
assert len(norm._loaded) == 1
for given in (args(torch.float16), args(first=1), args(stride=1030)):
    launch(*given)
launch(*args(), num_warps=8)
print(len(norm._loaded))
"""

WARNING = """
import logging
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from triolet.kernels import _triton
launch(*args())
_triton.announce_warm()
launch(*args())
print("quiet")
launch(*args(torch.float16))
"""

CALLS = """
Launcher.keeps, calls = False, 0

def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")

sys.setprofile(count)
norm[3, 1](*given, **constants)
sys.setprofile(None)
print(calls)
"""

PRICE = """
given, Launcher.keeps = args(), False
triton_kernel = norm.jitted()

def empty():
    pass

def microseconds(work):
    begin = time.thread_time()
    for _ in range(200):
        work()
    return (time.thread_time() - begin) / 200 * 1e6

works = (lambda: norm[3, 1](*given, **constants), lambda: triton_kernel[3, 1](*given, **constants), empty)
for work in works:
    work()
times = [[microseconds(work) for work in works] for _ in range(40)]  # in turns
print(*(min(column) for column in zip(*times)))
"""


@pytest.fixture
def cached_in(tmp_path: os.PathLike[str]) -> dict[str, str]:
    pytest.importorskip("triton")
    return {"TRITON_CACHE_DIR": str(tmp_path)}


@pytest.mark.slow
def test_a_launch_hands_over_what_triton_itself_would_in_a_few_calls_of_python(
    cached_in: dict[str, str],
) -> None:
    # Triton's own way takes more than 60. Five are the addresses of pointers.
    assert int(run_python(NORM + SAME_ARGUMENTS + CALLS, **cached_in)) <= 25


@pytest.mark.slow
def test_a_binary_serves_all_steps_and_another_one_other_dtypes_alignments_and_warps(
    cached_in: dict[str, str],
) -> None:
    assert run_python(NORM + BINARIES, **cached_in) == "4"


@pytest.mark.slow
def test_a_binary_that_is_loaded_after_the_start_is_reported(cached_in: dict[str, str]) -> None:
    quiet, report = run_python(NORM + WARNING, **cached_in).split("\n")
    assert quiet == "quiet"
    assert "compiled or loaded after the start" in report
    assert "_rms_norm_kernel *fp16" in report


@pytest.mark.slow
def test_a_launch_takes_at_most_12_microseconds_of_cpu_time(cached_in: dict[str, str]) -> None:
    ours, of_triton, empty_call = map(float, run_python(NORM + PRICE, **cached_in).split())
    # A quiet core calls an empty function in 0.05 microseconds; others are slower in everything.
    assert ours <= 12.0 * max(1.0, empty_call / 0.05)
    assert ours <= of_triton * 2 / 3
