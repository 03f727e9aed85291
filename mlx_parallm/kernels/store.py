"""A cache of compiled kernels on disk."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

# A file is MAGIC, the digest of its key and code, and the code.
MAGIC = b"mlx_parallm kernel 1\n"
SUFFIX = ".kernel"
_DIGEST_BYTES = hashlib.sha256().digest_size


class KernelStore:
    """A folder of compiled kernels, which several processes may use at once.

    It is only a cache: whatever fails, a kernel is compiled again. Files are written under another
    name and renamed, and they are read only if their digest is right.
    """

    def __init__(self, folder: Path) -> None:
        """Use ``folder``, which is created for the first kernel."""
        self.folder = folder
        self._lock = threading.Lock()
        self._problem: str | None = None

    @property
    def problem(self) -> str | None:
        """Return why nothing is written any more; None while files can be written."""
        return self._problem

    def get(self, key: str) -> bytes | None:
        """Return the code of a key; None if there is none or the file is damaged."""
        try:
            content = self._file(key).read_bytes()
        except OSError:
            return None
        code = content[len(MAGIC) + _DIGEST_BYTES :]
        return code if code and content == _content(key, code) else None

    def put(self, key: str, code: bytes) -> None:
        """Write the code of a key. After a failure this process writes nothing more."""
        if self._problem is not None:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write(self._file(key), _content(key, code))
        except OSError as cause:
            self._give_up(cause)

    def count(self) -> int:
        """Return the number of kernels in the folder."""
        try:
            return sum(path.suffix == SUFFIX for path in self.folder.iterdir())
        except OSError:
            return 0

    def _file(self, key: str) -> Path:
        return self.folder / (key + SUFFIX)

    def _write(self, path: Path, content: bytes) -> None:
        handle, part = tempfile.mkstemp(dir=self.folder, prefix=path.stem[:16], suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(part, path)
        except OSError:
            with suppress(OSError):
                os.unlink(part)
            raise

    def _give_up(self, cause: OSError) -> None:
        with self._lock:
            is_first = self._problem is None
            self._problem = str(cause)
        if is_first:
            logger.warning(
                "compiled GPU kernels are not kept in %s (--kernel-cache-dir): %s",
                self.folder,
                cause,
            )


def _content(key: str, code: bytes) -> bytes:
    return MAGIC + hashlib.sha256(key.encode() + b"\n" + code).digest() + code
