"""A pytest plugin that prepares a process of tests before ``conftest.py`` imports MLX."""

from __future__ import annotations

import os

from mlx_parallm.process_setup.device_process import prepare_device_process


def pytest_load_initial_conftests() -> None:
    """Prepare it; pytest calls this before it imports any ``conftest.py``."""
    # Threads of OpenBLAS spin while they wait, and do not outlive a fork.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    prepare_device_process()
