"""Flags of `triolet replay`."""

from __future__ import annotations

from pathlib import Path

import click

from triolet.cli import options
from triolet.config.engine import EngineConfig


@click.command(cls=options.SectionedCommand)
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.argument("request_id", metavar="[ID]", required=False)
@options.engine_options
def replay(file: Path, request_id: str | None, config: EngineConfig) -> None:
    """Compute recorded requests again and compare their answers.

    FILE is what --record wrote. Each request, or only the one of ID, is computed alone, and its tokens are compared
    with the recorded ones; of an answer that was cut short, those that were delivered. The model, and whatever else no
    flag gives, is that of the recording.

    Exit status: 0 all are equal, 1 one departs, 2 FILE is no recording or has nothing that can be replayed.
    """
    from triolet.cli.replay.run import run

    run(file, request_id, config)
