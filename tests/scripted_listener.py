"""`mlx_parallm engine --listen HOST:PORT SCRIPT`, whose engines run a script without a model."""

from __future__ import annotations

import sys

from mlx_parallm.cli import engine_listener
from mlx_parallm.cli.parser import CommandParser


def main() -> int:
    """Listen until SIGTERM."""
    parser = CommandParser()
    engine_listener.add_arguments(parser)
    parser.add_argument("script")
    args = parser.parse_args()
    command = [sys.executable, "-m", "tests.scripted_process", args.script]
    engine_listener.module_command = lambda module, config: command
    return engine_listener.run(args)


if __name__ == "__main__":
    sys.exit(main())
