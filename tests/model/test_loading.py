"""Loading by name: which backend, which dtype, what is told on the way, and code that must not run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.paged import PagedDriver
from tests.model.tiny import change_json, make_model
from triolet.core.load_progress import LoadProgress
from triolet.errors import ConfigError, ModelFileError, ModelNotFound, RemoteCodeRefused, UnsupportedModel
from triolet.model.loading.model import load_model
from triolet.model.loading.options import LoadOptions


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"), dtype=torch.bfloat16, eos_token_id=7)


def test_a_loaded_model_says_what_it_is(llama: Path) -> None:
    loaded = load_model(str(llama))
    spec = loaded.model.spec
    assert (spec.architecture, spec.backend, spec.dtype) == ("LlamaForCausalLM", "native", torch.bfloat16)
    assert (spec.vocab_size, spec.max_position, len(spec.cache_layers)) == (320, 256, 3)
    assert spec.kv_bytes_per_token() == 3 * 2 * 2 * 16 * 2
    assert loaded.folder == llama
    assert loaded.generation_defaults.eos_token_ids == (7,)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_dtype_asked_for_is_the_dtype_of_the_logits(dtype: str, llama: Path) -> None:
    logits = PagedDriver(load_model(str(llama), LoadOptions(dtype=dtype)).model).once([1, 2, 3])
    assert logits.dtype == getattr(torch, dtype)
    assert logits.isfinite().all()


def test_an_unknown_dtype_is_a_configuration_error(llama: Path) -> None:
    with pytest.raises(
        ConfigError, match="dtype must be one of auto, float32, bfloat16, float16; got 'int8'"
    ):
        load_model(str(llama), LoadOptions(dtype="int8"))


def test_a_model_is_not_stretched_beyond_its_positions(llama: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len must be at most 256 tokens for this model; got 257"):
        load_model(str(llama), LoadOptions(max_model_len=257))


def test_a_shorter_limit_makes_shorter_tables(llama: Path) -> None:
    assert load_model(str(llama), LoadOptions(max_model_len=40)).model.spec.max_position == 40


def test_progress_counts_the_bytes_of_every_weight(llama: Path) -> None:
    reports: list[LoadProgress] = []
    load_model(str(llama), on_progress=reports.append)
    assert {report.stage for report in reports} == {"weights"}
    done = [report.done_bytes for report in reports]
    assert done == sorted(set(done))
    header_bytes = 8 + int.from_bytes((llama / "model.safetensors").read_bytes()[:8], "little")
    assert done[-1] == reports[0].total_bytes == (llama / "model.safetensors").stat().st_size - header_bytes


@pytest.mark.slow
def test_native_loading_imports_neither_transformers_nor_the_hub(llama: Path) -> None:
    program = (
        "import sys; from triolet.model.loading.model import load_model; "
        f"load_model({str(llama)!r}); "
        "assert not {'transformers', 'huggingface_hub'} & set(sys.modules), 'imported'"
    )
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
        ("ernie4.5-moe", {"use_bias": True}),
    ],
)
def test_a_config_that_the_native_decoder_does_not_take_is_left_to_transformers(
    family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    assert load_model(str(make_model(family, tmp_path / "own"))).model.spec.backend == "native"
    assert (
        load_model(str(make_model(family, tmp_path / "other", **fields))).model.spec.backend == "transformers"
    )


def test_a_head_is_found_under_its_older_and_its_newer_name(tmp_path: Path) -> None:
    folder = make_model("gpt-neox", tmp_path)
    logits = PagedDriver(load_model(str(folder)).model).once([3, 1, 4])
    tensors = load_file(folder / "model.safetensors")
    [name] = {"embed_out.weight", "lm_head.weight"} & tensors.keys()
    other = {"embed_out.weight": "lm_head.weight", "lm_head.weight": "embed_out.weight"}[name]
    tensors[other] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")
    assert PagedDriver(load_model(str(folder)).model).once([3, 1, 4]).equal(logits)


def test_an_activation_without_the_numbers_that_are_the_same_everywhere_has_them_all_the_same(
    tmp_path: Path,
) -> None:
    folder = make_model("apertus", tmp_path)
    logits = PagedDriver(load_model(str(folder)).model).once([3, 1, 4])
    tensors = load_file(folder / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if not name.endswith((".beta", ".eps"))}
    assert len(kept) == len(tensors) - 2 * 3
    save_file(kept, folder / "model.safetensors")
    assert PagedDriver(load_model(str(folder)).model).once([3, 1, 4]).equal(logits)


# ------------------------------------------------------------------------------- what cannot be loaded


def test_a_path_that_is_no_folder_is_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nowhere"):
        load_model(str(tmp_path / "nowhere"))


def test_an_unknown_architecture_is_unsupported(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path)
    change_json(folder / "config.json", architectures=["UnknownForCausalLM"], model_type="unknown_model")
    with pytest.raises(UnsupportedModel, match="UnknownForCausalLM"):
        load_model(str(folder))


def test_a_folder_with_a_broken_generation_config_is_refused(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"generation_config.json: is not JSON"):
        load_model(str(folder))


# -------------------------------------------------------------------------------------------- foreign code


@pytest.fixture
def with_code(tmp_path: Path) -> tuple[Path, Path]:
    """A folder whose auto_map names a module, and the file that the module would write if it ran."""
    folder, trace = make_model("llama", tmp_path / "model"), tmp_path / "ran"
    (folder / "modeling_own.py").write_text(
        f"from pathlib import Path\nPath({str(trace)!r}).touch()\nclass OwnConfig: ...\nclass OwnForCausalLM: ...\n"
    )
    auto_map = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    change_json(folder / "config.json", auto_map=auto_map)
    return folder, trace


def test_code_of_a_model_is_refused_before_it_runs(with_code: tuple[Path, Path]) -> None:
    folder, trace = with_code
    change_json(folder / "config.json", architectures=["OwnForCausalLM"], model_type="own")
    with pytest.raises(RemoteCodeRefused, match=r"OwnForCausalLM.*auto_map.*trust_remote_code"):
        load_model(str(folder))
    assert not trace.exists()


@pytest.mark.parametrize("trust", [False, True])
def test_a_native_architecture_runs_no_code_of_the_model(trust: bool, with_code: tuple[Path, Path]) -> None:
    folder, trace = with_code
    assert load_model(str(folder), LoadOptions(trust_remote_code=trust)).model.spec.backend == "native"
    assert not trace.exists()
