"""Flags of the commands that measure a workload of random prompts: `triolet bench` and `triolet profile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import click

from triolet.cli.options import Command


def workload_options(*, num_prompts: int, output_len: int) -> Callable[[Command], Command]:
    """Return a decorator that adds the flags of a measured workload, and of how its figures are printed.

    Args:
        num_prompts: default of --num-prompts.
        output_len: default of --output-len.
    """
    count = click.IntRange(1)
    flags = (
        click.option(
            "--num-prompts", type=count, default=num_prompts, show_default=True, help="Requests in all."
        ),
        click.option("--input-len", type=count, default=128, show_default=True, help="Tokens in a prompt."),
        click.option(
            "--output-len", type=count, default=output_len, show_default=True, help="Tokens in an answer."
        ),
        click.option(
            "--concurrency", type=count, help="Requests under way together; by default --max-num-seqs."
        ),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table."),
    )

    def decorate(command: Command) -> Command:
        decorated: Callable[..., Any] = command
        for flag in reversed(flags):
            decorated = flag(decorated)
        return cast(Command, decorated)

    return decorate
