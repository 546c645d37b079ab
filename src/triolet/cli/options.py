"""Flags of the command line, generated from the fields of `EngineConfig`, `GatewayConfig` and `SamplingParams`.

A flag overrides its `TRIOLET_*` environment variable, and that overrides the default.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import attrs
import click
from click.core import ParameterSource

from triolet.cli.models.chosen import (
    OF_ONE_MODEL,
    SERVER_DEFAULTS,
    blaming,
    chosen_model,
    config_of,
    flag_of,
    further_model,
    has_name,
)
from triolet.cli.models.presets import Preset, find_preset, read_presets
from triolet.cli.models.sampling import SAMPLING_OPTIONS, kind_of, with_sampling_values
from triolet.client.address import ServerAddress
from triolet.config.engine import BUILT_IN_MODEL, EngineConfig
from triolet.config.environment import unknown_variables
from triolet.config.fields import ENVIRONMENT_PREFIX, KEY_RULE, is_key, rule_of, variable_name
from triolet.config.server import GatewayConfig
from triolet.config.vllm_names import flag_hint, short_flag_of
from triolet.core.request.params import SamplingParams
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.errors import InvalidParams, shown

if TYPE_CHECKING:
    pass

Command = TypeVar("Command", bound=Callable[..., Any])

SAMPLING_SECTION: Final = "Sampling (by default what the model asks for)"
GATEWAY_SECTION: Final = f"Server (or {ENVIRONMENT_PREFIX}* in the environment)"
ENGINE_SECTION: Final = f"Engine (or {ENVIRONMENT_PREFIX}* in the environment)"
PRESET: Final = "triolet.preset"  # place of the command's preset in click's context
REPEATED: Final = " Given several times, as NAME=MODEL or the name of a preset, the server has all of them."
NAMES_HINT: Final = "; several names of a model have commas between them: --served-model-name NAME,NAME"
SECTIONS: Final = ("Options", SAMPLING_SECTION, GATEWAY_SECTION, ENGINE_SECTION)
# Fields of the server that a router honours as well.
ROUTER_FIELDS: Final = (
    "host", "port", "certfile", "keyfile", "allowed_origins", "allowed_hosts", "max_connections",
    "max_connections_per_address", "max_body_bytes", "max_message_bytes", "max_input_bytes",
    "max_input_bytes_per_client", "max_json_values", "max_json_members", "max_json_depth", "handshake_timeout",
    "ping_interval", "write_timeout", "close_timeout", "grace_period", "metrics_prefix",
)  # fmt: skip
# Fields of both configurations; the flag is the engine's, and the server takes its value.
SHARED_FIELDS: Final = EngineConfig.rules().keys() & GatewayConfig.rules().keys()


class SectionedOption(click.Option):
    """Option with the heading of `--help` that it is listed under."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class SectionedCommand(click.Command):
    """Command that lists its options under headings in `--help`, and knows vLLM's names of them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)  # click takes them off the list
        _check_listed(self, words)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise self._explained(error, words) from None
        except click.UsageError as error:
            hint = NAMES_HINT if "--served-model-name" in words else ""
            if not hint and any(option.name == "questions" for option in self.params):
                hint = "; -q TEXT asks a question"
            if not hint or "unexpected extra argument" not in error.message:
                raise
            raise click.UsageError(f"{error.message}{hint}", ctx) from None

    def _explained(self, error: click.NoSuchOption, words: Sequence[str]) -> click.UsageError:
        """Return the error for an unknown option, which says what an option of vLLM's is here."""
        known = {flag for option in self.params for flag in (*option.opts, *option.secondary_opts)}
        flag = error.option_name
        if not flag.startswith("--"):  # click reads `-tp` letter by letter
            flag = next(filter(None, map(short_flag_of, words)), flag)
        hint = flag_hint(flag, known) if "--max-model-len" in known else None
        return error if hint is None else click.UsageError(f"no such option {flag}: {hint}", error.ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(parameter, "section", "Options"), []).append(record)
        for section in sorted(sections, key=SECTIONS.index):
            with formatter.section(section):
                formatter.write_dl(sections[section])


def _check_listed(command: click.Command, words: Sequence[str]) -> None:
    """Refuse `--lora-modules a=/x b=/y`, as vLLM has it: the second would be a model, which goes before the flag."""
    listed = {flag for option in command.params if option.metavar == "TEXT,..." for flag in option.opts}
    for flag, first, second in zip(words, words[1:], words[2:], strict=False):
        if flag in listed and "=" in first and "=" in second and "-" not in (first[0], second[0]):
            raise click.UsageError(
                f"{flag} must be one text with commas between its values, such as {first},{second}; got a space "
                f"before {second}"
            )


# ----------------------------------------------------------------------------------------- sampling


def sampling_options(command: Command) -> Command:
    """Add the sampling flags; the command gets those that were given, checked and by field name, as `sampling`."""

    @functools.wraps(command)
    def with_sampling(**values: Any) -> Any:
        given = {option.name: values.pop(option.name) for option in SAMPLING_OPTIONS}
        # A flag that was not given is None, or () where it may come several times.
        sampling = {name: value for name, value in given.items() if value not in (None, ())}
        return command(sampling=_checked_sampling(sampling), **values)

    decorated: Callable[..., Any] = with_sampling
    # click lists first the option that was added last.
    for option in reversed(SAMPLING_OPTIONS):
        kind, is_list = kind_of(option), option.default == ()
        decorated = click.option(
            flag_of(option.name),
            cls=SectionedOption,
            section=SAMPLING_SECTION,
            type=kind,
            multiple=is_list,
            metavar="TEXT" if kind is str else "N" if kind is int else "X",
            help=option.spec.help + (" May be given several times." if is_list else ""),
        )(decorated)
    return cast(Command, decorated)


def _checked_sampling(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling parameters that are valid; warn of values that had to be changed for it."""
    try:
        sampling, warned = with_sampling_values(SamplingParams(), sampling)
    except InvalidParams as error:
        raise click.UsageError(_naming_flag(error)) from error
    for sentence in warned:
        click.echo(f"triolet: warning: {sentence}", err=True)
    return sampling


def _naming_flag(error: InvalidParams) -> str:
    """Return the sentence of an error with the flag in place of the field that it begins with."""
    sentence, field = str(error), error.field or ""
    return flag_of(field) + sentence.removeprefix(field) if field and sentence.startswith(field) else sentence


# ------------------------------------------------------------------------------------------- engine


def engine_options(command: Command) -> Command:
    """Add MODEL and a flag per field of `EngineConfig`; the command gets the configuration as `config`."""
    return _model_argument(
        _config_options(command, "config", _engine_fields(), ENGINE_SECTION, engine_config)
    )


def server_options(command: Command) -> Command:
    """Add MODEL and the flags of engine and server; the command gets them as `config` and `gateway`.

    The model runs in a process of its own by default.
    """

    def structured(flags: Mapping[str, str]) -> EngineConfig:
        return engine_config(flags, defaults=SERVER_DEFAULTS)

    fields: list[attrs.Attribute[Any]] = [
        field.evolve(default=SERVER_DEFAULTS.get(field.name, field.default))
        for field in attrs.fields(EngineConfig)
    ]
    command = _config_options(command, "config", fields, ENGINE_SECTION, structured, repeated=("model",))
    command = _models_option(_model_argument(command, is_declared=False))
    gateway_fields = [field for field in attrs.fields(GatewayConfig) if field.name not in SHARED_FIELDS]
    return _config_options(command, "gateway", gateway_fields, GATEWAY_SECTION, gateway_config)


def router_options(command: Command) -> Command:
    """Add the flags of a server that a router honours; the command gets them as `gateway`."""
    fields = [field for field in attrs.fields(GatewayConfig) if field.name in ROUTER_FIELDS]
    return _config_options(
        command, "gateway", fields, GATEWAY_SECTION, lambda flags: gateway_config(flags, only=ROUTER_FIELDS)
    )


def server_address_options(command: Command) -> Command:
    """Add --url and --api-key; the command gets the address of a server, or None, as `address`.

    Flags of the engine beside a server are an error: they would have no effect.
    """

    @functools.wraps(command)
    def with_address(url: str | None, api_key: str | None, **values: Any) -> Any:
        return command(address=_address(url, api_key), **values)

    decorated: Callable[..., Any] = with_address
    for flag, metavar, sentence in (
        ("--api-key", "KEY", "API key of that server"),
        ("--url", "URL", "Use the server at this address, such as ws://127.0.0.1:8000"),
    ):
        variable = variable_name(flag[2:].replace("-", "_"))
        text = f"{sentence} (or {variable} in the environment)."
        decorated = click.option(flag, envvar=variable, metavar=metavar, help=text)(decorated)
    return cast(Command, decorated)


def named_model() -> str | None:
    """Return the MODEL or --model of the command line; None without one, whatever the environment says."""
    context = click.get_current_context()
    if (preset := context.meta.get(PRESET)) is not None:
        found: str | None = preset.model
        return found
    params = context.params
    named: str | None = params.get("positional") or params.get("model")
    return named


def other_models() -> Callable[[str], tuple[Preset, EngineConfig]]:
    """Return the function that says what a model in place of the command's own is, with the flags of the command line.

    It takes what MODEL may be, and raises click.UsageError or PresetError.
    """
    params = click.get_current_context().params
    flags = _of_any_model(params)

    def other(text: str) -> tuple[Preset, EngineConfig]:
        preset = chosen_model(text)
        return preset, config_of(preset, flags)

    return other


def _of_any_model(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the engine's flags that were given, without those of one model only."""
    return {
        field.name: str(value)
        for field in _engine_fields()
        if field.name not in OF_ONE_MODEL and (value := values.get(field.name)) is not None
    }


def _address(url: str | None, api_key: str | None) -> ServerAddress | None:
    """Return the address of the server; None without a URL, or with an empty one."""
    context = click.get_current_context()
    if not url:
        if context.get_parameter_source("api_key") is ParameterSource.COMMANDLINE:
            raise click.UsageError("--api-key is for a server; --url names one")
        return None
    fields = {field.name for field in _engine_fields()} - {"model"}
    given = [name for name in fields if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if given:
        flags = ", ".join(sorted(map(flag_of, given)))
        raise click.UsageError(f"{flags} is for a model in this process; with --url it has no effect")
    return server_address(url, api_key)


def server_address(url: str, api_key: str | None, name: str = "--url") -> ServerAddress:
    """Return the address that a URL means.

    Args:
        url: of a server.
        api_key: for that server.
        name: of the flag or argument that the URL was given as.
    Raises:
        click.UsageError: it is no such URL, or no header can carry the key.
    """
    if api_key and not is_key(api_key):
        raise click.UsageError(f"--api-key must be {KEY_RULE}; got a key with others")
    try:
        return ServerAddress.of(url, api_key)
    except ValueError as error:
        raise click.UsageError(f"{name} must be {error}; got {shown(url)}") from error


def engine_addresses(urls: Sequence[str], api_key: str | None) -> list[ServerAddress]:
    """Return the addresses of a router's engines.

    Raises:
        click.UsageError: a text is no URL, or two mean the same engine.
    """
    addresses: list[ServerAddress] = []
    for url in urls:
        address = server_address(url, api_key, "URL")
        if address in addresses:
            raise click.UsageError(f"URL must name another engine each time; got {shown(url)} twice")
        addresses.append(address)
    return addresses


def _config_options(
    command: Command,
    argument: str,
    fields: list[attrs.Attribute[Any]],
    section: str,
    structure: Callable[[Mapping[str, str]], object],
    repeated: Collection[str] = (),
) -> Command:
    """Add a flag per field; the command gets what `structure` makes of those that were given, as `argument`."""

    @functools.wraps(command)
    def with_config(**values: Any) -> Any:
        flags = {field.name: values.pop(field.name) for field in fields}
        given = {name: str(value) for name, value in flags.items() if value is not None}
        return command(**{argument: structure(given)}, **values)

    decorated: Callable[..., Any] = with_config
    for field in reversed(fields):
        decorated = _config_option(field, section, is_repeated=field.name in repeated)(decorated)
    return cast(Command, decorated)


def _model_argument(command: Command, *, is_declared: bool = True) -> Command:
    """Add a positional MODEL that means the same as --model; either may name a preset.

    Args:
        is_declared: False if a decorator around this one declares MODEL.
    """

    @functools.wraps(command)
    def with_model(positional: str | None, **values: Any) -> Any:
        if positional is not None:
            if values["model"] not in (None, positional):
                hint = NAMES_HINT if values["served_model_name"] else ""
                raise click.UsageError(
                    f"the model must be given once; got {positional!r} and --model {values['model']!r}{hint}"
                )
            values["model"] = positional
        name = values["model"] or os.environ.get(variable_name("model"))
        preset = None if name is None else find_preset(name)
        return command(**(values if preset is None else _with_preset(preset, values)))

    declared: Callable[..., Any] = with_model
    if is_declared:
        declared = click.argument("positional", metavar="[MODEL]", required=False)(with_model)
    return cast(Command, declared)


def _models_option(command: Command) -> Command:
    """Add --models; the command gets the models beside the first one as `models`, by name."""

    @functools.wraps(command)
    def with_models(positional: str | None, models_file: Path | None, **values: Any) -> Any:
        named = [positional] if positional is not None else []
        named += [one for one in values["model"] if one not in named]
        chosen = [chosen_model(one) for one in named]
        if models_file is not None:
            chosen += read_presets(models_file)
        if len(chosen) <= 1 and models_file is None and not has_name(named):
            return command(positional=None, models={}, **{**values, "model": named[0] if named else None})
        if (
            positional is not None
            and len(values["model"]) == 1
            and models_file is None
            and not has_name(named)
        ):
            raise click.UsageError(
                f"the model must be given once; got {positional!r} and --model {values['model'][0]!r}; several have "
                f"names, as NAME=MODEL{NAMES_HINT if values['served_model_name'] else ''}"
            )
        if values["served_model_name"] is not None:
            raise click.UsageError(
                "--served-model-name is for one model; with several, NAME=MODEL names each"
            )
        for preset in chosen:
            if (name := preset.engine.get("served_model_name")) is not None:
                raise click.UsageError(
                    f"engine.served_model_name of preset {preset.name} must be left out with --models, NAME=MODEL or "
                    f"several models, where {preset.name} is the name of the model; got {shown(name)}"
                )
        names = [preset.name for preset in chosen]
        if twice := [name for name in names if names.count(name) > 1]:
            raise click.UsageError(f"the names of models must differ; got {twice[0]!r} twice")
        if not chosen:
            raise click.UsageError(f"--models must name a file with presets; {models_file} has none")
        flags = _of_any_model(values)
        models = {preset.name: further_model(preset, flags) for preset in chosen[1:]}
        values["model"] = None
        return command(positional=None, models=models, **_with_preset(chosen[0], values))

    option = click.option(
        "--models",
        "models_file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Serve every preset of this TOML file; the first is loaded at once, the others on demand.",
    )
    return cast(Command, option(click.argument("positional", metavar="[MODEL]", required=False)(with_models)))


def _with_preset(preset: Preset, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a command, with those of the preset where no flag was given.

    Raises:
        click.UsageError: a setting is for a model in this process, and the command asks a server.
    """
    click.get_current_context().meta[PRESET] = preset
    if values.get("address") is not None and preset.engine_fields:
        raise click.UsageError(
            f"preset {preset.name} has a template or engine fields, which are for a model in this process; with --url "
            "they have no effect"
        )
    # None would leave it to TRIOLET_MODEL, which may be what named the preset.
    filled: dict[str, Any] = {"model": preset.model or BUILT_IN_MODEL, **preset.engine_fields}
    if "gateway" in values:  # `serve`: clients ask for the model by the name of the preset
        filled = {"served_model_name": preset.name, **filled}
        if preset.sampling or preset.system:
            click.echo(
                f"triolet: warning: preset {preset.name}: system prompt and sampling are those of chats; a server "
                "takes them from its clients",
                err=True,
            )
    given = {name: value for name, value in values.items() if value is not None and name != "model"}
    if "sampling" in values:
        filled["sampling"] = _checked_sampling({**preset.sampling, **values["sampling"]})
        del given["sampling"]
    if "system" in values:
        filled["system"] = preset.system
    return {**values, **filled, **given}


def engine_config(
    flags: Mapping[str, str],
    environ: Mapping[str, str] | None = None,
    *,
    defaults: Mapping[str, str] | None = None,
) -> EngineConfig:
    """Return the configuration from flags and environment; warn of unknown variables.

    Args:
        flags: text of each flag that was given, by field name.
        environ: environment variables; by default this process's.
        defaults: of the command, where they differ from the engine's.
    Raises:
        click.UsageError: a wrong value; names the flag or the variable it came from.
    """
    for name, nearest in unknown_variables(environ).items():
        hint = f"; did you mean {nearest}?" if nearest else ""
        click.echo(
            f"triolet: warning: the environment variable {name} is not known and has no effect{hint}",
            err=True,
        )
    fields = {**(defaults or {}), **EngineConfig.environment_fields(environ), **flags}
    return blaming(flags, lambda: EngineConfig.from_texts(fields))


def gateway_config(
    flags: Mapping[str, str],
    environ: Mapping[str, str] | None = None,
    only: Collection[str] | None = None,
) -> GatewayConfig:
    """Return the configuration of the server from flags and environment.

    Args:
        flags: texts by field.
        environ: by default this process's.
        only: names of the fields that the environment is read for; by default all.
    Raises:
        click.UsageError: a wrong value; names the flag or the variable it came from.
    """
    variables = GatewayConfig.environment_fields(environ)
    if only is not None:
        variables = {name: text for name, text in variables.items() if name in only}
    fields = {**variables, **flags}
    # Fields of both configurations are the engine's.
    for name in SHARED_FIELDS:
        fields.pop(name, None)
    return blaming(flags, lambda: GatewayConfig.from_texts(fields))


def _engine_fields() -> list[attrs.Attribute[Any]]:
    # Without `seed`: the flag `--seed` is that of the request, which overrides the engine's in any case.
    sampling = {option.name for option in SAMPLING_OPTIONS}
    return [field for field in attrs.fields(EngineConfig) if field.name not in sampling]


def _config_option(
    field: attrs.Attribute[Any], section: str, *, is_repeated: bool
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    flag, metavar = flag_of(field.name), rule_of(field).metavar
    names = [f"{flag}/--no-{flag[2:]}"] if metavar is None else [flag]
    if field.name == "model":
        names.insert(0, "-m")
    default = "" if field.default in (None, ()) else f"  [default: {_shown(field.default)}]"
    return click.option(
        *names,
        cls=SectionedOption,
        section=section,
        # None tells a flag that was not given, for which environment and defaults count.
        default=None,
        multiple=is_repeated,
        metavar=metavar,
        help=field.metadata["help"] + (REPEATED if is_repeated else "") + default,
    )


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default)


# -------------------------------------------------------------------------------------------- texts


def text_or_stdin(text: str, flag: str) -> str:
    """Return `text`, or for `-` all of stdin less one final newline.

    Raises:
        click.UsageError: bytes that are not UTF-8, or a closed stdin or stdout.
    """
    if sys.stdout is None:
        raise click.UsageError("stdout must be open; got none")
    source = "stdin" if text == "-" else flag
    try:
        if text == "-" and sys.stdin is None:
            raise click.UsageError("stdin must be open; got none")
        if text == "-":
            if sys.stdin.isatty():
                click.echo("Reading from the terminal; Ctrl-D ends it.", err=True)
            text = sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeError as error:
        raise click.UsageError(f"{source} must be UTF-8; {error}") from error
    return _utf8(text, source)


def joined_texts(texts: Sequence[str], flag: str) -> str:
    """Return texts as one, with an empty line between them; `-` is all of stdin.

    Raises:
        click.UsageError: stdin is wanted twice, a text is no UTF-8, or a stream is closed.
    """
    if texts.count("-") > 1:
        raise click.UsageError(
            f"{flag} must be - once only, which reads all of stdin; got it {texts.count('-')} times"
        )
    return "\n\n".join(filter(None, (text_or_stdin(text, flag).strip() for text in texts)))


def _utf8(text: str, source: str) -> str:
    """Return a text of the command line; invalid bytes in it have become surrogates, which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeError as error:
        raise click.UsageError(f"{source} must be UTF-8; {error}") from error
    return text


def form_of(text: str | None, flag: str) -> StructuredOutputsParams | None:
    """Return the form of answers that a flag asks for: `json`, or `@FILE` with a JSON schema; None without one.

    Raises:
        click.UsageError: another text, or a file that is no schema.
    """
    if text is None:
        return None
    if text != "json" and not text.startswith("@"):
        raise click.UsageError(f"{flag} must be json, or @FILE with a JSON schema; got {shown(text)}")
    try:
        if text == "json":
            return StructuredOutputsParams(json_object=True)
        return StructuredOutputsParams(json=text_or_file(text, flag))
    except InvalidParams as error:
        raise click.UsageError(f"{flag} must be a JSON schema; {error}") from error


def text_or_file(text: str | None, flag: str) -> str | None:
    """Return `text`, or for `@FILE` the content of the file.

    Raises:
        click.UsageError: the file cannot be read, or the text is no UTF-8.
    """
    if text is None or not text.startswith("@"):
        return None if text is None else _utf8(text, flag)
    try:
        return Path(os.path.expanduser(text[1:])).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise click.UsageError(f"{flag} must name a readable text file; {error}") from error
