"""The declaration of the subcommands of ``mlx_parallm models``, and tables that they print."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

#: Subparsers of a parser, whose class argparse does not name.
Subcommands = Any
#: Runs a subcommand and returns the exit status.
Action = Callable[[argparse.Namespace], int]


def add_subcommand(
    kinds: Subcommands, name: str, summary: str, action: Action
) -> argparse.ArgumentParser:
    """Add a subcommand without flags and return its parser."""
    kind: argparse.ArgumentParser = kinds.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", allow_abbrev=False
    )
    kind.set_defaults(action=action)
    return kind


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as lines with aligned columns; the first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join(lines)
