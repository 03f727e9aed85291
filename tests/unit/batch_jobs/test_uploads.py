"""Uploads in parts: their time, their number, the disk, and what is left after a restart."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_parallm.batch_jobs.files import FileLimits, FileStore, Upload
from mlx_parallm.batch_jobs.storage import Storage
from mlx_parallm.batch_jobs.uploads import EXPIRY_S, MAX_UPLOADS, PartedUpload, UploadStore
from mlx_parallm.types.errors import ConflictError, NotFoundError, OverloadedError, StorageError

LIMITS = FileLimits(max_file_bytes=10_000, max_total_bytes=50_000)


class Clock:
    """Unix seconds that tests set."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def storage(tmp_path: Path, clock: Clock) -> Iterator[Storage]:
    storage = Storage(tmp_path, LIMITS, clock)
    yield storage
    storage.close()


async def begin(uploads: UploadStore, *parts: bytes, owner: str = "a") -> PartedUpload:
    upload = await uploads.create(
        owner,
        filename="f",
        purpose="batch",
        num_bytes=max(1, sum(map(len, parts))),
        expires_after_s=None,
    )
    for content in parts:
        part = await uploads.begin_part()
        part.claim(len(content))
        part.write(content)
        uploads.add_part(upload, part)
    return upload


def contents(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "files"))


async def test_an_upload_ends_with_its_time(storage: Storage, tmp_path: Path, clock: Clock) -> None:
    upload = await begin(storage.uploads, b"ab", b"cd")
    later = await begin(storage.uploads, b"ef")
    await storage.uploads.complete(later.id, "a", list(later.parts), None)
    assert len(contents(tmp_path)) == 3
    clock.now += EXPIRY_S - 1
    assert storage.uploads.get(upload.id, "a") is upload
    clock.now += 1
    # Whatever needs room frees what is over.
    (await storage.files.begin()).abandon()
    assert len(contents(tmp_path)) == 1
    for known in (upload, later):
        with pytest.raises(NotFoundError):
            storage.uploads.get(known.id, "a")


async def test_a_part_of_an_upload_that_ended_meanwhile_is_refused(
    storage: Storage, clock: Clock
) -> None:
    upload = await begin(storage.uploads)
    part = await storage.uploads.begin_part()
    storage.uploads.cancel(upload.id, "a")
    with pytest.raises(ConflictError):
        storage.uploads.add_part(upload, part)
    other = await begin(storage.uploads)
    clock.now += EXPIRY_S
    with pytest.raises(NotFoundError):
        storage.uploads.add_part(other, part)
    part.abandon()


async def test_a_restart_leaves_nothing(tmp_path: Path) -> None:
    storage = Storage(tmp_path, LIMITS)
    upload = await begin(storage.uploads, b"ab", b"cd")
    storage.close()
    storage = Storage(tmp_path, LIMITS)
    assert contents(tmp_path) == []
    with pytest.raises(NotFoundError):
        storage.uploads.get(upload.id, "a")
    storage.close()


async def test_an_owner_has_so_many_uploads(storage: Storage) -> None:
    uploads = [await begin(storage.uploads) for _ in range(MAX_UPLOADS)]
    with pytest.raises(OverloadedError):
        await begin(storage.uploads)
    await begin(storage.uploads, owner="b")
    storage.uploads.cancel(uploads[5].id, "a")
    await begin(storage.uploads)
    with pytest.raises(NotFoundError):
        storage.uploads.get(uploads[5].id, "a")


async def test_an_upload_is_completed_once(storage: Storage) -> None:
    upload = await begin(storage.uploads, b"ab", b"cd")
    order = list(upload.parts)
    first = asyncio.ensure_future(storage.uploads.complete(upload.id, "a", order, None))
    await asyncio.sleep(0)
    with pytest.raises(ConflictError, match="being completed"):
        await storage.uploads.complete(upload.id, "a", order, None)
    with pytest.raises(ConflictError, match="being completed"):
        storage.uploads.cancel(upload.id, "a")
    assert (await first).file == (await storage.uploads.complete(upload.id, "a", order, None)).file
    with pytest.raises(ConflictError, match="completed"):
        await storage.uploads.complete(upload.id, "a", order[::-1], None)


async def test_a_full_disk_ends_an_upload(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = await begin(storage.uploads, b"ab", b"cd", b"ef")
    parts = list(upload.parts.values())
    write = Upload.write

    def fail(self: Upload, data: bytes) -> None:
        if data == b"ef":
            raise StorageError("No space left on device.")
        write(self, data)

    monkeypatch.setattr(Upload, "write", fail)
    with pytest.raises(StorageError):
        await storage.uploads.complete(upload.id, "a", list(upload.parts), None)
    assert (upload.status, contents(tmp_path)) == ("cancelled", [])
    assert parts[0].num_bytes == 4
    assert_counts_nothing(storage.files)


def assert_counts_nothing(files: FileStore) -> None:
    """Check that the whole limit is free."""
    files.check_room(LIMITS.max_file_bytes)
    assert files._stored + files._growing == 0
