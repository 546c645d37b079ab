"""Flags, environment and defaults, and their precedence."""

from __future__ import annotations

import io
import json
from pathlib import Path

import attrs
import click
import pytest
from click.testing import CliRunner

from tests.compat.vllm_arguments import VLLM_DEFAULTS
from triolet.cli import main, options
from triolet.config.engine import EngineConfig
from triolet.config.fields import rule_of
from triolet.config.server import GatewayConfig
from triolet.config.vllm_names import flag_hint
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


def unknown(*arguments: str, command: str = "serve") -> str:
    result = CliRunner().invoke(main, [command, *arguments])
    assert result.exit_code == 2
    return result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--data-parallel-size 2", "--data-parallel-size: here it is --replicas"),
        ("--data-parallel-size=2", "--data-parallel-size: here it is --replicas"),
        ("-dp 2", "-dp: here it is --replicas"),
        ("-tp 2", "-tp: here it is --tensor-parallel-size"),
        ("-tp=2", "-tp: here it is --tensor-parallel-size"),
        ("-pp 2", "-pp: it is always 1; leave it out"),
        ("-q awq", "-q: here it is --quantization"),
        ("--max_model_len 9", "--max_model_len: here it is --max-model-len"),
        ("--scheduling-policy fcfs", "--scheduling-policy: here it is --policy"),
        ("--num-gpu-blocks-override 9", "--num-gpu-blocks-override: here it is --num-kv-blocks"),
        ("--kv-cache-memory-bytes 9", "--kv-cache-memory-bytes: here it is --kv-cache-bytes"),
        ("--tool-call-parser hermes", "--tool-call-parser: here it is --tool-parser"),
        ("--api-key sesame", "--api-key: here it is --api-keys"),
        ("--ssl-certfile a.pem", "--ssl-certfile: here it is --certfile"),
        ("--disable-log-stats", "--disable-log-stats: here it is --no-log-stats"),
        ("--enable-auto-tool-choice", "--enable-auto-tool-choice: tool calls need no switch; leave it out"),
        ("--enable-chunked-prefill", "--enable-chunked-prefill: prefill is always chunked; leave it out"),
        ("--enable-sleep-mode", "--enable-sleep-mode: sleep needs no switch; leave it out"),
        ("--load-format auto", "--load-format: it is always auto or safetensors; leave it out"),
        ("--profiler-config {}", "--profiler-config: the folder of traces is --profile-dir"),
        (
            "--swap-space 4",
            "--swap-space: blocks are computed again and not swapped out; vLLM has dropped it, too",
        ),
        ("-O3", "-O: triolet has nothing of the kind"),
        (
            "--speculative-config.method ngram",
            "--speculative-config.method: --speculative ngram and its fields say it",
        ),
        ("--moe-backend triton", "--moe-backend: triolet has nothing of the kind"),
    ],
)
def test_an_option_of_vllms_is_told_by_what_it_is_here(arguments: str, sentence: str) -> None:
    assert unknown("a/model", *arguments.split()) == f"Error: no such option {sentence}"


def test_an_option_that_vllm_has_not_either_gets_the_nearest_name() -> None:
    assert "Did you mean one of: '--max-model-bytes', '--max-model-len'" in unknown("--max-modl-len", "9")
    assert (
        unknown("--data-parallel-size", "9", command="pull")
        == "Error: No such option '--data-parallel-size'."
    )


# Flags of the server in vLLM 0.32, beside those of its engine.
OF_THEIR_SERVER = """
    headless api-server-count config host port uds uvicorn-log-level disable-uvicorn-access-log allow-credentials
    allowed-origins allowed-methods allowed-headers api-key ssl-keyfile ssl-certfile ssl-ca-certs enable-ssl-refresh
    ssl-cert-reqs root-path middleware return-tokens-as-token-ids disable-frontend-multiprocessing
    enable-request-id-headers enable-auto-tool-choice exclude-tools-when-tool-choice-none tool-call-parser
    tool-parser-plugin tool-server log-config-file max-log-len disable-fastapi-docs enable-prompt-tokens-details
    enable-server-load-tracking enable-force-include-usage enable-tokenizer-info-endpoint enable-log-outputs
    enable-log-requests disable-log-requests disable-log-stats h11-max-incomplete-event-size h11-max-header-count
    lora-modules chat-template chat-template-content-format trust-request-chat-template response-role
    default-chat-template-kwargs ssl-ciphers
"""


def test_every_flag_of_vllm_serve_is_there_or_told_by_what_it_is_here() -> None:
    known = {flag for option in main.commands["serve"].params for flag in option.opts + option.secondary_opts}
    theirs = [f"--{name}" for name in OF_THEIR_SERVER.split()]
    theirs += [f"--{name.replace('_', '-')}" for name in VLLM_DEFAULTS if not name.startswith("_")]
    assert len(theirs) > 200
    assert [flag for flag in theirs if flag not in known and flag_hint(flag, known) is None] == []


@pytest.mark.parametrize("flag", ["--lora-modules", "--prompt-adapters"])
@pytest.mark.parametrize("model", [["a/model"], ["--model", "a/model"], []])
def test_values_with_spaces_between_them_are_refused_with_the_commas_that_they_need(
    flag: str, model: list[str]
) -> None:
    rule = f"Error: {flag} must be one text with commas between its values, such as a=/x,b=/y; got a space before b=/y"
    assert unknown(*model, "--enable-lora", flag, "a=/x", "b=/y") == rule


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
        (["run", "some/model"], "No such command 'run': triolet chat MODEL is a conversation"),
        (
            ["chat", "some/model", "Who are you?"],
            "unexpected extra argument (Who are you?); -q TEXT asks a question",
        ),
        (
            ["chat", "-q", "-", "-q", "-"],
            "--question must be - once only, which reads all of stdin; got it 2 times",
        ),
        (["chat", "-q", "hi", "--system", "\udcff"], "--system must be UTF-8"),
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
