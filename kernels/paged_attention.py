"""Attention over block tables: prefill chunks and decodes in one call."""

from __future__ import annotations

import attrs
from torch import Tensor


@attrs.frozen(eq=False, kw_only=True)
class AttentionMetadata:
    """Where this step's sequences stand: built once per step, shared by every layer.

    Args:
        cu_query_lens: [num_seqs + 1] int32; sequence i's tokens are rows cu[i]:cu[i+1] of the step's tensors.
        seq_lens: [num_seqs] int32, tokens in the cache once this step's are written (the last query token's position + 1).
        block_tables: [num_seqs, max_blocks] int32, block ids in order; entries past a sequence's end are never read.
        slot_mapping: [num_tokens] int64, block_id * block_size + offset for each of this step's tokens; negative = padding.
        query_lens_host: `diff(cu_query_lens)` as Python ints, so that the host need not wait for the device.
        seq_lens_host: `seq_lens` as Python ints.
    """

    cu_query_lens: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    query_lens_host: tuple[int, ...]
    seq_lens_host: tuple[int, ...]
