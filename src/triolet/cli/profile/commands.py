"""The command `triolet profile`."""

from __future__ import annotations

import attrs
import click

from triolet.cli import options
from triolet.config.engine import EngineConfig


@click.command(cls=options.SectionedCommand)
@click.option("--num-prompts", type=click.IntRange(1), default=8, show_default=True, help="Requests in all.")
@click.option(
    "--input-len", type=click.IntRange(1), default=128, show_default=True, help="Tokens in a prompt."
)
@click.option(
    "--output-len", type=click.IntRange(1), default=32, show_default=True, help="Tokens in an answer."
)
@click.option(
    "--concurrency", type=click.IntRange(1), help="Requests under way together; by default --max-num-seqs."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@options.engine_options
def profile(
    num_prompts: int,
    input_len: int,
    output_len: int,
    concurrency: int | None,
    as_json: bool,
    config: EngineConfig,
) -> None:
    """Show where the time of a model's steps goes.

    Prompts of random tokens and greedy answers of a fixed length are computed, as by `triolet bench`, while a profile
    is recorded. The trace is written to --profile-dir, by default the current folder, for chrome://tracing or Perfetto.
    A profile slows the steps down: compare its shares, and measure speed with `triolet bench`.
    """
    from triolet.cli.bench import Work
    from triolet.cli.profile.report import run

    together = min(concurrency or config.max_num_seqs, num_prompts)
    work = Work(num_prompts=num_prompts, input_len=input_len, output_len=output_len, concurrency=together)
    run(work, attrs.evolve(config, profile_dir=config.profile_dir or "."), as_json=as_json)
