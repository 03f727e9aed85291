"""The folder of the disk store, which processes share: locks, and a folder for each writer.

``DIR/lock`` is locked by flock while files change, and has a counter of such changes.
``DIR/<32 hex digits>/lock`` is locked as long as the writer of that folder lives.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlx_parallm.storage.disk import FILE_MODE, FOLDER_MODE
from mlx_parallm.types.errors import ConfigError

LOCK = "lock"
_WRITER = re.compile(r"[0-9a-f]{32}")
_COUNTER_BYTES = 8
SETTING = "--kv-disk"


def is_writer(name: str) -> bool:
    """True if a folder of this name in DIR is a writer's."""
    return _WRITER.fullmatch(name) is not None


def check_kv_folder(path: Path, *, state_of: Callable[[Path], os.stat_result] = os.stat) -> None:
    """Create the folder of ``--kv-disk`` if it is not there, and check that it can be used.

    ``state_of`` returns the state of a folder.

    Raises:
        ConfigError: it is no folder, not writable, or another user could exchange it.
    """
    path = Path(os.path.abspath(path))
    try:
        path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        resolved = path.resolve(strict=True)
        if not os.access(resolved, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(f"{SETTING}: {path} is not writable.")
        _check_owners(resolved, state_of)
    except FileExistsError:
        raise ConfigError(f"{SETTING}: {path} is not a folder.") from None
    except (OSError, RuntimeError) as problem:
        why = getattr(problem, "strerror", None) or str(problem)
        raise ConfigError(f"{SETTING}: {path} cannot be used: {why}.") from None


def _check_owners(path: Path, state_of: Callable[[Path], os.stat_result]) -> None:
    """Check that only this user and root can replace the folder or what is in it."""
    user, state = os.geteuid(), state_of(path)
    if state.st_uid != user:
        raise ConfigError(f"{SETTING}: {path} belongs to another user.")
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{SETTING}: {path} can be written by other users; its mode must be 700.")
    for parent in path.parents:
        state = state_of(parent)
        if state.st_mode & stat.S_ISVTX:
            continue
        if state.st_uid not in (0, user):
            raise ConfigError(
                f"{SETTING}: {path} is below {parent}, which belongs to another user."
            )
        if state.st_mode & stat.S_IWOTH:
            raise ConfigError(
                f"{SETTING}: {path} is below {parent}, in which all users can exchange folders."
            )


def is_ours(path: Path) -> bool:
    """True if a folder was one of ``--kv-disk`` before."""
    return (path / LOCK).exists()


def open_lock(path: Path) -> int:
    """Open the file of a lock, create it if necessary, and return its descriptor.

    On a file system that became read-only, it is opened for reading: it can be locked too.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, FILE_MODE)
    except OSError as problem:
        if problem.errno != errno.EROFS:
            raise
        return os.open(path, os.O_RDONLY | flags)


def is_at(descriptor: int, path: Path) -> bool:
    """True if the file that is open is the one at a path, and not a removed one."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


@contextmanager
def locked(folder: Path) -> Generator[ChangeCounter]:
    """Keep other processes from changing files of the folder; give the counter of changes."""
    path = folder / LOCK
    while True:
        descriptor = open_lock(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The file may have been removed meanwhile, and another process have locked a new one.
            if is_at(descriptor, path):
                yield ChangeCounter(descriptor)
                return
        finally:
            os.close(descriptor)


class ChangeCounter:
    """A number that every process increases before it changes files of the folder."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self) -> int:
        """Return the number; 0 if the file is new."""
        return int.from_bytes(os.pread(self._descriptor, _COUNTER_BYTES, 0), "little")

    def increase(self) -> int:
        """Increase the number, and return it."""
        number = (self.read() + 1) % (1 << 8 * _COUNTER_BYTES)
        if fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        os.pwrite(self._descriptor, number.to_bytes(_COUNTER_BYTES, "little"), 0)
        return number


class WriterFolder:
    """The folder of one writer, locked as long as this object is open."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def is_there(self) -> bool:
        """True if it was neither removed nor replaced."""
        return is_at(self._descriptor, self.path / LOCK)

    def close(self) -> None:
        """Let another process take the folder over."""
        os.close(self._descriptor)

    def remove(self) -> None:
        """Remove the folder, unless something else is in it; the caller has locked DIR."""
        os.unlink(self.path / LOCK)
        with suppress(OSError):
            self.path.rmdir()
        self.close()


def new_writer(folder: Path) -> WriterFolder:
    """Create a folder for a writer; the caller has locked DIR."""
    path = folder / secrets.token_hex(16)
    path.mkdir(mode=FOLDER_MODE)
    taken = take_over(path)
    assert taken is not None, "no other process knows the new name"
    return taken


def take_over(path: Path) -> WriterFolder | None:
    """Lock a writer's folder; return None if its writer lives. The caller has locked DIR."""
    descriptor = open_lock(path / LOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return WriterFolder(path, descriptor)


def is_alive(path: Path) -> bool:
    """True if the writer of a folder lives. The caller has locked DIR."""
    try:
        taken = take_over(path)
    except FileNotFoundError:
        return False
    if taken is None:
        return True
    taken.close()
    return False
