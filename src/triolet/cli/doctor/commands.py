"""The command `triolet doctor`."""

from __future__ import annotations

import sys

import click


@click.command()
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=8000,
    show_default=True,
    help="Port of 127.0.0.1 that a server is to have.",
)
@click.option("--no-run", is_flag=True, help="Do not let triolet-nano answer a prompt at the end.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON objects, one a line.")
def doctor(port: int, no_run: bool, as_json: bool) -> None:
    """Look at what this machine has for triolet.

    That is versions, processor, CPU kernels, GPU, memory, caches and limits; in the end triolet-nano answers a prompt.
    The exit status is 1 if triolet cannot run here. Nothing is changed, but for kernels that must be compiled.
    """
    from triolet.cli.doctor.report import print_findings

    sys.exit(print_findings(port=port, runs=not no_run, as_json=as_json))
