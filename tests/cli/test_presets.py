"""Presets of a TOML file: named as MODEL, shown by `triolet config`, and refused with field, rule and value."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import triolet
from tests.cli.fake_engine import FakeEngine, open_fake_engine
from triolet.cli import main
from triolet.cli.models.presets import PresetError, find_file

RUN = Callable[..., Result]
PRESETS = """
[presets.brief]
model = "some/model"
system = "@brief.txt"
template = "{{ messages[0].content }}"
sampling = { temperature = 0.5, stop = ["###"] }
engine = { block_size = 32, enable_prefix_caching = false, api_keys = ["hidden"] }

[presets.plain]
sampling = { max_tokens = 3 }
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "presets.toml"
    path.write_text(PRESETS, encoding="utf-8")
    (tmp_path / "brief.txt").write_text("Be brief.\n", encoding="utf-8")
    monkeypatch.setenv("TRIOLET_CONFIG", str(path))
    return path


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    engines: list[FakeEngine] = []

    def open_engine(*args: Any, **kwargs: Any) -> Any:
        return open_fake_engine(*args, opened=engines, **kwargs)

    monkeypatch.setitem(vars(triolet), "open_engine", open_engine)
    return engines


@pytest.fixture
def run() -> RUN:
    return lambda *arguments, **more: CliRunner().invoke(main, arguments, **more)


def test_a_preset_sets_model_engine_system_template_and_sampling(
    run: RUN, engines: list[FakeEngine], file: Path
) -> None:
    assert run("chat", "brief", "-q", "hi").exit_code == 0
    engine = engines[0]
    assert (engine.config.model, engine.config.block_size) == ("some/model", 32)
    assert engine.config.enable_prefix_caching is False
    asked: Any = engine.asked[0]
    assert asked[0] == {"role": "system", "content": "Be brief."}
    assert engine.config.chat_template == "{{ messages[0].content }}"
    assert (engine.params[0].temperature, engine.params[0].stop) == (0.5, ("###",))


def test_a_preset_without_a_model_is_triolet_nano_whatever_the_environment_says(
    run: RUN, engines: list[FakeEngine], file: Path
) -> None:
    result = run("generate", "-p", "count to 2", "--json", env={"TRIOLET_MODEL": "plain"})
    assert json.loads(result.stdout)["model"] == "triolet-nano"
    assert engines[0].config.model is None


def test_a_flag_wins_over_the_preset_and_the_preset_over_the_environment(
    run: RUN, engines: list[FakeEngine], file: Path
) -> None:
    environ = {"TRIOLET_MODEL": "brief", "TRIOLET_BLOCK_SIZE": "64", "TRIOLET_MAX_NUM_SEQS": "7"}
    flags = ["--temperature", "0", "--system", "Sing.", "--enable-prefix-caching"]
    assert run("chat", "-q", "hi", *flags, env=environ).exit_code == 0
    engine = engines[0]
    assert (engine.config.model, engine.config.block_size) == ("some/model", 32)
    assert (engine.config.enable_prefix_caching, engine.config.max_num_seqs) == (True, 7)
    asked: Any = engine.asked[0]
    assert (asked[0]["content"], engine.params[0].temperature) == ("Sing.", 0)


def test_a_value_of_a_preset_that_is_raised_is_told_of_once_where_it_is_used(
    run: RUN, engines: list[FakeEngine], file: Path
) -> None:
    file.write_text("[presets.cold]\nsampling = { temperature = 0.001 }\n[presets.other]\n", encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        used = run("chat", "cold", "-q", "hi")
        others = [
            run(*command)
            for command in (
                ("config",),
                ("chat", "other", "-q", "hi"),
                ("chat", "cold", "-q", "hi", "--temperature", "0.5"),
            )
        ]
    assert used.stderr == "triolet: warning: temperature 0.001 is raised to 0.01\n"
    assert [(one.stderr, one.exit_code) for one in others] == [("", 0)] * 3
    assert [one.params[0].temperature for one in engines] == [0.01, 0.7, 0.5]


def test_one_preset_is_shown_whatever_another_one_holds(run: RUN, file: Path) -> None:
    file.write_text(PRESETS + "[presets.wrong]\nmodel = 3\n", encoding="utf-8")
    shown = run("config", "plain")
    assert (shown.exit_code, shown.stdout) == (0, "\nplain\n  sampling.max_tokens = 3\n")
    assert "presets.wrong.model must be" in run("config").stderr
    missing = run("config", "plane")
    assert (missing.exit_code, missing.stderr) == (
        2,
        f"triolet: error: there is no preset 'plane' in {file}\n",
    )


def test_config_shows_the_presets_without_secrets(run: RUN, file: Path) -> None:
    found = json.loads(run("config", "--json", env={"TRIOLET_API_KEYS": "hidden"}).stdout)
    assert found["file"] == str(file)
    assert [one["name"] for one in found["presets"]] == ["brief", "plain"]
    assert found["presets"][0]["system"] == "Be brief."
    assert found["environment"]["TRIOLET_API_KEYS"] == "(set)"
    shown = run("config", "brief").stdout
    assert "engine.block_size" in shown and "hidden" not in shown + json.dumps(found)


def test_the_first_file_of_the_usual_places_is_read(tmp_path: Path, file: Path) -> None:
    own = tmp_path / "triolet" / "config.toml"
    own.parent.mkdir()
    own.touch()
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert find_file(environ) == own
    assert find_file({**environ, "TRIOLET_CONFIG": str(file)}) == file


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[presets.x]\nmodell = 'a'", "presets.x must have only the fields engine, model, sampling,"),
        ("[presets.x.engine]\nchat_template = 'a'", "presets.x.engine must have only the fields "),
        ("[presets.x]\nmodel = 3", "presets.x.model must be a non-empty text; got 3"),
        (
            "[presets.x.engine]\nblock_size = 'b'",
            "presets.x.engine.block_size must be a whole number, or none; got",
        ),
        ("[presets.x.sampling]\ntop_p = 7", "presets.x.sampling: top_p must be"),
        ("[presets.x]\nsystem = '@no.txt'", "presets.x.system must name a readable text file; "),
        ("[presets.x]\nsystem = '@~no-such-user/a'", "presets.x.system must name a readable text file; "),
        ("presets = 1", "presets must be a table; got 1"),
        ("[presets", "must be readable TOML; "),
    ],
)
def test_a_wrong_file_is_a_wrong_configuration_refused_with_field_rule_and_value(
    run: RUN, engines: list[FakeEngine], file: Path, text: str, sentence: str
) -> None:
    file.write_text(text, encoding="utf-8")
    for command in (["config"], ["chat", "x", "-q", "hi"], ["serve", "--models", str(file)]):
        result = run(*command)
        assert sentence in result.stderr and str(file) in result.stderr
        assert (result.stderr.count("\n"), result.exit_code) == (1, 2)
    assert engines == []


def test_a_file_of_presets_in_the_folder_of_an_unknown_user_is_missing() -> None:
    with pytest.raises(PresetError, match="TRIOLET_CONFIG must name a file; got '~no-such-user/a'"):
        find_file({"TRIOLET_CONFIG": "~no-such-user/a"})


def test_settings_of_the_engine_are_refused_beside_a_server(run: RUN, file: Path) -> None:
    result = run("chat", "brief", "-q", "hi", "--url", "http://127.0.0.1:1")
    assert "preset brief has a template or engine fields" in result.stderr
    assert result.exit_code == 2
