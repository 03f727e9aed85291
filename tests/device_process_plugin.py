"""A pytest plugin that prepares a process of tests before ``conftest.py`` imports MLX."""

from __future__ import annotations

from mlx_parallm.process_setup.device_process import prepare_device_process


def pytest_load_initial_conftests() -> None:
    """Prepare it; pytest calls this before it imports any ``conftest.py``."""
    prepare_device_process()
