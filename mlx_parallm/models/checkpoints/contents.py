"""Finds the contents of checkpoints: digests of all bytes, known at once or computed beside."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mlx_parallm.machine import user_cache
from mlx_parallm.models.checkpoints.weight_files import weight_files
from mlx_parallm.types.content import PIECE_BYTES, PendingContent, digest_of
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.json_values import is_list, is_object

logger = logging.getLogger(__name__)

# CONFIGS: the files besides weights that decide how these are read.
CONFIGS = ("config.json", "hf_quant_config.json")
CODE = "*.py"
# SHA256: how a hub cache names files of weights in its folder BLOBS, and what a memory holds.
SHA256 = re.compile("[0-9a-f]{64}", re.ASCII)
BLOBS = "blobs"
# SNAPSHOTS: the files of all revisions of a repository in it, which are links to blobs.
SNAPSHOTS = "snapshots/*/*"
# MEMORY: the file of remembered digests in the user's cache folder, and its lock.
MEMORY = "weight_digests.json"
LOCK = "weight_digests.lock"
MAX_REMEMBERED = 1024
# SETTLED_NS: a younger file may change once more without a change of its times.
SETTLED_NS = 2_000_000_000
# LOWEST: of the priorities of ``os.setpriority``.
LOWEST = 19
# DARWIN_THREAD, BACKGROUND: macOS's PRIO_DARWIN_THREAD and PRIO_DARWIN_BG, which Python 3.11 does
# not name: the calling thread gets processors and disks when others do not need them.
DARWIN_THREAD, BACKGROUND = 3, 0x1000


@dataclass(frozen=True, slots=True)
class FileState:
    """A file as ``stat`` saw it; the same state means the same bytes.

    Programs that copy files restore the time of modification, but none can set that of the change.
    """

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """Return the state of a file, or of what a link leads to; raise OSError without one."""
        status = path.stat()
        return cls(
            path=str(path.resolve()),
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
            inode=status.st_ino,
            device=status.st_dev,
        )

    def is_settled(self, now_ns: int) -> bool:
        """True if any later change of the file changes its state."""
        return now_ns - max(self.mtime_ns, self.ctime_ns) > SETTLED_NS


class DigestMemory:
    """Digests of files by their states, in a small file that processes share.

    It is only a cache: if it is damaged or cannot be written, files are hashed again.
    """

    def __init__(self, folder: Path | None, clock: Callable[[], int] = time.time_ns) -> None:
        """Use ``folder``, which is created for the first digest; None remembers nothing.

        ``clock`` returns the time of files that are written now, in ns.
        """
        self._folder = folder
        self._clock = clock

    def find(self, states: Iterable[FileState]) -> dict[FileState, str]:
        """Return the digests of those files that are remembered in these states."""
        known = self._read()
        entries = ((state, known.get(state.path, [])) for state in states)
        return {state: entry[-1] for state, entry in entries if entry[:-1] == _numbers(state)}

    def put(self, state: FileState, digest: str) -> None:
        """Remember a digest, unless the file may yet change unseen; the oldest are forgotten."""
        if self._folder is None or not state.is_settled(self._clock()):
            return
        known = self._read()
        known.pop(state.path, None)
        known[state.path] = [*_numbers(state), digest]
        newest = dict(list(known.items())[-MAX_REMEMBERED:])
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write(json.dumps(newest).encode())
        except OSError as cause:
            logger.info("digests of weights are not remembered in %s: %s", self._folder, cause)

    @contextmanager
    def locked(self) -> Generator[None]:
        """Let one process at a time hash, so that several engines read files once."""
        with ExitStack() as stack:
            if self._folder is not None:
                # Where there is no lock, several hash.
                with suppress(OSError):
                    self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    lock = stack.enter_context((self._folder / LOCK).open("wb"))
                    fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _read(self) -> dict[str, list[Any]]:
        if self._folder is None:
            return {}
        try:
            content = json.loads((self._folder / MEMORY).read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        entries = content if is_object(content) else {}
        return {path: entry for path, entry in entries.items() if _is_entry(entry)}

    def _write(self, content: bytes) -> None:
        assert self._folder is not None
        handle, part = tempfile.mkstemp(dir=self._folder, prefix="digests-", suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(part, self._folder / MEMORY)
        except OSError:
            with suppress(OSError):
                os.unlink(part)
            raise


@dataclass(slots=True, eq=False)
class SeenFolder(PendingContent):
    """A checkpoint as it was immediately before its weights were read.

    Attributes:
        folder: where it is.
        code: digest of its Python files; empty if there are none.
        settings: digest of these and of the configuration, which decide how weights are read.
        files: the states of the files of weights, in order; empty if they could not be seen, and
            then the digest never becomes known.
        known: digests of these files, so far.
        on_known: is called with the content, on the thread that finds it.
    """

    folder: Path = Path()
    code: str = ""
    settings: str = ""
    files: Sequence[FileState] = ()
    known: Mapping[FileState, str] = field(default_factory=dict[FileState, str])
    on_known: Callable[[str], None] | None = None

    def is_like(self, other: SeenFolder) -> bool:
        """True if all files were the same when the other one was seen; False if one was not."""
        return bool(self.files) and (self.settings, self.files) == (other.settings, other.files)

    def note(self, known: Mapping[FileState, str]) -> None:
        """Take digests of files; with those of all files the content becomes known."""
        self.known = known
        if self.files and known.keys() >= set(self.files):
            digests = (known[state] for state in self.files)
            self.digest = digest_of("weights", self.settings, *digests)
            if self.on_known is not None:
                self.on_known(self.digest)


class FolderContents:
    """Finds the contents of checkpoints, one at a time: hashing takes no time of a load or update.

    It is not thread-safe; it hashes on a thread of its own.
    """

    def __init__(self, memory: DigestMemory | None = None) -> None:
        """Remember digests in ``memory``; None: nowhere."""
        self._memory = memory or DigestMemory(None)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def see(self, folder: Path) -> SeenFolder:
        """Return a checkpoint as it is now, before its weights are read.

        Its content is known if a hub cache or the memory names the digests of all its files.
        """
        seen = _look(folder)
        named = _hub_digests(seen.files)
        others = [state for state in seen.files if state not in named]
        seen.note({**named, **(self._memory.find(others) if others else {})})
        return seen

    def confirm(self, seen: SeenFolder) -> SeenFolder:
        """Return a checkpoint as it was read, after that: without files if it changed meanwhile."""
        is_same = _look(seen.folder).is_like(seen)
        return seen if is_same else replace(seen, digest=None, files=(), known={})

    def hash(self, seen: SeenFolder) -> None:
        """Hash what is not known of a folder, on a thread; what it hashed before is given up."""
        self.stop()
        if seen.digest is not None or not seen.files:
            return
        self._stopped = stopped = threading.Event()
        # A disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(
            target=_hash_folder,
            args=(seen, self._memory, stopped),
            name="weight-digests",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end after its current piece."""
        self._stopped.set()

    def join(self) -> None:
        """Wait for the thread's end."""
        if self._thread is not None:
            self._thread.join()


def file_digest(path: Path, memory: DigestMemory) -> str | None:
    """Return the SHA-256 of a file, remembered or computed now; None if it changes meanwhile."""
    state = FileState.of(path)
    digest = memory.find([state]).get(state) or _hash_file(state, threading.Event())
    if digest is not None:
        memory.put(state, digest)
    return digest


def user_memory(environment: Mapping[str, str] = os.environ) -> DigestMemory:
    """Return the memory in the user's cache folder; one that forgets if there is no such folder."""
    try:
        return DigestMemory(user_cache(environment))
    except RuntimeError:
        return DigestMemory(None)


def _look(folder: Path) -> SeenFolder:
    """Return a checkpoint as it is now, with no digest of a file."""
    try:
        states = tuple(FileState.of(path) for path in weight_files(folder))
        code = _code_digest(folder)
        settings = _settings_digest(folder, code)
    except (OSError, ModelLoadError) as problem:
        # The load says what is wrong.
        logger.debug("%s has no known content: %s", folder, problem)
        return SeenFolder(folder=folder)
    return SeenFolder(folder=folder, code=code, settings=settings, files=states)


def _code_digest(folder: Path) -> str:
    """Return a digest of the Python files in a folder; empty if there are none."""
    paths = sorted(path for path in folder.glob(CODE) if path.is_file())
    parts = [part for path in paths for part in (path.name, path.read_bytes())]
    return digest_of("code", *parts) if parts else ""


def _settings_digest(folder: Path, code: str) -> str:
    """Return a digest of what decides how the weights of a folder are read."""
    paths = (folder / name for name in CONFIGS)
    configs = [path.read_bytes() if path.is_file() else b"" for path in paths]
    return digest_of("settings", code, *configs)


def _hub_digests(states: Iterable[FileState]) -> dict[FileState, str]:
    """Return the digests by which hub caches name files, of those that have stayed as they were.

    A cache writes a blob first and then the links of snapshots to it, so a blob that is younger
    than one of them was changed in place. Where links are not supported, files are named as in the
    repository.
    """
    blobs = [state for state in states if _is_blob(Path(state.path))]
    made_ns: dict[str, int] = {}
    for repository in {Path(state.path).parent.parent for state in blobs}:
        made_ns |= _oldest_links(repository)
    return {
        state: Path(state.path).name
        for state in blobs
        if state.ctime_ns <= made_ns.get(state.path, -1)
    }


def _is_blob(path: Path) -> bool:
    """True if a file is one that a hub cache names by its SHA-256."""
    is_in_cache = path.parent.name == BLOBS and path.parent.parent.name.startswith("models--")
    return is_in_cache and SHA256.fullmatch(path.name) is not None


def _oldest_links(repository: Path) -> dict[str, int]:
    """Return when the oldest link of a snapshot to each blob was made, in ns; none if unknown."""
    made_ns: dict[str, int] = {}
    try:
        for link in repository.glob(SNAPSHOTS):
            if link.is_symlink():
                blob = str(repository / BLOBS / link.readlink().name)
                time_ns = link.lstat().st_ctime_ns
                made_ns[blob] = min(made_ns.get(blob, time_ns), time_ns)
    except OSError:
        # A snapshot is removed meanwhile.
        return {}
    return made_ns


def _hash_folder(seen: SeenFolder, memory: DigestMemory, stopped: threading.Event) -> None:
    """Hash the files of a folder that are not known, and note its content."""
    _lower_priority()
    known = dict(seen.known)
    try:
        for state in seen.files:
            if state in known:
                continue
            with memory.locked():
                # Another process may have hashed it meanwhile.
                digest = memory.find([state]).get(state) or _hash_file(state, stopped)
                if digest is None:
                    return
                memory.put(state, digest)
            known[state] = digest
    except OSError as problem:
        logger.info("%s could not be hashed: %s", seen.folder, problem)
        return
    seen.note(known)


def _hash_file(state: FileState, stopped: threading.Event) -> str | None:
    """Return the SHA-256 of a file, in hex; None if it was stopped or the file has changed."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(PIECE_BYTES))
    path = Path(state.path)
    with path.open("rb", buffering=0) as file:
        # Reading and hashing release the GIL.
        while (count := file.readinto(buffer)) and not stopped.is_set():
            digest.update(buffer[:count])
    is_whole = not stopped.is_set() and FileState.of(path) == state
    return digest.hexdigest() if is_whole else None


def _lower_priority() -> None:
    """Let this thread compute and read only when others do not."""
    try:
        if sys.platform == "darwin":
            os.setpriority(DARWIN_THREAD, 0, BACKGROUND)
        else:
            # On Linux a thread has a priority of its own.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
    except OSError as problem:
        logger.debug("weights are hashed with the priority of other threads: %s", problem)


def _numbers(state: FileState) -> list[int]:
    """Return what the memory has of a state besides the path."""
    return list(astuple(state)[1:])


def _is_entry(entry: Any) -> bool:
    """True if an entry of the memory has the numbers of a state and a digest."""
    if not is_list(entry) or len(entry) != len(fields(FileState)):
        return False
    *numbers, digest = entry
    is_digest = isinstance(digest, str) and SHA256.fullmatch(digest) is not None
    return is_digest and all(type(number) is int for number in numbers)
