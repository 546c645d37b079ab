"""The models of `triolet serve`: --model several times, --models FILE, presets; `ps` and `stop` against a server."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner, Result

from triolet.cli import main
from triolet.cli.models import running
from triolet.config.engine import EngineConfig
from triolet.config.server import GatewayConfig
from triolet.errors import ConfigError
from triolet.server.models.host import FurtherModel

SERVED = tuple[EngineConfig, Mapping[str, FurtherModel]]
RUN = Callable[..., Result]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[SERVED]:
    served: list[SERVED] = []

    def run(gateway: GatewayConfig, config: EngineConfig, models: Mapping[str, FurtherModel]) -> None:
        served.append((config, models))

    # As an attribute of the package, `serve` is the command.
    monkeypatch.setattr(importlib.import_module("triolet.cli.serve"), "run", run)
    return served


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "models.toml"
    path.write_text(
        '[presets.poet]\nmodel = "some/poet"\nengine = { block_size = 32 }\n[presets.nano]\n',
        encoding="utf-8",
    )
    monkeypatch.setenv("TRIOLET_CONFIG", str(tmp_path / "none"))
    (tmp_path / "none").touch()
    return path


@pytest.fixture
def run() -> RUN:
    return lambda *arguments, **more: CliRunner().invoke(main, arguments, **more)


def test_each_model_has_its_name_and_the_flags_count_for_all(
    run: RUN, served: list[SERVED], file: Path
) -> None:
    environ = {"TRIOLET_MODEL": "other", "TRIOLET_MAX_NUM_SEQS": "3"}
    models = ["a=some/model", "-m", "b=some/other", "-m", "more/c"]
    result = run("serve", "--model", *models, "--block-size", "64", env=environ)
    assert result.exit_code == 0, result.stderr
    [(first, others)] = served
    configs = [first, *(other.config for other in others.values())]
    assert list(others) == ["b", "c"]
    assert [one.model_name for one in configs] == ["a", "b", "c"]
    assert [one.model for one in configs] == ["some/model", "some/other", "more/c"]
    assert {(one.block_size, one.max_num_seqs, one.runner) for one in configs} == {(64, 3, "process")}


def test_every_preset_of_a_file_is_served_and_its_fields_are_its_own(
    run: RUN, served: list[SERVED], file: Path
) -> None:
    assert run("serve", "--models", str(file)).exit_code == 0
    [(first, others)] = served
    assert (first.model, first.model_name, first.block_size) == ("some/poet", "poet", 32)
    nano = others["nano"]
    assert (nano.config.model_name, nano.config.block_size) == ("nano", None)
    assert nano.size_bytes > 100_000


def test_one_model_is_served_as_ever(run: RUN, served: list[SERVED], file: Path) -> None:
    assert run("serve", "some/model", "--served-model-name", "x").exit_code == 0
    assert run("serve", env={"TRIOLET_MODEL": "other/model"}).exit_code == 0
    assert [(first.model, first.model_name, dict(others)) for first, others in served] == [
        ("some/model", "x", {}),
        ("other/model", "model", {}),
    ]


def test_one_model_has_several_names(run: RUN, served: list[SERVED], file: Path) -> None:
    assert run("serve", "some/model", "--served-model-name", "x, y").exit_code == 0
    assert served[0][0].model_names == ("x", "y", "some/model")


@pytest.mark.parametrize(
    "arguments",
    [
        ["some/model", "--served-model-name", "x", "y"],
        ["--model", "some/model", "--served-model-name", "x", "y"],
    ],
)
def test_names_of_a_model_without_a_comma_are_refused_with_how_they_are_written(
    run: RUN, served: list[SERVED], file: Path, arguments: list[str]
) -> None:
    result = run("serve", *arguments)
    assert result.exit_code == 2 and served == []
    assert "several names of a model have commas between them: --served-model-name NAME,NAME" in " ".join(
        result.stderr.split()
    )


def test_a_server_renders_chats_with_the_template_of_the_preset_that_it_serves(
    run: RUN, served: list[SERVED], file: Path
) -> None:
    (file.parent / "chat.jinja").write_text("{{ messages }}\n", encoding="utf-8")
    file.write_text("[presets.poet]\ntemplate = '@chat.jinja'\n[presets.nano]\n", encoding="utf-8")
    environ = {"TRIOLET_CONFIG": str(file)}
    for arguments, expected in (
        (["poet"], "{{ messages }}"),
        (["poet", "--chat-template", "{{ messages[0] }}"], "{{ messages[0] }}"),
        (["-m", "nano", "-m", "poet"], None),
    ):
        result = run("serve", *arguments, env=environ)
        assert (result.exit_code, result.stderr) == (0, "")
        assert served[-1][0].chat_template == expected
    assert served[-1][1]["poet"].config.chat_template == "{{ messages }}"


def test_a_chat_template_of_the_command_line_is_that_of_the_first_model(
    run: RUN, served: list[SERVED], file: Path
) -> None:
    assert run("serve", "--models", str(file), "--chat-template", "{{ messages }}").exit_code == 0
    [(first, others)] = served
    assert (first.chat_template, others["nano"].config.chat_template) == ("{{ messages }}", None)


def test_adapters_of_the_command_line_are_those_of_the_first_model(
    run: RUN, served: list[SERVED], file: Path
) -> None:
    file.write_text(
        "[presets.poet]\n[presets.nano]\nengine = { lora_modules = 'own=folder', enable_lora = true }\n"
        "[presets.plain]\n",
        encoding="utf-8",
    )
    given = ("--enable-lora", "--lora-modules", "sql=folder")
    environ = {"TRIOLET_PROMPT_ADAPTERS": "polite=folder"}
    result = run("serve", "--models", str(file), *given, env=environ)
    assert result.exit_code == 0, result.stderr
    [(first, others)] = served
    configs = (first, others["nano"].config, others["plain"].config)
    assert [one.lora_modules for one in configs] == [("sql=folder",), ("own=folder",), ()]
    assert [one.prompt_adapters for one in configs] == [("polite=folder",), (), ()]
    assert {one.enable_lora for one in configs} == {True}


@pytest.mark.parametrize(
    ("first", "second", "field"),
    [
        ({"lora_modules": ("b=x",)}, {}, "lora_modules"),
        ({"prompt_adapters": ("b=x",)}, {}, "prompt_adapters"),
        ({"prompt_adapters": ("a=x",)}, {}, "prompt_adapters"),
        ({"lora_modules": ("a/model=x",)}, {}, "lora_modules"),
        ({"lora_modules": ("also=x",)}, {}, "lora_modules"),
        ({}, {"lora_modules": ("a=x",)}, "lora_modules"),
        ({"lora_modules": ("sql=x",)}, {"prompt_adapters": ("sql=y",)}, "prompt_adapters"),
        ({"lora_modules": ("sql=x", "sql=y")}, {}, "lora_modules"),
    ],
)
def test_an_adapter_has_the_name_of_no_model_and_of_no_other_adapter(
    first: dict[str, Any], second: dict[str, Any], field: str
) -> None:
    config = EngineConfig(model="a/model", served_model_name=("a", "also"), enable_lora=True, **first)
    other = EngineConfig(served_model_name="b", enable_lora=True, **second)
    models = {"b": FurtherModel(config=other)}
    entry = [*first.get(field, ()), *second.get(field, ())][-1]
    serve = importlib.import_module("triolet.cli.serve")
    with pytest.raises(ConfigError) as caught:  # before a model is loaded
        serve.run(GatewayConfig(), config, models)
    assert str(caught.value) == f"{field} must be names that no model and no other adapter has; got {entry!r}"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["a=x", "-m", "a=y"], "the names of models must differ; got 'a' twice"),
        (["a=x", "-m", "b=y", "--served-model-name", "c"], "--served-model-name is for one model"),
        (["--models", "/nowhere.toml"], "does not exist"),
        (["a=x", "-m", "b=y", "--block-size", "0"], "--block-size must be"),
    ],
    ids=str,
)
def test_models_that_cannot_be_served_together_are_refused(
    run: RUN, served: list[SERVED], file: Path, arguments: list[str], sentence: str
) -> None:
    result = run("serve", *arguments)
    assert sentence in result.stderr and result.exit_code == 2
    assert served == []


@pytest.mark.parametrize(
    "arguments",
    [["--models", "FILE"], ["-m", "one", "-m", "two"], ["mine=one"], ["-m", "two", "-m", "one"]],
    ids=str,
)
def test_a_preset_names_its_model_only_where_that_is_the_only_one(
    run: RUN, served: list[SERVED], file: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("[presets.one.engine]\nserved_model_name = 'uno'\n[presets.two]\n", encoding="utf-8")
    monkeypatch.setenv("TRIOLET_CONFIG", str(file))
    result = run("serve", *(str(file) if one == "FILE" else one for one in arguments))
    name = "mine" if arguments == ["mine=one"] else "one"
    assert f"engine.served_model_name of preset {name} must be left out with --models, " in result.stderr
    assert (result.exit_code, served) == (2, [])
    assert run("serve", "one").exit_code == 0
    assert served[0][0].model_name == "uno"


def test_a_flag_for_all_models_counts_with_what_a_preset_gives_beside_it(
    run: RUN, served: list[SERVED], file: Path
) -> None:
    file.write_text(
        "[presets.a]\n[presets.b.engine]\nlora_modules = ['sql=folder']\n[presets.c]\n", encoding="utf-8"
    )
    refused = run("serve", "--models", str(file))
    assert "--lora-modules must be given together with enable_lora; got ('sql=folder',)" in refused.stderr
    assert (refused.exit_code, served) == (2, [])
    assert run("serve", "--models", str(file), "--enable-lora").exit_code == 0
    assert served[0][1]["b"].config.lora_modules == ("sql=folder",)


def test_ps_shows_states_and_stop_says_what_happens(run: RUN, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"id": "a", "state": "loaded", "num_requests": 2, "unloads_in_s": None}
    third = {"id": "kept", "state": "loaded", "num_requests": 0, "unloads_in_s": None}
    second = {
        "id": "long-name",
        "state": "loaded",
        "num_requests": 1,
        "size_bytes": 5_000,
        "unloads_in_s": 7.4,
    }

    async def get_json(address: Any, path: str) -> Any:
        await trio.lowlevel.checkpoint()
        return {"data": [first, second, third]}

    async def stop(address: Any, model: str) -> Any:
        await trio.lowlevel.checkpoint()
        return {"stopping": model != "idle", "num_requests": int(model == "busy"), "state": "unloaded"}

    monkeypatch.setattr(running, "get_json", get_json)
    monkeypatch.setattr(running, "_stop", stop)
    assert run("ps").stdout.splitlines() == [
        "MODEL      STATE      REQUESTS       SIZE  UNLOADED",
        "a          loaded            2",
        "long-name  loaded            1     5.0 kB  in 7 s",
        "kept       loaded            0             never",
    ]
    assert [json.loads(line) for line in run("ps", "--json").stdout.splitlines()] == [first, second, third]
    told = [run("stop", model).stdout for model in ("busy", "free", "idle")]
    assert told == [
        "busy is unloaded when its 1 requests have ended\n",
        "free is unloaded\n",
        "idle was not loaded (unloaded)\n",
    ]


def test_a_server_that_is_not_there_is_one_line(run: RUN) -> None:
    result = run("ps", "--url", "http://127.0.0.1:9")
    assert result.stderr == ("triolet: error: cannot connect to http://127.0.0.1:9/v1: Connection refused\n")
    assert result.exit_code == 1
