"""Flags, environment and defaults, and their precedence."""

from __future__ import annotations

import io
import json
from pathlib import Path

import attrs
import click
import pytest
from click.testing import CliRunner

from triolet.cli import main, options
from triolet.config.engine import EngineConfig
from triolet.config.fields import rule_of
from triolet.config.server import GatewayConfig
from triolet.core.request.params import SAMPLING_PARAMETERS


@pytest.mark.parametrize("command", ["chat", "generate", "serve"])
def test_every_field_of_the_configuration_has_a_flag_with_its_help(command: str) -> None:
    shown = " ".join(CliRunner().invoke(main, [command, "--help"], terminal_width=400).output.split())
    for field in attrs.fields(EngineConfig):
        assert f"--{field.name.replace('_', '-')} " in shown
    for field in attrs.fields(EngineConfig):
        # `--seed` of `chat` and `generate` is the request's.
        assert (field.name == "seed" and command != "serve") or field.metadata["help"] in shown


def test_a_flag_wins_over_the_environment_and_that_over_the_default() -> None:
    environ = {"TRIOLET_BLOCK_SIZE": "32", "TRIOLET_DTYPE": "bfloat16", "TRIOLET_DEBUG": "1"}
    config = options.engine_config({"block_size": "64"}, environ)
    assert (config.block_size, config.dtype, config.max_num_seqs) == (
        64,
        "bfloat16",
        EngineConfig().max_num_seqs,
    )


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_help_shows_the_choices_and_the_unit_of_every_field_that_has_them(command: str) -> None:
    shown = " ".join(CliRunner().invoke(main, [command, "--help"], terminal_width=400).output.split())
    for field in attrs.fields(EngineConfig):
        if choices := rule_of(field).choices:
            assert f"--{field.name.replace('_', '-')} {'|'.join(choices)} " in shown
    assert "--speculative none|ngram " in shown
    assert "--fair-ttft-factor FACTOR " in shown
    assert "--step-timeout SECONDS " in shown


def test_no_command_is_cut_short_in_the_list_of_commands() -> None:
    shown = CliRunner().invoke(main, ["--help"], terminal_width=80).output
    assert all(name in shown for name in main.commands)
    assert "..." not in shown.partition("Commands:")[2]


def test_a_variable_that_nothing_reads_is_warned_of_once_with_the_nearest_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options.engine_config({}, {"TRIOLET_MAX_NUM_SEQ": "4", "TRIOLET_SEED": "1"})
    options.gateway_config({}, {"TRIOLET_MAX_NUM_SEQ": "4"})
    warning = "the environment variable TRIOLET_MAX_NUM_SEQ is not known and has no effect"
    assert capsys.readouterr().err == f"triolet: warning: {warning}; did you mean TRIOLET_MAX_NUM_SEQS?\n"


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ({"block_size": "0"}, {}, "--block-size must be a whole number of at least 1; got 0"),
        ({"block_size": "many"}, {}, "--block-size must be a whole number, or none; got 'many'"),
        ({"dtype": "int3"}, {}, "--dtype must be one of auto, float32, bfloat16, float16; got 'int3'"),
        (
            {},
            {"TRIOLET_DEVICE": "moon"},
            "TRIOLET_DEVICE must be one of auto, cpu, cpu:CORES, cuda, cuda:N; got 'moon'",
        ),
        ({"model": ""}, {}, "--model must be a non-empty text; got ''"),
    ],
)
def test_a_wrong_value_is_named_with_the_place_it_came_from(
    flags: dict[str, str], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(click.UsageError) as raised:
        options.engine_config(flags, environ)
    assert raised.value.message == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chat", "-q", "hi", "--top-p", "7"], "--top-p must be in (0, 1], got 7.0."),
        (["chat", "-q", "hi", "--temperature", "nan"], "--temperature must be a finite number, got nan."),
        (["chat", "-q", "hi", "--temperature", "warm"], "'warm' is not a valid float"),
        (["chat", "-q", "  "], "the question must not be empty"),
        (["chat", "-q", "hi", "--system", "@no/such/file"], "--system must name a readable text file"),
        (["generate"], "Missing option '-p' / '--prompt'"),
        (
            ["generate", "-p", "hi", "--block-size", "0"],
            "--block-size must be a whole number of at least 1; got 0",
        ),
        (["generate", "-p", "\udcff"], "--prompt must be UTF-8"),
        (["dance"], "No such command 'dance'"),
        (["route", "foo"], "URL must be a URL such as ws://127.0.0.1:8000; got 'foo'"),
        (["route", "http://h:1", "h:1/v1"], "URL must name another engine each time; got 'h:1/v1' twice"),
        (
            ["route", "http://h:1", "--max-body-bytes", "0"],
            "--max-body-bytes must be a whole number of at least 1024; got 0",
        ),
        (["route", "http://h:1", "--api-key", "ключ"], "--api-key must be of visible ASCII characters"),
        (["serve", "one", "-m", "two"], "the model must be given once; got 'one' and --model 'two'"),
    ],
)
def test_a_wrong_command_line_is_2_and_says_what_is_wrong(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_a_router_has_the_flags_of_a_server_that_it_honours_and_reads_their_variables_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    routed: list[GatewayConfig] = []
    monkeypatch.setattr("triolet.router.run.run", lambda addresses, config: routed.append(config))
    flags = [
        "--allowed-origins",
        "https://a,https://b",
        "--allowed-hosts",
        "name",
        "--max-body-bytes",
        "9999",
        "--max-input-bytes-per-client",
        "99999",
        "--max-json-values",
        "99",
    ]
    environ = {"TRIOLET_PORT": "0", "TRIOLET_API_KEYS": "k", "TRIOLET_GRACE_PERIOD": "3"}
    ran = CliRunner(env=environ).invoke(main, ["route", "http://h:1", *flags])
    assert ran.exit_code == 0, ran.output
    assert routed == [
        GatewayConfig(
            allowed_origins=("https://a", "https://b"),
            allowed_hosts=("name",),
            max_body_bytes=9999,
            max_input_bytes_per_client=99999,
            max_json_values=99,
            port=0,
            grace_period=3.0,
        )
    ]


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_every_sampling_parameter_has_a_flag_or_a_reason_for_none(command: str) -> None:
    shown = " ".join(CliRunner().invoke(main, [command, "--help"], terminal_width=400).output.split())
    engine_fields = {field.name for field in attrs.fields(EngineConfig)}
    for parameter in SAMPLING_PARAMETERS:
        has_flag = f"--{parameter.name.replace('_', '-')} " in shown
        assert has_flag == (parameter.spec.no_flag is None or parameter.name in engine_fields), parameter.name
        assert not has_flag or parameter.name in engine_fields or parameter.spec.help in shown


def test_a_dash_reads_stdin_less_one_final_newline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("zwölf\n\n".encode())))
    assert options.text_or_stdin("-", "--prompt") == "zwölf\n"


def test_stdin_that_is_not_utf_8_is_refused() -> None:
    result = CliRunner().invoke(main, ["generate", "-p", "-"], input=b"\xff\xfe")
    assert result.exit_code == 2
    assert "stdin must be UTF-8" in result.stderr


def test_an_at_sign_reads_a_file(tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text("Be brief.\n")
    assert options.text_or_file(f"@{tmp_path}/system.txt", "--system") == "Be brief."
    assert options.text_or_file("Be brief.", "--system") == "Be brief."


def test_a_form_is_json_or_a_schema_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    (tmp_path / "broken.json").write_text('{"type": ')
    asked = options.form_of("json", "--format")
    assert asked is not None
    assert asked.json_object
    read = options.form_of(f"@{tmp_path}/schema.json", "--format")
    assert read is not None
    assert json.loads(read.json or "") == {"type": "object"}
    for wrong, rule in (("xml", "json, or @FILE"), (f"@{tmp_path}/broken.json", "a JSON schema")):
        with pytest.raises(click.UsageError, match=f"--format must be {rule}"):
            options.form_of(wrong, "--format")
