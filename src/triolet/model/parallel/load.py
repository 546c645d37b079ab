"""Loading of one rank's part of a model."""

from __future__ import annotations

import torch

from triolet.core.load_progress import LoadProgress, OnProgress
from triolet.model.architectures.decoder_config import DecoderConfig
from triolet.model.architectures.kv_format import KvFormat
from triolet.model.architectures.weight_map import WeightReader, check_fit, plan_tensors
from triolet.model.folder.checkpoint import Checkpoint
from triolet.model.parallel.cuts import PartCheckpoint, cut_plans
from triolet.model.parallel.decoder import RankDecoder, build_part
from triolet.model.parallel.group import Group


def load_part(
    parsed: DecoderConfig,
    stored: Checkpoint,
    dtype: torch.dtype,
    device: str,
    max_model_len: int | None,
    on_progress: OnProgress | None,
    group: Group,
    kv_format: KvFormat | None = None,
) -> RankDecoder:
    """Read a rank's part of a model, and no other bytes of its files.

    Raises:
        ConfigError: the model cannot be cut into that many parts.
        WeightsMismatch: the files do not fit the model.
    """
    part = group.part
    part.check(parsed)
    plans = plan_tensors(parsed, stored.tensors)
    check_fit(parsed, plans, stored)
    cuts = part.cuts(parsed, plans)

    def report(done_bytes: int, total_bytes: int) -> None:
        if on_progress is not None:
            on_progress(LoadProgress("weights", done_bytes, total_bytes))

    source = PartCheckpoint(stored, cuts)
    reader = WeightReader(source, cut_plans(plans, cuts), dtype, torch.device(device), report)
    return build_part(part.config(parsed), reader, group, max_model_len, kv_format)
