"""Keeps enough file descriptors for the connections of a server and of the load client.

mlx_lm sets this limit when ``mlx_lm.utils`` is imported: to 2,048, and the hard limit to 4,096,
which nothing but a privileged process can raise again. Where the hard limit is lower already, its
import fails. That one call is kept from happening.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import resource
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

# MAX_DESCRIPTORS: the soft limit that a process gets, if its hard limit allows that many.
MAX_DESCRIPTORS = 65_536
# MAX_DESCRIPTORS_DARWIN: likewise on macOS, whose kernel refuses more (OPEN_MAX).
MAX_DESCRIPTORS_DARWIN = 10_240
# LOWERING: the module whose import lowers the limit.
LOWERING = "mlx_lm.utils"


def raise_descriptor_limit() -> None:
    """Raise the soft limit of descriptors; child processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS_DARWIN if sys.platform == "darwin" else MAX_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # A sandbox may forbid it.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def keep_descriptor_limit() -> None:
    """Keep mlx_lm from lowering the limits of this process; call it before mlx_lm is imported."""
    if LOWERING not in sys.modules and not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds ``LOWERING`` where Python does, once, and lets it be imported by ``_Loader``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See importlib."""
        if fullname != LOWERING:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Executes a module by its own loader, which is the module's loader from then on."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """See importlib."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """See importlib."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        with _limits_kept():
            self._loader.exec_module(module)


@contextmanager
def _limits_kept() -> Generator[None]:
    """Ignore calls that set the limit of descriptors in the code of ``LOWERING``."""
    set_limit = resource.setrlimit

    def ignoring(which: int, limits: tuple[int, int]) -> None:
        caller = sys._getframe(1).f_globals.get("__name__")  # pyright: ignore[reportPrivateUsage]
        if which != resource.RLIMIT_NOFILE or caller != LOWERING:
            set_limit(which, limits)

    resource.setrlimit = ignoring
    try:
        yield
    finally:
        resource.setrlimit = set_limit
