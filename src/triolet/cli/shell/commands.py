"""Commands that set up the user's shell."""

from __future__ import annotations

from typing import cast

import click


@click.command()
@click.argument(
    "shell", metavar="[bash|zsh|fish]", required=False, type=click.Choice(["bash", "zsh", "fish"])
)
@click.option("--print", "prints", is_flag=True, help="Print the script instead of installing it.")
@click.pass_context
def completion(context: click.Context, shell: str | None, prints: bool) -> None:
    """Install completion for a shell.

    The script is written to a file, which the shell's start-up file reads from then on; by default for the shell in
    $SHELL. Doing it again brings it up to date.
    """
    from triolet.cli.shell.completion import completion_script, install, present_shell

    root = context.find_root().command
    shell = shell or present_shell()
    if prints:
        click.echo(completion_script(root, shell))
        return
    for path in install(root, shell):
        click.echo(f"written: {path}")
    click.echo("Start a new shell to use it.")


@click.command()
@click.option(
    "--install", "installs", is_flag=True, help="Write it where man finds it instead of printing it."
)
@click.pass_context
def man(context: click.Context, installs: bool) -> None:
    """Print the manual page, made from the help of the commands."""
    from triolet.cli.shell.man_page import install, man_page

    root = cast(click.Group, context.find_root().command)
    click.echo(f"written: {install(root)}" if installs else man_page(root), nl=installs)


SHELL_COMMANDS = (completion, man)
