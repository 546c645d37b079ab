"""`triolet list`, `show`, `pull` and `rm` on a cache in the hub's own layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from click.testing import CliRunner, Result

from triolet.cli import main
from triolet.cli.models.hub_cache import weight_bytes

RUN = Callable[..., Result]


def add_model(cache: Path, name: str, commit: str, weights: bytes) -> Path:
    """Write a model as the hub's library does: blobs, and snapshots that link to them."""
    repository = cache / ("models--" + name.replace("/", "--"))
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir(exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit, encoding="utf-8")
    config = b'{"architectures": ["LlamaForCausalLM"], "hidden_size": 64}'
    for file, content in (("config.json", config), ("model.safetensors", weights)):
        blob = repository / "blobs" / f"{file}-{hash(content) & 0xFFFFFF:x}"
        blob.write_bytes(content)
        (snapshot / file).symlink_to(blob)
    return snapshot


def add_gguf_files(cache: Path, name: str, *files: str) -> Path:
    """Write a repository of GGUF files, each with a matrix of Q8_0 and the keys of a model."""
    snapshot = cache / ("models--" + name.replace("/", "--")) / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    for folder in ("blobs", "refs"):
        (snapshot.parent.parent / folder).mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("c" * 40, encoding="utf-8")
    for file in files:
        writer = gguf.GGUFWriter(snapshot / file, "llama")
        for add, value in ((writer.add_context_length, 4096), (writer.add_block_count, 2)):
            add(value)
        writer.add_embedding_length(64)
        writer.add_token_list(["a", "b", "c"])
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(
            "token_embd.weight", gguf.quantize(np.ones((3, 64), np.float32), kind), raw_dtype=kind
        )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        (blob := snapshot.parent.parent / "blobs" / file).write_bytes((snapshot / file).read_bytes())
        (snapshot / file).unlink()
        (snapshot / file).symlink_to(blob)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return folder


@pytest.fixture
def run(cache: Path) -> RUN:
    return lambda *arguments, **more: CliRunner().invoke(main, arguments, **more)


def test_models_are_listed_without_a_cache_too(run: RUN) -> None:
    result = run("list")
    assert result.stdout.splitlines()[1:] == ["triolet-nano             ships with triolet"]
    assert (result.stderr, result.exit_code) == ("", 0)


def test_the_model_that_ships_with_the_program_is_listed_as_json_with_the_fields_of_others(
    run: RUN, cache: Path
) -> None:
    add_model(cache, "some/model", "a" * 40, b"w")
    built_in, other = [json.loads(line) for line in run("list", "--json").stdout.splitlines()]
    assert built_in["name"] == "triolet-nano" and built_in.keys() == other.keys()
    assert built_in["size_bytes"] == json.loads(run("show", "triolet-nano", "--json").stdout)["size_bytes"]


def test_a_model_of_the_cache_is_listed_shown_and_deleted(run: RUN, cache: Path) -> None:
    snapshot = add_model(cache, "some/model", "a" * 40, b"w" * 5000)
    add_model(cache, "other/model", "b" * 40, b"x")
    rows = [json.loads(line) for line in run("list", "--json").stdout.splitlines()[1:]]
    assert [(row["name"], row["size_bytes"], row["has_weights"]) for row in rows] == [
        ("other/model", 59, True),
        ("some/model", 5058, True),
    ]
    shown = json.loads(run("show", "some/model", "--json").stdout)
    assert (shown["folder"], shown["architecture"], shown["size_bytes"]) == (
        str(snapshot),
        "LlamaForCausalLM",
        5058,
    )
    kept = run("rm", "some/model", input="n\n")
    assert kept.exit_code == 1 and snapshot.exists()
    deleted = run("rm", "some/model", "--yes")
    assert deleted.stdout == "deleted some/model: 5.1 kB are free again\n"
    assert [path.name for path in cache.iterdir() if path.name.startswith("models--")] == [
        "models--other--model"
    ]


def test_one_revision_can_be_deleted_and_the_other_one_stays(run: RUN, cache: Path) -> None:
    old = add_model(cache, "some/model", "a" * 40, b"old")
    new = add_model(cache, "some/model", "b" * 40, b"new!")
    assert run("rm", "some/model", "--revision", "aaaa", "-y").exit_code == 0
    assert not old.exists() and (new / "config.json").is_file()


def test_a_copy_of_a_repository_with_the_same_commit_is_not_deleted_with_it(run: RUN, cache: Path) -> None:
    kept, gone = (add_model(cache, name, "a" * 40, b"w") for name in ("some/model", "copy/model"))
    assert run("rm", "copy/model", "-y").exit_code == 0
    assert (kept.exists(), gone.exists()) == (True, False)


def test_a_wrong_name_beside_a_right_one_deletes_nothing(run: RUN, cache: Path) -> None:
    snapshot = add_model(cache, "some/model", "a" * 40, b"w")
    result = run("rm", "some/model", "Some/Mode", "-y")
    assert result.stderr == (
        "triolet: error: model 'Some/Mode' is not in the cache of this machine; did you mean some/model?\n"
    )
    assert result.exit_code == 1 and snapshot.exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["show", "no/such"], "model 'no/such' is not in the cache of this machine; `triolet list` shows"),
        (
            ["rm", "some/model", "--revision", "c", "-y"],
            "--revision must be one of model 'some/model' (aaaaaaaa)",
        ),
        (["pull", "triolet-nano"], "model 'triolet-nano' is on this machine already"),
        (["pull", "no/such"], "model 'no/such' is not in the local cache"),
        (["pull", "not an id"], "model must be a folder with a config.json or a hub id; got 'not an id'"),
    ],
    ids=str,
)
def test_a_wrong_name_is_answered_with_one_clear_line(
    run: RUN, cache: Path, arguments: list[str], sentence: str
) -> None:
    add_model(cache, "some/model", "a" * 40, b"w")
    result = run(*arguments)
    assert result.stderr.startswith("triolet: error: " + sentence)
    assert (result.stderr.count("\n"), result.exit_code) == (1, 1)


def test_the_model_that_ships_with_the_program_can_be_shown(run: RUN) -> None:
    shown = json.loads(run("show", "triolet-nano", "--json").stdout)
    assert shown["architecture"] == "LlamaForCausalLM" and shown["size_bytes"] > 100_000


def test_gguf_files_of_the_cache_are_listed_and_shown_under_the_names_that_load_them(
    run: RUN, cache: Path
) -> None:
    snapshot = add_gguf_files(cache, "some/tiny-GGUF", "tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf")
    rows = run("list").stdout.splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["some/tiny-GGUF:Q4_K_M", "some/tiny-GGUF:Q8_0"]
    size = (snapshot / "tiny-Q8_0.gguf").stat().st_size
    shown = json.loads(run("show", "some/tiny-GGUF:q8_0", "--json").stdout)
    assert shown == {
        "model": "some/tiny-GGUF:q8_0",
        "folder": str(snapshot / "tiny-Q8_0.gguf"),
        "size_bytes": size,
        "revisions": ["c" * 40],
        "architecture": "llama",
        "max_position_embeddings": 4096,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "vocab_size": 3,
        "quantization": "Q8_0",
    }
    whole = json.loads(run("show", "some/tiny-GGUF", "--json").stdout)
    assert (whole["gguf"], whole["size_bytes"]) == ({"Q4_K_M": size, "Q8_0": size}, 2 * size)
    local = json.loads(run("show", str(snapshot / "tiny-Q8_0.gguf"), "--json").stdout)
    assert (local["architecture"], local["size_bytes"]) == ("llama", size)
    assert [weight_bytes(f"some/tiny-GGUF:{kind}") for kind in ("Q8_0", "q8_0", "Q2_K")] == [size, size, 0]


def test_a_gguf_file_is_deleted_by_its_name_only_where_it_is_the_only_one(run: RUN, cache: Path) -> None:
    kept = add_gguf_files(cache, "some/two-GGUF", "tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf")
    gone = add_gguf_files(cache, "some/one-GGUF", "tiny-Q8_0.gguf")
    refused = run("rm", "some/two-GGUF:Q8_0", "-y")
    assert refused.stderr == (
        "triolet: error: some/two-GGUF:Q8_0 cannot be deleted alone; `triolet rm some/two-GGUF` deletes all of "
        "some/two-GGUF:Q4_K_M, some/two-GGUF:Q8_0\n"
    )
    assert run("rm", "some/one-GGUF:Q8_0", "-y").exit_code == 0
    assert (refused.exit_code, len(list(kept.iterdir())), gone.exists()) == (1, 2, False)
    unknown = run("rm", "some/two-GGUF:Q2_K", "-y").stderr
    assert "must be one of its GGUF files in the cache (Q4_K_M, Q8_0); got 'Q2_K'" in unknown


@pytest.mark.parametrize("answer", ["n\n", "\n", ""])
def test_a_deletion_that_is_not_confirmed_says_that_nothing_was_deleted(
    run: RUN, cache: Path, answer: str
) -> None:
    snapshot = add_model(cache, "some/model", "a" * 40, b"w")
    result = run("rm", "some/model", input=answer)
    assert result.stderr.splitlines()[-1] == "triolet: error: nothing was deleted"
    assert result.exit_code == 1 and snapshot.exists()
