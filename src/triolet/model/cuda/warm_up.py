"""Compilation of all that a decoder and its steps launch on a GPU, before anything is computed for a request."""

from __future__ import annotations

import logging

import torch

from triolet.kernels._triton import KernelCompileError
from triolet.model.cuda.step_device import StepDevice
from triolet.model.cuda.steps import DeviceSteps
from triolet.model.input_batch import RowTable
from triolet.model.interface import CausalModel
from triolet.model.memory.kv_cache import allocate_kv_cache

logger = logging.getLogger(__name__)


def can_compute_steps(model: CausalModel, device: StepDevice, *, block_size: int, logprobs_mode: str) -> bool:
    """Compile the kernels around a model's layers by computing steps of one row.

    Returns:
        False if one of them cannot be compiled, which is said: they have no stand-ins that keep the rows on the device.
    """
    max_model_len = max_num_seqs = 1
    table = RowTable(
        num_blocks=1,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        vocab_size=model.spec.vocab_size,
        device=torch.device("cpu"),
    )
    steps = DeviceSteps(
        model,
        allocate_kv_cache(model.spec, num_blocks=2, block_size=block_size, device=device.device),
        table,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_tokens=1,
        device=device,
        logprobs_mode=logprobs_mode,
    )
    try:
        steps.warm_up()
    except KernelCompileError as error:
        logger.warning("%s; rows stay in the host's memory, which makes steps slower", error)
        return False
    return True
