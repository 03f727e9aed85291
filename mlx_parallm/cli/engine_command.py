"""How a server starts the processes of its engines; it imports nothing of theirs."""

from __future__ import annotations

import sys

from mlx_parallm.config import ServerConfig

#: ``SWITCH_INTERVAL_S``: with Python's default of 5 ms the engine would wait as long for the GIL
#: after every step.
SWITCH_INTERVAL_S = 0.0005


def engine_command(config: ServerConfig) -> list[str]:
    """Return the command line of the process; the caller appends the descriptor."""
    # -P keeps the working directory off the import path.
    module = [sys.executable, "-P", "-m", "mlx_parallm.cli.engine_process"]
    return [*module, "--log-level", config.log_level, "--log-format", config.log_format]
