"""The command `triolet profile`."""

from __future__ import annotations

import attrs
import click

from triolet.cli import options
from triolet.cli.profile.workload import workload_options
from triolet.config.engine import EngineConfig


@click.command(cls=options.SectionedCommand)
@workload_options(num_prompts=8, output_len=32)
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
