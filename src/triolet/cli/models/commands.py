"""Commands on models: those of the hub's cache on this machine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from triolet.cli import options
from triolet.client.address import ServerAddress

WRITTEN_FORMATS = (
    *(f"gguf:{kind}" for kind in ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")),
    *("w4a16", "w8a8", "int8", "int4"),
)
"""Those of `triolet.model.quantize`, which needs torch: `--help` does without."""

JSON_LINES = click.option("--json", "as_json", is_flag=True, help="Print JSON objects, one a line.")


@click.command("list")
@JSON_LINES
def list_(as_json: bool) -> None:
    """List the models on this machine.

    They are triolet-nano and those in the cache of the Hugging Face hub.
    """
    from triolet.cli.models.hub_cache import list_models

    list_models(as_json=as_json)


@click.command()
@click.argument("model", metavar="MODEL")
@JSON_LINES
def show(model: str, as_json: bool) -> None:
    """Show where a model is, its size and its architecture.

    MODEL is an id in the cache, a folder, a GGUF file or triolet-nano.
    """
    from triolet.cli.models.hub_cache import show_model

    show_model(model, as_json=as_json)


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--revision", metavar="NAME", help="Branch, tag or commit on the hub.")
def pull(model: str, revision: str | None) -> None:
    """Fetch a model from the Hugging Face hub.

    MODEL is an id such as Qwen/Qwen3-0.6B, or Qwen/Qwen3-0.6B-GGUF:Q8_0 for one GGUF file of a repository. A download
    that broke off goes on where it was. The folder is printed.
    """
    from triolet.cli.models.hub_cache import pull_model

    pull_model(model, revision)


@click.command()
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@click.option(
    "--revision", metavar="COMMIT", help="Delete only this revision; the beginning of it is enough."
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask first.")
def rm(models: tuple[str, ...], revision: str | None, yes: bool) -> None:
    """Delete models from the Hugging Face cache of this machine.

    If one of the names is wrong, nothing is deleted.
    """
    from triolet.cli.models.hub_cache import remove_models

    remove_models(models, revision, asks=not yes)


@click.command()
@click.argument("preset", metavar="[PRESET]", required=False)
@JSON_LINES
def config(preset: str | None, as_json: bool) -> None:
    """Show presets, their file, and the variables that are set.

    A preset is a model with sampling, system prompt, chat template and engine fields; its name is the MODEL of a
    command.
    """
    from triolet.cli.models.presets import show_config

    show_config(preset, as_json=as_json)


def _server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --url and --api-key of a running server; the command gets its address as `address`."""

    @functools.wraps(command)
    def with_address(url: str, api_key: str | None, **values: Any) -> Any:
        return command(address=options.server_address(url, api_key), **values)

    key = click.option(
        "--api-key", envvar="TRIOLET_API_KEY", metavar="KEY", help="One of its --priority-keys."
    )
    url = click.option(
        "--url",
        envvar="TRIOLET_URL",
        metavar="URL",
        default="http://127.0.0.1:8000",
        show_default=True,
        help="Address of the server (or TRIOLET_URL in the environment).",
    )
    return url(key(with_address))


@click.command()
@_server_options
@JSON_LINES
def ps(address: ServerAddress, as_json: bool) -> None:
    """Show the models of a running server.

    A server with API keys asks for one of its --priority-keys.
    """
    from triolet.cli.models.running import show_running

    show_running(address, as_json=as_json)


@click.command()
@click.argument("model", metavar="MODEL")
@_server_options
def stop(model: str, address: ServerAddress) -> None:
    """Have a running server unload a model.

    Requests that it has are answered first; the next request loads it again.
    """
    from triolet.cli.models.running import stop_model

    stop_model(address, model)


@click.command()
@click.argument("model", metavar="IN")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(WRITTEN_FORMATS, case_sensitive=False),
    required=True,
    metavar="FORMAT",
    help="Format of the weights: " + ", ".join(WRITTEN_FORMATS) + ".",
)
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Text to compare both models on, its first 2,048 tokens; by default the model's own answers.",
)
@click.option("--report/--no-report", "reports", default=True, show_default=True, help="Compare both models.")
@click.option("--revision", metavar="NAME", help="Branch, tag or commit on the hub.")
@JSON_LINES
def quantize(
    model: str, out: Path, form: str, text: Path | None, reports: bool, revision: str | None, as_json: bool
) -> None:
    """Write a model with rounded weights.

    IN is a folder, an id on the hub or triolet-nano; OUT is what is written, and must not exist. The report has both
    models' perplexity, and the divergence of their next tokens' distributions.
    """
    from triolet.cli.models.quantize import quantize_model

    quantize_model(model, out, form, text=text, revision=revision, reports=reports, as_json=as_json)


MODEL_COMMANDS = (list_, show, pull, rm, quantize, config, ps, stop)
