"""Durable data leaves the drive's cache too, on systems where ``fsync`` leaves it there."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import mlx_parallm
from mlx_parallm.batch_jobs.files import FileLimits
from mlx_parallm.batch_jobs.journal import Entry, Journal
from mlx_parallm.batch_jobs.storage import Storage
from mlx_parallm.storage import disk
from mlx_parallm.training.records import SessionState
from mlx_parallm.training.session_files import SessionFiles
from mlx_parallm.types.errors import StorageError
from tests.unit.training.worker_sessions import config_of

# FULL_SYNC: its value on macOS.
FULL_SYNC = 51
PACKAGE = Path(mlx_parallm.__file__).parent


class Drive:
    """Takes the calls of a Mac that sync.

    Attributes:
        files: kinds of what was synced to the drive, "file" or "folder", in order.
        flushed: those of which only the system's cache was written.
        error: raised by the file system; None for one that can sync.
    """

    def __init__(self, error: int | None = None) -> None:
        self.files: list[str] = []
        self.flushed: list[str] = []
        self.error = error

    def fcntl(self, descriptor: int, command: int) -> int:
        assert command == FULL_SYNC
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        self.files.append(_kind(descriptor))
        return 0

    def fsync(self, descriptor: int) -> None:
        self.flushed.append(_kind(descriptor))


def _kind(descriptor: int) -> str:
    return "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Drive:
    drive = Drive()
    monkeypatch.setattr(disk, "FULL_SYNC", FULL_SYNC)
    monkeypatch.setattr(fcntl, "fcntl", drive.fcntl)
    monkeypatch.setattr(os, "fsync", drive.fsync)
    return drive


def put_file(folder: Path) -> None:
    async def put() -> None:
        limits = FileLimits(max_file_bytes=100, max_total_bytes=10_000)
        with closing(Storage(folder / "data", limits)) as storage:
            upload = await storage.files.begin()
            upload.claim(1)
            upload.write(b"x")
            await storage.files.commit(upload, owner="me", filename="a", purpose="batch")

    asyncio.run(put())


def append_answer(folder: Path) -> None:
    with closing(Journal(folder / "journal")) as journal:
        journal.append([Entry(1, {})])


def create_session(folder: Path) -> None:
    config = config_of()("mezo_1", 0)
    SessionFiles.create(folder / "mezo_1", config, SessionState(), b"{}\n")


REPLACED = ["file", "folder"]


@pytest.mark.parametrize(
    ("write", "synced"),
    [
        (lambda folder: disk.replace_json(folder / "a.json", {}), REPLACED),
        (append_answer, ["folder", "file"]),
        # The content, and the folder with its name; see ``test_database`` for the record.
        (put_file, REPLACED),
        # The examples, the state, and last the settings, which make it a session.
        (create_session, ["file", *REPLACED, *REPLACED]),
    ],
    ids=["record", "journal", "file", "session"],
)
def test_every_store_empties_the_drives_cache(
    tmp_path: Path, drive: Drive, write: Callable[[Path], None], synced: list[str]
) -> None:
    write(tmp_path)
    assert drive.files == synced
    assert drive.flushed == []


@pytest.mark.parametrize("error", sorted(set(disk.NO_FULL_SYNC)))
def test_a_file_system_without_it_is_synced_as_it_can(
    tmp_path: Path, drive: Drive, error: int
) -> None:
    drive.error = error
    disk.replace(tmp_path / "a.json", b"")
    assert (drive.files, drive.flushed) == ([], REPLACED)


def test_a_drive_that_fails_is_an_error(tmp_path: Path, drive: Drive) -> None:
    drive.error = errno.EIO
    with pytest.raises(StorageError, match="Input/output error"):
        disk.replace(tmp_path / "a.json", b"")
    assert drive.flushed == []


def test_other_systems_sync_without_it(tmp_path: Path, drive: Drive) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "FULL_SYNC", None)
        disk.replace(tmp_path / "a.json", b"")
    assert (drive.files, drive.flushed) == ([], REPLACED)


def test_no_other_module_syncs() -> None:
    """Find calls of ``fsync`` outside of ``disk``; the copy of OpenBLAS is a cache of Linux."""
    callers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "fsync(" in path.read_text()
    }
    assert callers == {"storage/disk.py", "process_setup/openblas.py"}
