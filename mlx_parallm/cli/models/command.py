"""The subcommands of ``mlx_parallm models`` and their flags."""

from __future__ import annotations

import argparse

from mlx_parallm.cli.models import convert, local, pull, served

PARTS = (local, served, pull, convert)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands and their flags."""
    # Without this, a subcommand's --help would begin with the usage of its parent.
    kinds = parser.add_subparsers(required=True, metavar="WHAT", prog=parser.prog)
    for part in PARTS:
        part.add_subcommands(kinds)


def run(args: argparse.Namespace) -> int:
    """Run a subcommand and return the exit status."""
    return args.action(args)
