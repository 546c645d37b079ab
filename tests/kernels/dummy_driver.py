"""Programs for a process of their own, in which Triton compiles for an H100 and a driver that does nothing launches."""

from __future__ import annotations

import os
import subprocess
import sys

PRELUDE = """
import sys, time
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

launched = []

class Utils:
    def load_binary(self, name, kernel, shared, device):
        return 1, 1, 64, 0, 1024
    def get_device_properties(self, device):
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}

class Launcher:
    keeps = True
    def __init__(self, source, metadata):
        self.names = source.fn.arg_names
    def __call__(self, x, y, z, stream, function, metadata, *hooks_and_args):
        if self.keeps:
            launched.append(((x, y, z), dict(zip(self.names, hooks_and_args[3:], strict=True))))

class DummyDriver:
    utils, launcher_cls = Utils(), Launcher
    def get_current_device(self):
        return 0
    def get_current_stream(self, device=0):
        return 0
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)
    def get_active_torch_device(self):
        return torch.device("cpu")

driver.set_active(DummyDriver())
torch.set_grad_enabled(False)
"""


def run_python(program: str, **environment: str) -> str:
    """Run a program in a process without the settings of Triton that the tests have; return what it prints."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("TRITON")}
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**inherited, "PYTHONPATH": paths, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
