"""Fixtures of the kernel tests: fixed random seeds, and NaN in memory that no kernel has written."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Without it cuBLAS warns that it is not deterministic, which `fresh_memory_is_nan` asks for.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    """Let `torch.empty` give NaN, so that an element that a kernel did not write cannot pass for a right one."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
