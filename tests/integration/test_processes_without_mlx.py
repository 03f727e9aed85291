"""What the process of a server imports if its engines live in other processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("mlx", "mlx_lm", "torch", "transformers")
MODULES = (
    "mlx_parallm.api.app",
    "mlx_parallm.cli.api_servers.process",
    "mlx_parallm.cli.serve",
    "mlx_parallm.engine.core",
    "mlx_parallm.engine.parallel.life",
    "mlx_parallm.engine.remote.life",
    "mlx_parallm.serving.async_engine",
)


def heavy_modules(*imported: str) -> list[str]:
    """Return which of the large libraries a process has that imports modules."""
    code = (
        "import importlib, json, sys\n"
        f"for name in {imported!r}: importlib.import_module(name)\n"
        f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    command = [sys.executable, "-c", code]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


@pytest.mark.parametrize("module", MODULES)
def test_the_servers_process_imports_no_large_library(module: str) -> None:
    assert heavy_modules(module) == []


def test_the_engines_process_imports_mlx() -> None:
    assert "mlx" in heavy_modules("mlx_parallm.cli.engine_process")
