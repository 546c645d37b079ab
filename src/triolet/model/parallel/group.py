"""Group of the processes that compute one model: rank 0 and its peers, joined by torch.distributed."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from triolet.errors import ModelError
from triolet.model.parallel.cuts import Part

JOIN_S = 300.0  # until all ranks have imported torch, on a machine under load
POLL_S = 0.01


@attrs.frozen
class Group:
    """Processes that compute one model, as one of them sees them."""

    part: Part
    device: torch.device  # of this rank

    @classmethod
    def join(cls, part: Part, rendezvous: Path, device: torch.device) -> Group:
        """Join the group; return when all ranks have.

        Args:
            part: of this process.
            rendezvous: file that rank 0 writes the port of its store to; another one for each life of the group.
            device: of this rank: a GPU's peers talk over NCCL, a CPU's over gloo.

        Raises:
            ModelError: the others did not come.
        """
        torch.set_num_threads(max(1, torch.get_num_threads() // part.size))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no port of it can be reached from elsewhere
        limit = timedelta(seconds=JOIN_S)
        if part.rank == 0:
            store = TCPStore("127.0.0.1", 0, part.size, True, limit, wait_for_workers=False)
            draft = rendezvous.with_suffix(".draft")
            draft.write_text(str(store.port))
            draft.rename(rendezvous)  # seen whole or not at all
        else:
            store = TCPStore("127.0.0.1", _port(rendezvous), part.size, False, limit)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=part.rank, world_size=part.size, timeout=limit)
        return cls(part, device)

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, in place of this one's."""
        dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Return all ranks' tensors: [...] -> [size, ...]."""
        parts = [torch.empty_like(x) for _ in range(self.part.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.stack(parts)

    def side_by_side(self, x: Tensor) -> Tensor:
        """Return all ranks' tensors beside each other: [n, part] -> [n, size * part]."""
        return torch.cat([*self.gather(x)], dim=-1)

    def least(self, number: int) -> int:
        """Return the least of all ranks' numbers."""
        least = torch.tensor([number], device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least.item())

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on a rank; all ranks get the same answer."""
        count = torch.tensor([int(flag)], device=self.device)
        dist.all_reduce(count)
        return bool(count.item())


def _port(rendezvous: Path) -> int:
    end_s = time.monotonic() + JOIN_S
    while not rendezvous.exists():
        if time.monotonic() > end_s:
            raise ModelError(f"rank 0 of the tensor-parallel group did not come within {JOIN_S} s")
        time.sleep(POLL_S)
    return int(rendezvous.read_text())
