"""Where compiled kernels, and what else a load finds out on a device, are kept on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mlx_parallm.machine import user_cache
from mlx_parallm.storage.cache_folder import CacheFolder, CacheForm

#: ``FOLDER_VARIABLE``: the environment variable of ``--kernel-cache-dir``.
FOLDER_VARIABLE = "MLX_PARALLM_KERNEL_CACHE_DIR"
#: ``NOWHERE``: the value of ``--kernel-cache-dir`` with which nothing is kept.
NOWHERE = "none"
KERNELS = CacheForm(kind="kernel", version=1, owner="compiled GPU kernels (--kernel-cache-dir)")


class KernelStore(CacheFolder):
    """A folder of compiled kernels."""

    def __init__(self, folder: Path | None) -> None:
        """Use ``folder``, which is created for the first kernel; None keeps none."""
        super().__init__(folder, KERNELS)


def kernel_folder(setting: str | None, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder for compiled kernels and remembered choices; None to keep nothing.

    Args:
        setting: ``--kernel-cache-dir``; None for the environment's or the user's cache.
        environment: the variables of this process.
    """
    chosen = setting or environment.get(FOLDER_VARIABLE)
    if chosen == NOWHERE:
        return None
    if chosen:
        return Path(chosen).expanduser()
    try:
        return user_cache(environment) / "kernels"
    except RuntimeError:
        # The user has no home.
        return None
