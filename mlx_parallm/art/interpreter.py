"""The interpreter that runs the server: ART and MLX need not be in the same environment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from mlx_parallm.art.server import ServerStartError

#: ``PYTHON_VARIABLE``: the variable that names the server's interpreter.
PYTHON_VARIABLE = "MLX_PARALLM_PYTHON"
#: ``PROJECT_PYTHON``: the server's interpreter in a project's folder.
PROJECT_PYTHON = Path(".venv-mlx-parallm-server", "bin", "python")
#: ``MODULES``: what the server needs of its environment.
MODULES = ("mlx_parallm", "mlx.core")
# Only finding modules starts nothing on a GPU, and takes some 30 ms.
_FIND = """
import sys
from importlib.util import find_spec
for name in sys.argv[1:]:
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        print(name)
"""


def server_python(configured: str | None, environment: Mapping[str, str], project: Path) -> str:
    """Return the interpreter of the server.

    Args:
        configured: ``ServerConfig.python``.
        environment: the variables of this process.
        project: the folder that may hold ``.venv-mlx-parallm-server``.

    Raises:
        ServerStartError: it cannot be started, or lacks this package or MLX.
    """
    named = configured or environment.get(PYTHON_VARIABLE)
    beside = project / PROJECT_PYTHON
    python = named or (str(beside) if beside.is_file() else sys.executable)
    missing = " and no ".join(_missing_modules(python))
    if missing:
        raise ServerStartError(
            f"The server's interpreter, {python}, has no {missing}. "
            f"Name one that has them: ServerConfig(python=...), the variable {PYTHON_VARIABLE}, or "
            f"{PROJECT_PYTHON} in {project}."
        )
    return python


def _missing_modules(python: str) -> list[str]:
    """Return which of ``MODULES`` an interpreter cannot find."""
    command = [python, "-c", _FIND, *MODULES]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
    except OSError as error:
        raise ServerStartError(f"The server's interpreter cannot be started: {error}") from error
    except subprocess.CalledProcessError as error:
        raise ServerStartError(
            f"{python} is no interpreter for the server: it ended with {error.returncode}. "
            f"{error.stderr.strip()}"
        ) from error
    return answer.stdout.split()
