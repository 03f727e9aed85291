"""The user's cache folder for this program."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def user_cache(environment: Mapping[str, str]) -> Path:
    """Return the user's cache folder for this program (XDG Base Directory); it may not exist.

    Raises:
        RuntimeError: the user has no home folder.
    """
    caches = environment.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path is ignored.
    home = Path(caches) if caches.startswith("/") else Path.home() / ".cache"
    return home / "mlx_parallm"
