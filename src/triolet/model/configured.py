"""From the operator's configuration to a running model: the one place that knows which fields are the runner's."""

from __future__ import annotations

from triolet.config import EngineConfig
from triolet.core.model_info import ModelInfo
from triolet.core.progress import OnProgress
from triolet.model.runner import ModelRunner, load_runner


def load_configured_runner(config: EngineConfig, on_progress: OnProgress) -> tuple[ModelRunner, ModelInfo]:
    """Load what a configuration names.

    Args:
        config: with a `model`.
        on_progress: told how much of it is there.
    Raises:
        ConfigError: a field that does not fit the model or the machine.
        ModelError: the model can not be loaded.
    """
    if config.model is None:
        raise ValueError("config.model must be a folder or a hub id; got None")
    return load_runner(
        model=config.model,
        dtype=config.dtype,
        device=config.device,
        trust_remote_code=config.trust_remote_code,
        revision=config.revision,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        num_kv_blocks=config.num_kv_blocks,
        kv_cache_bytes=config.kv_cache_bytes,
        max_num_seqs=config.max_num_seqs,
        quantization=None if config.quantization == "none" else config.quantization,
        logprobs_mode=config.logprobs_mode,
        on_progress=on_progress,
    )
