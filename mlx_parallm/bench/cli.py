"""The command ``mlx_parallm bench`` and its subcommands."""

from __future__ import annotations

import argparse

from mlx_parallm.bench import engine, serve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands and their flags."""
    # Without this, a subcommand's --help would begin with the usage of its parent.
    prog = parser.prog
    kinds = parser.add_subparsers(required=True, metavar="WHAT", prog=prog)
    for name, module, text in (
        ("serve", serve, "load a running OpenAI-compatible server and report its speed"),
        ("engine", engine, "run an engine in this process and show where a step's time goes"),
    ):
        kind = kinds.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
        )
        module.add_arguments(kind)
        kind.set_defaults(measure=module.run)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and return the exit status."""
    return args.measure(args)
