"""Images in files of this machine, below a folder that the operator allows."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote, urlsplit

from mlx_parallm.confinement import Confinement
from mlx_parallm.media_limits import MediaLimits
from mlx_parallm.types.errors import InvalidRequestError

SCHEME = "file:"
PARAM = "url"
#: Missing files and files elsewhere get one answer, so that it does not say which files exist.
NOT_READABLE = "There is no such file below the folder of --allowed-local-media-path."


class LocalFiles:
    """Reads files that ``file:`` URLs name."""

    def __init__(self, limits: MediaLimits) -> None:
        """``limits`` has the folder."""
        roots = [limits.allowed_local_path] if limits.allowed_local_path else []
        self._confinement = Confinement(roots, ())
        self._limits = limits

    def read(self, url: str) -> bytes:
        """Return the bytes of a file.

        Raises:
            InvalidRequestError: there is none that may be read, or it is too large.
        """
        if not self._confinement.roots:
            raise InvalidRequestError(
                "Files of the server are not read (--allowed-local-media-path); send images as "
                "data URLs."
            )
        try:
            allowed = self._confinement.folders(_path_of(url), param=PARAM)
            return self._read(allowed[0]) if allowed else _refuse()
        except (OSError, ValueError, RuntimeError):
            # Links in a circle are a RuntimeError of older Pythons.
            return _refuse()

    def _read(self, path: Path) -> bytes:
        # The path has no link any more; O_NONBLOCK does not wait for writers of a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return _refuse()
            self._limits.check_bytes(status.st_size)
            # A file may grow while it is read.
            data = file.read(self._limits.max_bytes + 1)
        self._limits.check_bytes(len(data))
        return data


def _path_of(url: str) -> str:
    """Return the path of a ``file:`` URL.

    Raises:
        ValueError: the URL is none.
    """
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        _refuse()
    return unquote(parts.path, errors="strict") if parts.path.startswith("/") else _refuse()


def _refuse() -> NoReturn:
    raise InvalidRequestError(NOT_READABLE)
