"""How often sampling waits for a GPU: on tensors that say they are there, and count when they are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import HAS_NVIDIA_DRIVER
from triolet.core.request.params import SamplingParams
from triolet.kernels import random_draw as kernels
from triolet.model.sampling import random_draw, sampler
from triolet.model.sampling.logprobs import pack, unpack
from triolet.model.sampling.sampler import SamplingBatch
from triolet.model.sampling.sampling_row import SamplingRow

CPU = torch.device("cpu")
READS = {
    torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.item, torch.Tensor.__bool__,
    torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.nonzero, torch.nonzero,
    torch.equal, torch.bincount, torch.Tensor.bincount, torch.Tensor.unique, torch.Tensor.masked_select,
}  # fmt: skip


class Remote(torch.Tensor):
    """Tensor in main memory that takes itself for one on a GPU; what comes of it is one as well, until it is read."""

    num_reads = 0
    is_cuda = True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            masks = [each for each in _flat(args) if isinstance(each, Tensor) and each.dtype == torch.bool]
        is_index = func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
        if func in READS or (is_index and masks):  # places of a mask must be counted by the host
            cls.num_reads += 1
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return plain(result) if func is torch.Tensor.cpu else result


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def plain(tensor: Any) -> Any:
    return tensor.as_subclass(torch.Tensor) if isinstance(tensor, Remote) else tensor


@pytest.fixture
def remote_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the sampler take `Remote` for tensors on a GPU; the kernels run in Triton's interpreter."""
    pytest.importorskip("triton")
    if HAS_NVIDIA_DRIVER:
        pytest.skip("with a GPU the kernels are compiled for it")
    launch = kernels.draw_triton

    def draw(*args: Any, **options: Any) -> Tensor:
        options = {name: plain(value) for name, value in options.items()}
        return launch(*map(plain, args), **options).as_subclass(Remote)

    def no_cpp(*_: object) -> None:
        return None

    monkeypatch.setattr(kernels, "draw_triton", draw)
    monkeypatch.setattr(random_draw, "make_cpu_draws", no_cpp)
    monkeypatch.setattr(random_draw, "make_gpu_draws", random_draw.GpuDraws.of)
    monkeypatch.setattr(sampler, "row_argmax", lambda logits: tuple(logits.max(dim=1)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # there is no driver to pin it
    monkeypatch.setattr(Remote, "num_reads", 0)


KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "greedy": ({"temperature": 0.0}, 1),
    "temperature": ({"temperature": 0.9}, 1),
    "top_p and top_k": ({"temperature": 0.7, "top_p": 0.9, "top_k": 5}, 1),
    "top_p": ({"temperature": 0.7, "top_p": 0.9}, 1),
    "min_tokens": ({"temperature": 0.8, "min_tokens": 10}, 1),
    "logit_bias": ({"temperature": 0.9, "logit_bias": {5: 3.0}}, 1),
    "penalties": ({"temperature": 0.8, "repetition_penalty": 1.1, "frequency_penalty": 0.3}, 1),
    "logprobs": ({"temperature": 0.0, "logprobs": 5}, 2),
    "named logprobs": ({"temperature": 0.0, "logprob_token_ids": [3, 1, 7]}, 2),
}


def make_rows(fields: dict[str, Any]) -> list[SamplingRow]:
    return [
        SamplingRow(
            params=SamplingParams(**fields), seed=seed, vocab_size=50, prompt_token_ids=[1, 2],
            output_token_ids=[3] * (seed % 3), ending_token_ids=[0],
        )
        for seed in range(8)
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("remote_device")
def test_a_step_reads_its_tokens_once_and_its_logprobs_once(kind: str) -> None:
    fields, expected = KINDS[kind]
    logits = torch.randn(8, 50)
    SamplingBatch(make_rows(fields), 50, CPU).sample(logits.as_subclass(Remote))
    assert Remote.num_reads == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of NaN in the interpreter
@pytest.mark.usefixtures("remote_device")
def test_what_is_read_together_is_what_the_cpu_says() -> None:
    rows = [row for fields, _ in KINDS.values() for row in make_rows(fields)]
    logits = torch.randn(len(rows), 50)
    logits[3] = float("nan")
    logits[11] = float("-inf")
    there = SamplingBatch(rows, 50, CPU).sample(logits.clone().as_subclass(Remote))
    here = SamplingBatch(rows, 50, CPU).sample(logits.clone())
    assert there.failures == here.failures
    assert set(there.failures) == {3, 11}
    alive = [i for i in range(len(rows)) if i not in there.failures]
    assert [there.token_ids[i] for i in alive] == [here.token_ids[i] for i in alive]
    assert there.logprobs == here.logprobs


def test_packing_keeps_every_number() -> None:
    tensors = [
        torch.tensor([[0, 2**52], [-1, 7]]), torch.tensor([0.1, float("inf"), -3e38]), torch.zeros(0, 2),
        torch.tensor([2.0**-149]),
    ]  # fmt: skip
    assert unpack(pack(tensors), tensors) == [tensor.tolist() for tensor in tensors]
