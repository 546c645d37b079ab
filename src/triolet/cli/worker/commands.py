"""Flags of `triolet worker`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.option("--connect", "engine", required=True, metavar="HOST:PORT", help="The engine's worker_listen.")
@click.option(
    "--token",
    envvar="TRIOLET_WORKER_TOKEN",
    metavar="TEXT",
    help="The engine's worker_token. Others can read a command line: TRIOLET_WORKER_TOKEN is read as well.",
)
@click.option("--token-file", type=click.Path(path_type=Path), help="File with the token.")
@click.option(
    "--ca-file",
    type=click.Path(path_type=Path),
    help="Certificates, PEM, of which the engine's must be one, or be signed by one; turns on TLS.",
)
def worker(engine: str, token: str | None, token_file: Path | None, ca_file: Path | None) -> None:
    """Compute for an engine on another machine.

    The engine has runner remote. A process loads the model that the engine names, and computes its steps. When that
    process dies, or the engine starts anew, the worker connects again, until it is ended or refused.
    """
    from triolet.cli.worker.run import run

    run(engine, token, token_file, ca_file)
