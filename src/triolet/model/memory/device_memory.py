"""Memory of a GPU: what an engine may take of it, and what its weights and steps leave for the KV cache.

    share of the engine  = the least of total * gpu_memory_utilization and what was free before the load
    KV cache             = share - most that torch held in a step of the largest size, with the weights
                                 - what libraries and the driver took beside torch - a margin

The step is computed once, in the first life of an engine. Its size of the KV cache is that of all later lives.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from triolet.core.request.params import SamplingParams
from triolet.core.step_plan import PlanRow, RowStart, StepPlan
from triolet.errors import ConfigError

MARGIN_BYTES = 128 * 2**20  # pieces between tensors that no other tensor fits into
GIB = 2**30


@attrs.frozen(kw_only=True)
class DeviceMemory:
    """Memory of a GPU before a model was loaded, bytes."""

    device: torch.device
    total: int
    free: int
    reserved: int  # by torch in this process, such as another model
    allocated: int  # of it, in tensors

    @classmethod
    def measure(cls, device: torch.device) -> DeviceMemory:
        """Measure a GPU's memory now."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return cls(
            device=device,
            total=total,
            free=free,
            reserved=torch.cuda.memory_reserved(device),
            allocated=torch.cuda.memory_allocated(device),
        )

    def share(self, utilization: float) -> int:
        """Return what the engine may take, bytes.

        Args:
            utilization: greatest part of all memory, above 0 and at most 1.
        """
        return min(int(self.total * utilization), self.free)

    def left_for_kv(
        self, utilization: float, compute_largest_step: Callable[[], int], block_bytes: int
    ) -> int:
        """Compute a step of the largest size, and return what is left for the KV cache, bytes.

        Args:
            utilization: see `share`.
            compute_largest_step: computes it with a KV cache of its own, whose bytes it returns.
            block_bytes: of a KV block.
        Raises:
            ConfigError: not even one block fits.
        """
        torch.cuda.reset_peak_memory_stats(self.device)
        own_bytes = compute_largest_step()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - self.allocated - own_bytes
        torch.cuda.empty_cache()
        free_now, _total = torch.cuda.mem_get_info(self.device)
        reserved_now = torch.cuda.memory_reserved(self.device) - self.reserved
        beside_torch = max(0, self.free - free_now - reserved_now)
        needed = peak + beside_torch + MARGIN_BYTES
        left = self.share(utilization) - needed
        if left < block_bytes:
            raise ConfigError(
                "gpu_memory_utilization",
                f"enough for the model on {self.device}: weights and steps take {needed / GIB:.2f} GiB, a block of KV "
                f"{block_bytes / GIB:.3f} GiB, and {self.free / GIB:.2f} of {self.total / GIB:.2f} GiB were free",
                utilization,
            )
        return left

    def too_small_for(self, num_bytes: int) -> ConfigError:
        """Return the error of weights for which there is no memory.

        Args:
            num_bytes: of the weights' files; 0 if not known.
        """
        size = f" of {num_bytes / GIB:.2f} GiB" if num_bytes else ""
        return ConfigError(
            "device",
            f"one with memory for the weights{size}; {self.free / GIB:.2f} of {self.total / GIB:.2f} GiB were free",
            str(self.device),
        )


def largest_step(num_tokens: int, num_rows: int, block_size: int, max_position: int) -> tuple[StepPlan, int]:
    """Return a step as large as a scheduler may plan, and the number of KV blocks that it takes.

    Every row draws its first token with top_p and tells log-probabilities, which takes the most memory.

    Args:
        num_tokens: greatest number of tokens in a step.
        num_rows: greatest number of requests in a step.
        block_size: tokens in a block.
        max_position: longest prompt, tokens.
    """
    num_rows = min(num_rows, num_tokens)
    length = min(num_tokens // num_rows, max_position)
    blocks_per_row = -(-length // block_size)
    params = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1)
    starts = tuple(
        RowStart(
            row_id=row,
            request_id=str(row),
            epoch=0,
            prompt_token_ids=(0,) * length,
            output_token_ids=(),
            params=params,
            seed=row,
            ending_token_ids=frozenset(),
        )
        for row in range(num_rows)
    )
    rows = tuple(
        PlanRow(
            row_id=row,
            start=0,
            num_tokens=length,
            new_block_ids=tuple(range(row * blocks_per_row, (row + 1) * blocks_per_row)),
            sample=True,
        )
        for row in range(num_rows)
    )
    return StepPlan(step_id=0, ended=(), starts=starts, rows=rows), num_rows * blocks_per_row
