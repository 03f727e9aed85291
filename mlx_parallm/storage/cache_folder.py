"""Folders of files that are made again if they are missing or damaged."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheForm:
    """The form of a folder's files.

    Attributes:
        kind: a word for a file's content, which is its suffix too.
        version: of the content's form; files of other versions are not read.
        owner: what is not kept after a failure, and the flag that names the folder.
        max_files: files beyond this number are removed, the least recently used first; None if
            all are kept.
    """

    kind: str
    version: int
    owner: str
    max_files: int | None = None

    @property
    def suffix(self) -> str:
        """Return the end of the names of its files."""
        return f".{self.kind}"

    def file_of(self, key: str, content: bytes) -> bytes:
        """Return a whole file: a line with kind and version, the digest, and the content."""
        digest = hashlib.sha256(key.encode() + b"\n" + content).digest()
        return self._head + digest + content

    def content_of(self, key: str, file: bytes) -> bytes | None:
        """Return the content of a file; None if it is damaged, empty or of another key."""
        content = file[len(self._head) + _DIGEST_BYTES :]
        return content if content and file == self.file_of(key, content) else None

    @property
    def _head(self) -> bytes:
        return f"mlx_parallm {self.kind} {self.version}\n".encode()


class CacheFolder:
    """Contents by their keys in a folder, which several processes may use at once.

    It is only a cache: whatever fails, a content is made again. Files are written under another
    name and renamed, and they are read only if their digest is right.
    """

    def __init__(self, folder: Path | None, form: CacheForm) -> None:
        """Use ``folder``, which is created for the first file; None keeps nothing."""
        self.folder = folder
        self._form = form
        self._lock = threading.Lock()
        self._problem: str | None = None

    @property
    def problem(self) -> str | None:
        """Return why nothing is written any more; None while files can be written."""
        return self._problem

    def get(self, key: str) -> bytes | None:
        """Return the content of a key; None if there is none or the file is damaged."""
        if self.folder is None:
            return None
        path = self._file(self.folder, key)
        try:
            content = self._form.content_of(key, path.read_bytes())
            if content is not None and self._form.max_files is not None:
                os.utime(path)
        except OSError:
            return None
        return content

    def put(self, key: str, content: bytes) -> None:
        """Write the content of a key. After a failure this process writes nothing more."""
        if self.folder is None or self._problem is not None:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(self._file(self.folder, key), self._form.file_of(key, content))
            self._remove_oldest()
        except OSError as cause:
            self._give_up(cause)

    def count(self) -> int:
        """Return the number of contents in the folder."""
        try:
            return len(self._files())
        except OSError:
            return 0

    def _file(self, folder: Path, key: str) -> Path:
        return folder / (key + self._form.suffix)

    def _files(self) -> list[Path]:
        if self.folder is None:
            return []
        return [path for path in self.folder.iterdir() if path.suffix == self._form.suffix]

    def _remove_oldest(self) -> None:
        if self._form.max_files is None:
            return
        files = self._files()
        if len(files) <= self._form.max_files:
            return
        times: list[tuple[float, Path]] = []
        for path in files:
            # Another process may have removed it.
            with suppress(FileNotFoundError):
                times.append((path.stat().st_mtime, path))
        for _, path in sorted(times)[: -self._form.max_files]:
            path.unlink(missing_ok=True)

    def _give_up(self, cause: OSError) -> None:
        with self._lock:
            is_first = self._problem is None
            self._problem = str(cause)
        if is_first:
            logger.warning("%s are not kept in %s: %s", self._form.owner, self.folder, cause)


def _write(path: Path, content: bytes) -> None:
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.stem[:16], suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            os.unlink(part)
        raise
