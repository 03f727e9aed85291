"""Files of the hub, fetched into its cache: continued where they ended, and checked."""

from __future__ import annotations

import fcntl
import hashlib
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx2
from huggingface_hub import constants, get_session, hf_hub_url, utils
from huggingface_hub.hf_api import RepoFile

from mlx_parallm.types.errors import ModelLoadError

#: ``TRIES``: connections in a row that bring nothing before a file is given up.
TRIES = 5
RETRY_S = 1.0
NUM_CONNECTIONS = 4
CHUNK_BYTES = 1 << 20
PARTIAL_CONTENT = 206
RANGE_NOT_SATISFIABLE = 416


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository at a commit.

    Attributes:
        name: its path in the repository.
        url: where it is.
        size: its bytes.
        digest: SHA-256 of a large file (LFS), git's SHA-1 of another; also the cache's name of it.
        is_large: True if the digest is a SHA-256.
    """

    name: str
    url: str
    size: int
    digest: str
    is_large: bool

    @classmethod
    def listed(cls, repo: str, commit: str, entry: RepoFile) -> HubFile:
        """Return a file of the hub's listing of a commit."""
        digest = entry.blob_id if entry.lfs is None else entry.lfs.sha256
        url = hf_hub_url(repo, entry.path, revision=commit)
        return cls(entry.path, url, entry.size, digest.lower(), entry.lfs is not None)

    def new_hash(self) -> Any:
        """Return a hash of nothing, whose ``hexdigest`` of all bytes must be the digest."""
        if self.is_large:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


class BlobFolder:
    """The folder of a repository's contents in the hub's cache.

    A file lies there under its digest, and until it is complete under that name with an ending.
    So what was fetched serves the next attempt, of this process or of another.
    """

    def __init__(
        self,
        folder: Path,
        on_bytes: Callable[[int], object],
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        """Use a folder, which may not exist.

        Args:
            folder: the folder.
            on_bytes: called with numbers of bytes that are there; negative ones were discarded.
            wait: waits for so many seconds before another attempt.
        """
        self._folder = folder
        self._on_bytes = on_bytes
        self._wait = wait
        self._lock = threading.Lock()
        self._is_stopped = threading.Event()

    def missing_bytes(self, files: Iterable[HubFile]) -> int:
        """Return how many bytes of files are still to be fetched."""
        return sum(self._missing(file) for file in files)

    def _missing(self, file: HubFile) -> int:
        if self._path(file).exists():
            return 0
        partial = self._partial(file)
        return max(0, file.size - (partial.stat().st_size if partial.exists() else 0))

    def fetch(self, files: Iterable[HubFile]) -> None:
        """Fetch what is missing of files, several at once, and check all of them.

        Raises:
            ModelLoadError: a content has another digest; it is removed.
            HfHubHTTPError: the hub refuses a file.
            TransportError: a connection could not be made, or broke too often.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
            pending = [pool.submit(self._fetch, file) for file in files]
            try:
                for each in pending:
                    each.result()
            except BaseException:
                # Other files go on until their next bytes; what they have stays.
                self._is_stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _fetch(self, file: HubFile) -> None:
        if self._is_there(file):
            return
        partial = self._partial(file)
        with partial.open("a+b") as output:
            # Another process may be at the same file.
            fcntl.flock(output, fcntl.LOCK_EX)
            if self._is_there(file):
                return
            content = _Content(file, output, self._count)
            if content.size >= file.size and not content.is_right():
                content.discard()
            self._complete(content)
            if not content.is_right():
                partial.unlink()
                raise ModelLoadError(
                    f"{file.name}: what was downloaded has another digest than the hub says "
                    f"({file.digest}); it was removed."
                )
            output.flush()
            partial.rename(self._path(file))

    def _is_there(self, file: HubFile) -> bool:
        """True if the content is there; one with another digest is removed."""
        path = self._path(file)
        if not path.exists():
            return False
        with path.open("rb") as stored:
            content = _Content(file, stored, self._count)
        if content.is_right():
            return True
        self._count(-content.size)
        path.unlink()
        return False

    def _complete(self, content: _Content) -> None:
        tries = TRIES
        while content.size < content.file.size:
            size, problem = content.size, None
            try:
                content.read_on()
            except httpx2.TransportError as error:
                problem = error
            tries = TRIES if content.size > size else tries - 1
            if content.size < content.file.size:
                if tries == 0:
                    raise problem or ModelLoadError(f"{content.file.name}: the hub sends a part.")
                self._check_stopped()
                self._wait(RETRY_S)

    def _count(self, num_bytes: int) -> None:
        self._check_stopped()
        with self._lock:
            self._on_bytes(num_bytes)

    def _check_stopped(self) -> None:
        if self._is_stopped.is_set():
            raise ModelLoadError("The download was stopped.")

    def _path(self, file: HubFile) -> Path:
        return self._folder / file.digest

    def _partial(self, file: HubFile) -> Path:
        return self._folder / f"{file.digest}.incomplete"


class _Content:
    """The bytes of a file that are there.

    Attributes:
        file: the file.
        size: how many bytes are there.
    """

    def __init__(self, file: HubFile, stored: IO[bytes], on_bytes: Callable[[int], object]) -> None:
        self.file = file
        self.size = 0
        self._stored = stored
        self._on_bytes = on_bytes
        self._hash = file.new_hash()
        stored.seek(0)
        while chunk := stored.read(CHUNK_BYTES):
            self._count(chunk)

    def is_right(self) -> bool:
        """True if size and digest are those that the hub says."""
        return self.size == self.file.size and self._hash.hexdigest() == self.file.digest

    def read_on(self) -> None:
        """Append what a connection brings, as far as the file's size."""
        # Positions are those of the file only if it is sent as it is.
        headers = utils.build_hf_headers()  # pyright: ignore[reportUnknownMemberType]
        headers["Accept-Encoding"] = "identity"
        if self.size:
            headers["Range"] = f"bytes={self.size}-"
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream(
            "GET", self.file.url, headers=headers, timeout=timeout
        ) as response:
            if self.size and response.status_code != PARTIAL_CONTENT:
                self.discard()
                if response.status_code == RANGE_NOT_SATISFIABLE:
                    return
            utils.hf_raise_for_status(response)
            # Chunks of a fixed size would lose what came of the last one before a break.
            for chunk in response.iter_bytes():
                # One byte more than the size is enough to know that it is another file.
                self._append(chunk[: self.file.size - self.size + 1])
                if self.size > self.file.size:
                    return

    def _append(self, chunk: bytes) -> None:
        self._stored.write(chunk)
        self._count(chunk)

    def _count(self, chunk: bytes) -> None:
        self._hash.update(chunk)
        self.size += len(chunk)
        self._on_bytes(len(chunk))

    def discard(self) -> None:
        """Begin anew."""
        self._stored.truncate(0)
        self._on_bytes(-self.size)
        self.size = 0
        self._hash = self.file.new_hash()
