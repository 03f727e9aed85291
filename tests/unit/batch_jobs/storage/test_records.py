"""Records of batches and files: which are kept, and which are removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.batch_jobs import store
from mlx_parallm.batch_jobs.records import State, entering
from mlx_parallm.batch_jobs.storage import Storage
from mlx_parallm.storage.database import Connection, Database
from mlx_parallm.types.errors import NotFoundError, StorageError
from tests.unit.batch_jobs.storage.data_folders import LIMITS, a_batch, a_file


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    with closing(Storage(tmp_path, LIMITS)) as storage:
        yield storage


async def test_the_oldest_batches_that_have_ended_are_removed(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_KEPT", 3)
    file, other = a_file("me"), a_file("you")
    batches = [a_batch(file, State.IN_PROGRESS), *(a_batch(file, State.FAILED) for _ in range(4))]
    for batch in [a_batch(other, State.FAILED), *batches]:
        await storage.batches.add(batch)
    kept, has_more = await storage.batches.list("me", limit=2)
    assert ([batch.id for batch in kept], has_more) == ([batches[4].id, batches[3].id], True)
    kept, has_more = await storage.batches.list("me", after=kept[-1].id, limit=2)
    assert (kept, has_more) == ([batches[0]], False)
    # Those that go on are the objects that their runs change.
    assert kept[0] is batches[0]
    assert len((await storage.batches.list("you", limit=9))[0]) == 1


async def test_a_batch_that_has_ended_is_read_from_the_database(storage: Storage) -> None:
    batch = a_batch(a_file("me"), State.IN_PROGRESS)
    await storage.batches.add(batch)
    assert await storage.batches.get(batch.id, "me") is batch
    assert storage.batches.unfinished("me") == [batch]
    await storage.batches.change(batch, **entering(State.COMPLETED, 7))
    assert (batch.status, batch.completed_at) == (State.COMPLETED, 7)
    assert storage.batches.unfinished() == []
    read = await storage.batches.get(batch.id, "me")
    assert read == batch
    assert read is not batch
    with pytest.raises(NotFoundError):
        await storage.batches.get(batch.id, "you")


def raising(problem: Exception) -> Callable[..., Any]:
    def call(*_: object) -> None:
        raise problem

    return call


async def test_a_content_whose_record_is_refused_is_removed(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = await storage.files.begin()
    upload.write(b"x")
    with monkeypatch.context() as patched:
        patched.setattr("mlx_parallm.batch_jobs.files.put", raising(StorageError("full")))
        with pytest.raises(StorageError, match="full"):
            await storage.files.commit(upload, owner="me", filename="a", purpose="batch")
    upload.abandon()
    assert list((tmp_path / "files").iterdir()) == []
    assert await storage.files.list("me", limit=9) == ([], False)


async def test_a_full_disk_gets_room_by_deleting(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Even the log of the database cannot grow as long as the content is there.
    upload = await storage.files.begin()
    upload.write(b"x")
    record = await storage.files.commit(upload, owner="me", filename="a", purpose="batch")
    run = Database.run

    async def run_on_full_disk(database: Database, work: Callable[[Connection], Any]) -> Any:
        def change(db: Connection) -> Any:
            num_changes, is_full = db.total_changes, storage.files.path(record).exists()
            result = work(db)
            if db.total_changes > num_changes and is_full:
                raise StorageError("full")
            return result

        return await run(database, change)

    monkeypatch.setattr(Database, "run", run_on_full_disk)
    with pytest.raises(NotFoundError):
        await storage.files.delete(record.id, "you")
    await storage.files.delete(record.id, "me")
    assert list((tmp_path / "files").iterdir()) == []
    assert await storage.files.list("me", limit=9) == ([], False)
