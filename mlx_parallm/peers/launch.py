"""How processes of a server or of ``LLM`` are started; it imports nothing of theirs."""

from __future__ import annotations

import sys

from mlx_parallm.config import ServerConfig

#: ``ENGINE``, ``HTTP``: the modules that the processes run.
ENGINE, HTTP = "mlx_parallm.cli.engine_process", "mlx_parallm.cli.api_servers.process"


def module_command(module: str, config: ServerConfig) -> list[str]:
    """Return the command line of a process; the caller appends the descriptors of its sockets."""
    # -P keeps the working directory off the import path.
    python = [sys.executable, "-P", "-m", module]
    return [*python, "--log-level", config.log_level, "--log-format", config.log_format]
