"""What all adapters of a step add to a layer in two launches of Triton is what torch adds one by one."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from tests.kernels.targets import Target, on_every_triton_target
from triolet.kernels._triton import record_launches
from triolet.kernels.lora import LowRankPair, add_low_rank, compile_low_rank
from triolet.model.adapters import LayerAdapters, LayerPairs

NUM_IN, NUM_OUT = 150, 210
# first output, number of outputs and rank of the modules of each adapter; slot 3 leaves this layer as it is
SLOTS = {0: ((0, 130, 16), (140, 33, 3)), 1: ((140, 33, 40),), 3: ()}


@attrs.frozen
class Bank:
    """Adapters in slots."""

    device: torch.device
    adapters: dict[int, LayerPairs]

    def in_slot(self, slot: int) -> LayerPairs | None:
        return self.adapters.get(slot)


def added(bank: Any, token_slots: Tensor, y: Tensor, x: Tensor, *, all_at_once: bool) -> Tensor:
    adapters, y = LayerAdapters(bank, all_at_once=all_at_once), y.clone()
    adapters.begin(token_slots)
    adapters.add_to("layer", y, x)
    return y


@on_every_triton_target
def test_all_adapters_at_once_add_what_each_adds(target: Target) -> None:
    pairs = {
        slot: tuple(
            LowRankPair(start=start, a=target.randn(rank, NUM_IN) / 12, b=target.randn(num_out, rank) / 4)
            for start, num_out, rank in modules
        )
        for slot, modules in SLOTS.items()
    }
    bank = Bank(torch.device(target.device), {slot: {"layer": found} for slot, found in pairs.items()})
    token_slots = torch.tensor([1, 0, -1, 3, *([0] * 17), 1, -1, 0])
    x, y = target.randn(len(token_slots), NUM_IN), target.randn(len(token_slots), NUM_OUT)
    expected = y.clone().float()  # the clone is changed in place
    for slot, of_adapter in pairs.items():
        for pair in of_adapter:
            wide = LowRankPair(start=pair.start, a=pair.a.float(), b=pair.b.float())
            tokens = (token_slots == slot).nonzero()[:, 0].to(target.device)
            add_low_rank(expected, x.float(), wide, tokens)
    found = added(bank, token_slots, y, x, all_at_once=True)
    torch.testing.assert_close(found, expected.to(target.dtype), **target.tolerance)
    # Adapters with a bias are added one by one.
    biased = LowRankPair(start=0, a=pairs[1][0].a, b=pairs[1][0].b, bias=target.randn(33))
    mixed = Bank(bank.device, {**bank.adapters, 1: {"layer": (biased,)}})
    one_by_one = added(mixed, token_slots, y, x, all_at_once=False)
    assert added(mixed, token_slots, y, x, all_at_once=True).equal(one_by_one)


@on_every_triton_target
def test_the_first_adapter_finds_its_kernels_compiled(target: Target) -> None:
    device = torch.device(target.device)
    pairs = tuple(
        LowRankPair(start=start, a=target.randn(rank, 64), b=target.randn(48, rank))
        for start, rank in ((0, 3), (48, 40))
    )
    bank = Bank(device, {0: {"layer": pairs}})
    with record_launches() as compiled:
        compile_low_rank(target.dtype, target.dtype, device)
    with record_launches() as launched:
        added(bank, torch.tensor([0, -1, 0]), target.randn(3, 96), target.randn(3, 64), all_at_once=True)
    assert launched.keys() == compiled.keys()
    assert len(compiled) == 2
