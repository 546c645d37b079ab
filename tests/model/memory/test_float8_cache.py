"""A KV cache in float8: its size, the scales of a checkpoint, answers and prefixes, and what it is refused for.

What needs a GPU computes on the CPU here, with the references of the kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.backends.test_transformers_backend import save_model
from tests.model.cuda.pretended_gpu import kernels_of_the_gpu
from tests.model.cuda.test_host_waits import SIZES, make_gpu_runner, plan
from tests.model.tiny import make_model
from triolet import SamplingParams, open_engine
from triolet.compat import EngineArgs
from triolet.config.engine import EngineConfig
from triolet.errors import ConfigError, UnsupportedModel, WeightsMismatch
from triolet.model.architectures.kv_format import KvFormat, KvScales
from triolet.model.backends.torch_decoder import Attention, Decoder, with_kv_format
from triolet.model.interface import LayerCacheSpec, ModelSpec
from triolet.model.loading import decoder
from triolet.model.loading import runner as loading
from triolet.model.loading.model import load_model
from triolet.model.loading.options import LoadOptions
from triolet.model.loading.runner import load_runner
from triolet.model.memory.kv_cache import allocate_kv_cache, kv_block_count
from triolet.model.parallel.cuts import Part
from triolet.model.parallel.group import Group
from triolet.model.parallel.load import load_part
from triolet.model.runner import ModelRunner

CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn
NAMES = [
    ("self_attn.k_scale", "self_attn.v_scale"),
    ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
]


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder of GPUs on a CPU, which is taken for one."""
    monkeypatch.setattr(decoder, "can_plan", lambda *args: False)
    monkeypatch.setattr(LoadOptions, "check", lambda options: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3", tmp_path_factory.mktemp("models") / "tiny")


def with_scales(folder: Path, scales: dict[str, torch.Tensor]) -> Path:
    """Add tensors to a model folder."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | scales, file, {"format": "pt"})
    return folder


def attentions(model: Any) -> list[Attention]:
    return [layer.attention for layer in model.layers]


def load_float8(folder: Path, kind: str = "fp8") -> Decoder:
    model = load_model(str(folder), LoadOptions(dtype="float32", kv_cache_dtype=kind)).model
    assert isinstance(model, Decoder)
    return model


# ------------------------------------------------------------------------------------------------ size


def test_a_block_takes_a_byte_a_number_and_states_and_weights_keep_their_dtype() -> None:
    layer = LayerCacheSpec(num_kv_heads=2, head_dim=8)
    plain = ModelSpec(
        architecture="LlamaForCausalLM", backend="native", vocab_size=9, max_position=99,
        cache_layers=(layer, layer), dtype=torch.bfloat16,
    )  # fmt: skip
    spec = attrs.evolve(plain, kv_dtype=E4M3)
    assert (plain.block_bytes(16), spec.block_bytes(16)) == (16 * 2 * 2 * 16 * 2, 16 * 2 * 2 * 16)
    cache = allocate_kv_cache(spec, num_blocks=3, block_size=16, device=CPU)
    tensors = [tensor for layer in cache for tensor in layer.tensors]
    assert sum(tensor.nbytes for tensor in tensors) == 3 * spec.block_bytes(16)
    assert {tensor.dtype for tensor in tensors} == {E4M3}
    assert all(tensor.float().eq(0).all() for tensor in tensors)

    def count(spec: ModelSpec) -> int:
        return kv_block_count(
            spec, block_size=16, num_kv_blocks=None, kv_cache_bytes=10 * plain.block_bytes(16),
            max_model_len=64, max_num_seqs=4,
        )  # fmt: skip

    assert (count(plain), count(spec)) == (10, 20)


def test_the_memory_that_a_gpu_has_left_holds_so_many_more_blocks(
    folder: Path, on_the_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_bytes = 16 * 3 * 2 * 2 * 32  # three layers, two heads of 32 numbers, of a byte each

    class Memory:
        steps: list[int] = []  # noqa: RUF012

        def left_for_kv(self, utilization: float, compute_largest_step: Any, of_block: int) -> int:
            assert of_block == block_bytes
            self.steps.append(compute_largest_step())
            return 40 * block_bytes

    memory = Memory()
    monkeypatch.setattr(loading, "memory_of", lambda device: memory)
    _, info = load_runner(EngineConfig(
        model=str(folder), device="cpu", dtype="float32", kv_cache_dtype="fp8", max_num_batched_tokens=96,
        max_num_seqs=6,
    ))  # fmt: skip
    assert info.num_kv_blocks == 40
    assert memory.steps == [6 * block_bytes]


# ---------------------------------------------------------------------------------------------- scales


@pytest.mark.parametrize(("keys", "values"), NAMES, ids=[keys for keys, _ in NAMES])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_scales_of_a_checkpoint_are_read_under_all_of_their_names(
    tmp_path: Path, on_the_cpu: None, keys: str, values: str, shape: tuple[int, ...]
) -> None:
    scales = {
        f"model.layers.0.{keys}": torch.full(shape, 0.25),
        f"model.layers.0.{values}": torch.full(shape, 3.0),
        f"model.layers.2.{values}": torch.full(shape, 0.5, dtype=torch.bfloat16),
    }
    folder = with_scales(make_model("llama-plain", tmp_path), scales)
    model = load_float8(folder, "fp8_e4m3")
    assert model.spec.kv_dtype == E4M3
    assert [layer.kv_scales for layer in attentions(model)] == [
        KvScales(0.25, 3.0), KvScales(1.0, 1.0), KvScales(1.0, 0.5),
    ]  # fmt: skip
    assert load_float8(folder, "fp8_e5m2").spec.kv_dtype == torch.float8_e5m2
    plain = load_model(str(folder), LoadOptions(dtype="float32")).model
    assert (plain.spec.kv_dtype, plain.spec.cache_dtype) == (None, torch.float32)
    assert all(layer.kv_scales == KvScales() for layer in attentions(plain))


def test_a_quantised_folder_keeps_its_scales(tmp_path: Path, on_the_cpu: None) -> None:
    folder = make_model("llama-plain", tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    tensors[name] = tensors[name].to(E4M3)
    tensors["model.layers.1.self_attn.k_scale"] = torch.tensor(0.125)
    save_file(tensors, file, {"format": "pt"})
    config = (folder / "config.json").read_text().rstrip().removesuffix("}")
    section = '"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}'
    (folder / "config.json").write_text(f"{config}, {section}}}")
    assert attentions(load_float8(folder))[1].kv_scales == KvScales(0.125, 1.0)


@pytest.mark.parametrize(
    ("scale", "rule"),
    [
        (torch.tensor(0.0), "must be a finite scale above 0; got 0.0"),
        (torch.tensor(float("nan")), "must be a finite scale above 0; got nan"),
        (torch.tensor(float("inf")), "must be a finite scale above 0; got inf"),
        (torch.ones(2), "must hold one scale for all heads"),
    ],
)
def test_a_scale_that_is_none_is_refused_by_the_name_of_its_tensor(
    tmp_path: Path, on_the_cpu: None, scale: torch.Tensor, rule: str
) -> None:
    name = "model.layers.1.self_attn.k_scale"
    folder = with_scales(make_model("llama-plain", tmp_path), {name: scale})
    with pytest.raises(UnsupportedModel, match=f"{name}.*{rule}"):
        load_float8(folder)


def test_a_tensor_that_only_looks_like_a_scale_is_still_unused(tmp_path: Path) -> None:
    folder = with_scales(
        make_model("llama-plain", tmp_path), {"model.layers.1.self_attn.scale": torch.ones(1)}
    )
    with pytest.raises(WeightsMismatch, match=r"self_attn\.scale"):
        load_model(str(folder))


def test_each_rank_of_a_group_has_the_scales_of_the_whole(folder: Path) -> None:
    from triolet.model.architectures.decoder_config import read_config
    from triolet.model.architectures.families import parse_decoder_config
    from triolet.model.folder.checkpoint import Checkpoint

    parsed = parse_decoder_config(read_config(folder), folder)
    scales = (KvScales(0.5, 2.0), KvScales(), KvScales(3.0, 1.0))
    kv_format = KvFormat(dtype=E4M3, scales=scales)
    rank = load_part(
        parsed, Checkpoint.open(folder), torch.float32, "cpu", None, None, Group(Part(rank=1, size=2), CPU), kv_format
    )  # fmt: skip
    for model in (rank.whole, rank.part):
        assert tuple(layer.kv_scales for layer in attentions(model)) == scales
    assert rank.spec.kv_bytes_per_token() == 3 * 2 * 1 * 32  # one of the two heads


# --------------------------------------------------------------------------------------------- answers


def rounded(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    return (tensor.float() / scale).clamp(-448, 448).to(E4M3).to(tensor.dtype) * scale


def test_answers_are_those_of_a_cache_that_holds_the_rounded_numbers(
    folder: Path, on_the_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(str(folder), LoadOptions(dtype="float32")).model
    assert isinstance(model, Decoder)
    scales = tuple(KvScales(0.02 * (index + 1), 0.3) for index in range(3))
    runner = ModelRunner(with_kv_format(model, KvFormat(dtype=E4M3, scales=scales)), **SIZES, device=CPU)
    got = [runner.execute(plan(step, "logprobs")).tokens for step in range(4)]

    # The same model whose cache is in float32, and whose writes round: nothing of what is tested takes part.
    writes = iter(range(10**6))

    def write(new: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: float) -> None:
        layer, is_value = divmod(next(writes) % 6, 2)
        factor = scales[layer].values if is_value else scales[layer].keys
        cache.flatten(0, 1)[slots] = rounded(new, factor)

    monkeypatch.setattr("triolet.model.backends.torch_decoder.kv_write", write)
    plain = ModelRunner(model, **SIZES, device=CPU)
    for step, tokens in enumerate(got):
        expected = plain.execute(plan(step, "logprobs")).tokens
        assert [row.token_id for row in tokens] == [row.token_id for row in expected]
        for ours, theirs in zip(tokens, expected, strict=True):
            assert ours.logprobs is not None
            assert theirs.logprobs is not None
            assert ours.logprobs.logprobs == pytest.approx(theirs.logprobs.logprobs, abs=1e-3)


def test_graphs_on_a_pretended_gpu_give_the_answers_of_plain_steps(folder: Path, on_the_cpu: None) -> None:
    model = load_model(str(folder), LoadOptions(dtype="float32")).model
    assert isinstance(model, Decoder)
    decoder = with_kv_format(model, KvFormat(dtype=E4M3, scales=(KvScales(0.05, 0.3),) * 3))
    plain = ModelRunner(decoder, **SIZES, device=CPU)
    with kernels_of_the_gpu():
        runner = make_gpu_runner(decoder)
        runner.capture_graphs()
        for step in range(4):
            expected = [row.token_id for row in plain.execute(plan(step, "greedy")).tokens]
            assert [row.token_id for row in runner.execute(plan(step, "greedy")).tokens] == expected


@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2"])
async def test_prefixes_are_found_in_the_cache_and_in_a_store(
    folder: Path, on_the_cpu: None, tmp_path: Path, kind: str
) -> None:
    prompt = [(7 * position) % 300 + 1 for position in range(150)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    fields: dict[str, Any] = {
        "runner": "inline", "dtype": "float32", "num_kv_blocks": 64, "log_stats": False,
        "kv_store": str(tmp_path / "store"),
    }  # fmt: skip
    answers = []
    for turn in range(2):
        async with open_engine(model=str(folder), kv_cache_dtype=kind, **fields) as engine:
            for _ in range(2):
                output = await engine.complete(prompt, params)
                answers.append(tuple(output.outputs[0].token_ids))
            statistics = engine.statistics()
        assert statistics.prefix_cache_hits > 0
        assert statistics.external_prefix_cache_hits == (144 if turn else 0)
    assert len(set(answers)) == 1
    async with open_engine(model=str(folder), **fields) as engine:  # of another dtype: its blocks are its own
        await engine.complete(prompt, params)
        assert engine.statistics().external_prefix_cache_hits == 0


# -------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("kind", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_a_cpu_refuses_it_and_says_what_it_needs(folder: Path, kind: str) -> None:
    config = EngineConfig(model=str(folder), device="cpu", kv_cache_dtype=kind)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype must be auto on a CPU: .* needs CUDA") as caught:
        load_runner(config, lambda _: None)
    assert (caught.value.field, caught.value.got) == ("kv_cache_dtype", kind)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("deepseek-v2", "latent attention"),
        ("granite-hybrid-dense", "recurrent layers"),
        ("persimmon", "native decoder"),
    ],
)
def test_models_without_such_keys_and_values_refuse_it_by_name(
    tmp_path: Path, on_the_cpu: None, family: str, reason: str
) -> None:
    if family == "persimmon":
        save_model(tmp_path, "PersimmonForCausalLM")
        folder = tmp_path
    else:
        folder = make_model(family, tmp_path)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype must be auto for .*needs CUDA") as caught:
        load_model(str(folder), LoadOptions(kv_cache_dtype="fp8"))
    assert reason in caught.value.rule


def test_an_unknown_format_is_refused_with_those_that_there_are() -> None:
    rule = "kv_cache_dtype must be one of auto, fp8, fp8_e4m3, fp8_e5m2; got 'int4'"
    with pytest.raises(ConfigError, match=rule):
        EngineConfig(kv_cache_dtype="int4")
    with pytest.raises(ConfigError, match=rule):
        EngineArgs(kv_cache_dtype="int4")


def test_vllms_argument_is_taken_and_means_the_same() -> None:
    arguments = EngineArgs("folder", kv_cache_dtype="fp8")
    assert arguments.config == EngineConfig(model="folder", kv_cache_dtype="fp8")
    assert arguments.kv_cache_dtype == "fp8"
    assert EngineArgs("folder", kv_cache_dtype="auto").config == EngineConfig(model="folder")


def test_gpus_without_the_instruction_for_e4m3_refuse_it_and_no_other_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: (8, 6))
    with pytest.raises(
        ConfigError, match="kv_cache_dtype must be auto or fp8_e5m2 on a GPU of compute capability"
    ):
        LoadOptions(device="cuda:0", kv_cache_dtype="fp8").check()
    LoadOptions(device="cuda:0", kv_cache_dtype="fp8_e5m2").check()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: (8, 9))
    LoadOptions(device="cuda:0", kv_cache_dtype="fp8").check()
