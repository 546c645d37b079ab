"""Print what the checks of `triolet doctor` find."""

from __future__ import annotations

import json
from collections.abc import Iterator

import attrs
import click

from triolet.cli.doctor.checks import NOTE, OK, PROBLEM, Finding, all_checks

COLOURS = {OK: "green", NOTE: "yellow", PROBLEM: "red"}


def print_findings(*, port: int, runs: bool, as_json: bool) -> int:
    """Run the checks and print each finding as it comes.

    Args:
        port: that a server is to have.
        runs: whether triolet-nano is to answer a prompt.
        as_json: print a JSON object per line in place of text.
    Returns:
        Exit status: 1 if there is a problem.
    """
    has_problem = False
    for finding in _findings(port=port, runs=runs):
        has_problem |= finding.state == PROBLEM
        if as_json:
            click.echo(json.dumps(attrs.asdict(finding)))
        else:
            state = click.style(f"{finding.state:<8}", fg=COLOURS[finding.state])
            click.echo(f"{state}{finding.subject:<10} {finding.text}")
    return int(has_problem)


def _findings(*, port: int, runs: bool) -> Iterator[Finding]:
    for subject, check in all_checks(port=port, runs=runs):
        try:
            yield from check()
        except Exception as error:  # one check that cannot look hides nothing that the others see
            yield Finding(subject, PROBLEM, f"{type(error).__name__}: {error}")
