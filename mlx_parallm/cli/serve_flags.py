"""The flags of ``mlx_parallm serve``, without its other modules, so that ``--help`` is quick."""

from __future__ import annotations

import argparse

from mlx_parallm.cli.configure import add_models, add_settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the models and flags of ``mlx_parallm serve``."""
    parser.usage = "%(prog)s [ID_OR_FOLDER ...] [FLAGS]"
    add_models(parser)
    add_settings(parser)
