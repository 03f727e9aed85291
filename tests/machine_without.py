"""`python -m tests.machine_without FOLDER FLAGS`: a listener on a machine without this folder."""

from __future__ import annotations

import sys

from mlx_parallm.cli import engine_listener
from mlx_parallm.cli.parser import CommandParser

# ENGINE: the process of an engine that finds no folder.
ENGINE = """
import sys
from pathlib import Path
is_dir = Path.is_dir
Path.is_dir = lambda path: str(path) != {folder!r} and is_dir(path)
from mlx_parallm.cli.engine_process import main
sys.exit(main())
"""


def main(folder: str, *flags: str) -> int:
    """Listen until SIGTERM."""
    parser = CommandParser()
    engine_listener.add_arguments(parser)
    levels = ["--log-level", "info", "--log-format", "console"]
    command = [sys.executable, "-c", ENGINE.format(folder=folder), *levels]
    engine_listener.module_command = lambda module, config: command
    return engine_listener.run(parser.parse_args(flags))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
