"""`python -m triolet` is the `triolet` command."""

from triolet.cli import main

main(prog_name="triolet")
