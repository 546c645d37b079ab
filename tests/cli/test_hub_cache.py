"""`triolet list`, `show`, `pull` and `rm` on a cache in the hub's own layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from triolet.cli import main

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
