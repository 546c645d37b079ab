"""Choice of what attends to prompts, by measurement and by name, with a stand-in for torch's flash attention."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.flash import FakeFlash
from tests.model.tiny import make_model
from triolet.config.engine import EngineConfig
from triolet.errors import ConfigError
from triolet.kernels.flash_attention import FlashAttention
from triolet.kernels.paged_attention import paged_attention_reference
from triolet.model.backends.torch_decoder import Attention, Decoder
from triolet.model.cuda.prompt_attention import choose_prompt_attention
from triolet.model.loading import decoder
from triolet.model.loading.model import load_model
from triolet.model.loading.options import LoadOptions
from triolet.model.loading.runner import load_runner

CPU = torch.device("cpu")


class Machine:
    """Implementations of flash attention that are installed, and how long each of them takes.

    Args:
        seconds: of each; "triton" is the kernel.
    """

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds, self.active, self.last = seconds, "", ""

    def activate(self, flash: FlashAttention) -> None:
        if flash.name not in self.seconds:
            raise ImportError(f"No module named '{flash.name}'")
        self.active = flash.name

    def attend(self, query: Tensor, *args: Any, prompts: FlashAttention | None, **options: Any) -> Tensor:
        if prompts is None:
            self.last = "triton"
            return paged_attention_reference(query, *args, **options)
        self.last = self.active
        out = torch.empty_like(query)
        prompts(out, query, *args, few_queries=1, **options)
        return out

    def time(self, work: Callable[[], object]) -> float:
        work()
        return self.seconds[self.last]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    def make(flash: FakeFlash | None = None, **seconds: float) -> Machine:
        made = Machine(seconds)

        def activate(flash: FlashAttention) -> None:
            made.activate(flash)

        monkeypatch.setattr(FlashAttention, "activate", activate)
        monkeypatch.setattr("triolet.model.cuda.prompt_attention.paged_attention", made.attend)
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn_out", flash or FakeFlash())
        return made

    return make


@pytest.fixture
def decoder_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Decoder]:
    """Load decoders in torch, as those on a GPU are."""
    monkeypatch.setattr(decoder, "can_plan", lambda *_: False)

    def make(family: str, dtype: str = "bfloat16") -> Decoder:
        model = load_model(str(make_model(family, tmp_path / family)), LoadOptions(dtype=dtype)).model
        assert isinstance(model, Decoder)
        return model

    return make


def choose(name: str, decoder: Decoder, machine: Machine, block_size: int = 256) -> list[str | None]:
    """Return what each layer got."""
    chosen = choose_prompt_attention(name, decoder, device=CPU, block_size=block_size, timer=machine.time)
    names = []
    for layer in chosen.layers:
        assert isinstance(layer.attention, Attention)
        flash = layer.attention.prompts
        assert flash is None or isinstance(flash, FlashAttention)
        names.append(None if flash is None else flash.name)
    return names


def test_the_fastest_of_those_that_are_installed_is_taken(
    machine: Callable[..., Machine], decoder_of: Callable[[str], Decoder], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    here = machine(fa2=0.003, fa4=0.001, triton=0.002)
    assert choose("auto", decoder_of("llama"), here) == ["fa4"] * 3
    assert here.active == "fa4"
    assert "fa3 is not for the prompts of this model: No module named 'fa3'" in caplog.messages
    measured = "attention of a prompt of 256 tokens: fa2 3.000 ms, fa4 1.000 ms, triton 2.000 ms"
    assert measured in caplog.messages


def test_what_was_tried_last_and_is_slower_is_not_left_active(
    machine: Callable[..., Machine], decoder_of: Callable[[str], Decoder]
) -> None:
    here = machine(fa2=0.001, fa3=0.003, triton=0.002)
    assert choose("auto", decoder_of("llama"), here) == ["fa2"] * 3
    assert here.active == "fa2"


def test_torchs_own_is_active_again_where_none_is_taken(
    machine: Callable[..., Machine], decoder_of: Callable[[str], Decoder]
) -> None:
    here = machine(fa2=0.003, fa4=0.003, triton=0.002)
    assert choose("auto", decoder_of("llama"), here) == [None] * 3
    assert here.active == "fa2"


@pytest.mark.parametrize(
    "seconds", [{"triton": 0.002}, {"fa2": 0.003, "triton": 0.002}], ids=["nothing else", "slower"]
)
def test_the_kernel_of_the_engine_stays_where_nothing_is_faster(
    machine: Callable[..., Machine], decoder_of: Callable[[str], Decoder], seconds: dict[str, float]
) -> None:
    assert choose("auto", decoder_of("llama"), machine(**seconds)) == [None] * 3


def test_one_that_is_asked_for_is_taken_though_it_is_slower(
    machine: Callable[..., Machine], decoder_of: Callable[[str], Decoder]
) -> None:
    assert choose("fa3", decoder_of("llama"), machine(fa3=0.009, triton=0.002)) == ["fa3"] * 3


def test_one_that_computes_something_else_is_never_taken(
    machine: Callable[..., Machine], decoder_of: Callable[[str], Decoder]
) -> None:
    decoder = decoder_of("llama")
    for factor in (1.1, float("nan")):
        here = machine(FakeFlash(factor), fa3=0.001, triton=0.002)
        assert choose("auto", decoder, here) == [None] * 3
        with pytest.raises(ConfigError, match=r"attention_backend .* away from that of the Triton kernel"):
            choose("fa3", decoder, here)


@pytest.mark.parametrize(
    ("name", "family", "dtype", "block_size", "problem"),
    [
        ("fa4", "llama", "bfloat16", 16, "No module named 'fa4'"),
        ("fa2", "llama", "bfloat16", 16, "block_size must be a multiple of 256; got 16"),
        ("fa3", "llama", "float32", 16, "float16 or bfloat16 is needed; got torch.float32"),
        (
            "fa3",
            "gemma2",
            "bfloat16",
            16,
            "triton or auto for a model without a layer that has neither sinks nor a soft cap",
        ),
    ],
)
def test_one_that_cannot_compute_the_model_is_refused_with_the_reason(
    machine: Callable[..., Machine],
    decoder_of: Callable[..., Decoder],
    name: str,
    family: str,
    dtype: str,
    block_size: int,
    problem: str,
) -> None:
    here = machine(fa2=0.001, fa3=0.001, triton=0.002)
    decoder = decoder_of(family, dtype)
    with pytest.raises(ConfigError, match=problem) as raised:
        choose(name, decoder, here, block_size)
    assert "attention_backend" in str(raised.value)
    if problem.startswith(("float16", "triton")):
        assert choose("auto", decoder, here) == [None] * 3


def test_windows_are_those_of_the_layers(
    machine: Callable[..., Machine], decoder_of: Callable[[str], Decoder]
) -> None:
    decoder = decoder_of("mistral")
    assert choose("fa3", decoder, machine(fa3=0.001, triton=0.002)) == ["fa3"] * len(decoder.layers)


def test_a_name_is_refused_where_no_gpu_computes(tmp_path: Path) -> None:
    folder = str(make_model("llama", tmp_path))
    with pytest.raises(
        ConfigError, match=r"attention_backend must be triton or auto for .* on cpu; got 'fa3'"
    ):
        load_runner(EngineConfig(model=folder, device="cpu", num_kv_blocks=8, attention_backend="fa3"))
    load_runner(EngineConfig(model=folder, device="cpu", num_kv_blocks=8, attention_backend="auto"))
