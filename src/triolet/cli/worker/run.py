"""`triolet worker`: computes the model of an engine on another machine, until a signal."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import click
import trio

from triolet.actors.executors.remote.agent import Agent
from triolet.config.address import Address


def run(engine: str, token: str | None, token_file: Path | None, ca_file: Path | None) -> None:
    """Work for an engine.

    Args:
        engine: its address, HOST:PORT.
        token: that the engine knows; or None.
        token_file: file with the token, if that is None.
        ca_file: certificates that turn on TLS, or None.
    Raises:
        click.UsageError: a flag is missing or wrong.
        WorkerRefused: the engine has another token, or runs another version.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        address = Address.parse(engine)
    except ValueError:
        raise click.UsageError(f"--connect must be HOST:PORT; got {engine}") from None
    agent = Agent(address, _token(token, token_file), None if ca_file is None else _tls(ca_file))
    trio.run(agent.run)


def _token(token: str | None, token_file: Path | None) -> str:
    if token_file is not None:
        try:
            token = token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise click.UsageError(f"--token-file must be a file with a text ({error})") from None
    if not token:
        raise click.UsageError("--token, --token-file or TRIOLET_WORKER_TOKEN must be given")
    return token


def _tls(ca_file: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise click.UsageError(f"--ca-file must be a file with certificates ({error})") from None
