"""The store of files: whose they are, how many bytes, how long, and what a crash leaves."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.batch_jobs.files import MIN_CHARGE, FileLimits, FileStore, Upload
from mlx_parallm.batch_jobs.records import BatchRecord, FileRecord, State
from mlx_parallm.batch_jobs.storage import KINDS, TABLES, VERSION, Storage
from mlx_parallm.batch_jobs.store import BatchStore
from mlx_parallm.storage.database import Database, Schema
from mlx_parallm.storage.ids import IdMaker
from mlx_parallm.types.errors import (
    InvalidRequestError,
    NotFoundError,
    RequestTooLargeError,
    StorageError,
)

LIMITS = FileLimits(max_file_bytes=10_000, max_total_bytes=39_000)


class Clock:
    """Unix seconds that tests set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Folder:
    """A data folder, opened one time after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = Clock()
        self.limits = LIMITS
        self._storage: Storage | None = None

    def open(self) -> FileStore:
        """Return the files, as a new process has them."""
        self.close()
        self._storage = Storage(self.path, self.limits, self.clock)
        return self._storage.files

    def close(self) -> None:
        if self._storage is not None:
            self._storage.close()
            self._storage = None

    @property
    def batches(self) -> BatchStore:
        assert self._storage is not None
        return self._storage.batches

    def contents(self) -> list[Path]:
        return sorted((self.path / "files").iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    folder = Folder(tmp_path / "data")
    yield folder
    folder.close()


async def put(store: FileStore, content: bytes, owner: str = "me", **more: object) -> FileRecord:
    upload = await store.begin()
    try:
        upload.claim(len(content))
        upload.write(content)
        options = {"owner": owner, "filename": "a.txt", "purpose": "batch"} | more
        return await store.commit(upload, **options)  # type: ignore[arg-type]
    finally:
        upload.abandon()


async def test_a_file_is_there_after_a_restart_and_only_its_owners(folder: Folder) -> None:
    store = folder.open()
    record = await put(store, b"content", filename="half a pair: \ud800")
    for _ in range(2):
        assert await store.get(record.id, "me") == record
        assert store.path(record).read_bytes() == b"content"
        for name, owner in ((record.id, "you"), ("file-0", "me"), ("../x", "me")):
            with pytest.raises(NotFoundError):
                await store.get(name, owner)
            with pytest.raises(NotFoundError):
                await store.delete(name, owner)
        assert await store.list("you", limit=10) == ([], False)
        store = folder.open()
    await store.delete(record.id, "me")
    assert folder.contents() == []
    assert await folder.open().list("me", limit=10) == ([], False)


async def test_nobody_else_on_the_machine_can_read_it(folder: Folder) -> None:
    await put(folder.open(), b"x")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert (folder.path / "files").stat().st_mode & 0o777 == 0o700
    files = [path for path in folder.path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {"", ".db", ".content"}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


async def test_limits_of_a_file_and_of_all(folder: Folder) -> None:
    store = folder.open()
    with pytest.raises(RequestTooLargeError, match="larger than 10000"):
        await put(store, b"x" * 10_001)
    assert folder.contents() == []
    records = [await put(store, b"x" * 10_000) for _ in range(3)]
    with pytest.raises(RequestTooLargeError, match="together"):
        await put(store, b"x" * 9_500)
    # Running uploads count, and release the bytes that they do not use.
    upload = await store.begin()
    upload.claim(6_000)
    with pytest.raises(RequestTooLargeError, match="together"):
        await store.begin()
    upload.abandon()
    store = folder.open()
    assert len((await store.list("me", limit=10))[0]) == 3
    with pytest.raises(RequestTooLargeError, match="together"):
        await put(store, b"x" * 9_500)
    await store.delete(records[0].id, "me")
    await put(store, b"x" * 9_000)


async def test_empty_files_have_a_price_too(folder: Folder) -> None:
    folder.limits = FileLimits(max_file_bytes=9, max_total_bytes=3 * MIN_CHARGE)
    store = folder.open()
    for _ in range(3):
        await put(store, b"")
    with pytest.raises(RequestTooLargeError):
        await store.begin()
    upload = await store.begin(is_limited=False)
    assert upload.num_bytes == 0
    upload.abandon()


async def test_a_file_that_replaces_another_counts_once(folder: Folder) -> None:
    store = folder.open()
    first = await put(store, b"x" * 10_000, expires_after_s=60)
    folder.clock.now += 1
    second = await put(store, b"y" * 9_001, expires_after_s=60, file_id=first.id)
    assert await store.list("me", limit=9) == ([second], False)
    assert [path.read_bytes()[:1] for path in folder.contents()] == [b"y"]
    for _ in range(2):
        await put(store, b"x" * 10_000)
        store = folder.open()
    with pytest.raises(RequestTooLargeError, match="together"):
        await put(store, b"x" * 10_000)


async def test_a_file_stays_though_its_replacement_cannot_be_recorded(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both contents have the same name, so the new one is in the place of the old one.
    store = folder.open()
    record = await put(store, b"old")

    def refuse(*_: object) -> None:
        raise StorageError("full")

    with monkeypatch.context() as patched:
        patched.setattr("mlx_parallm.batch_jobs.files.put", refuse)
        with pytest.raises(StorageError, match="full"):
            await put(store, b"new", file_id=record.id)
    for _ in range(2):
        assert store.path(await store.get(record.id, "me")).read_bytes() in (b"old", b"new")
        store = folder.open()


async def batch_of(folder: Folder, file: FileRecord, number: int) -> BatchRecord:
    record = BatchRecord(
        id=f"batch_{number}", owner="me", endpoint="/", input_file_id=file.id,
        created_at=0, expires_at=9,
    )  # fmt: skip
    await folder.batches.add(record)
    return record


async def test_files_go_when_their_time_is_over_but_not_from_under_a_batch(folder: Folder) -> None:
    store = folder.open()
    kept, used, over = [await put(store, b"x", expires_after_s=s) for s in (None, 60, 60)]
    batches = [await batch_of(folder, used, number) for number in (1, 2)]
    folder.clock.now += 60
    with pytest.raises(NotFoundError):
        await store.get(over.id, "me")
    assert [file.id for file in (await store.list("me", limit=9))[0]] == [used.id, kept.id]
    assert len(folder.contents()) == 2
    with pytest.raises(InvalidRequestError, match="batch_1"):
        await store.delete(used.id, "me")
    await folder.batches.change(batches[0], status=State.FAILED)
    with pytest.raises(InvalidRequestError, match="batch_2"):
        await store.delete(used.id, "me")
    assert await store.get(used.id, "me")
    await folder.batches.change(batches[1], status=State.FAILED)
    assert [file.id for file in (await store.list("me", limit=9))[0]] == [kept.id]


async def test_expired_files_go_although_their_removal_failed_before(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder.open()
    await put(store, b"x", expires_after_s=60)
    folder.clock.now += 60

    def refuse(_: object) -> None:
        raise StorageError("broken")

    with monkeypatch.context() as patched:
        patched.setattr("mlx_parallm.batch_jobs.files._unlink", refuse)
        with pytest.raises(StorageError, match="broken"):
            await store.sweep()
    await store.sweep()
    assert await store.list("me", limit=9) == ([], False)
    assert folder.contents() == []


async def test_contents_say_what_is_there_after_a_crash(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    store = folder.open()
    whole, lost, replaced = [await put(store, b"x", expires_after_s=60) for _ in range(3)]
    store.path(lost).unlink()
    new = replace(whole, id=store.new_id())
    stale = replace(replaced, expires_at=1)
    for name in ("new-0001", new.content_name, stale.content_name, "foreign.content"):
        (folder.path / "files" / name).write_bytes(b"y")
    for _ in range(2):
        store = folder.open()
        made_at = int(new.id[5:21], 16) // 10**9
        files = [whole, replaced, replace(new, filename=new.id, created_at=made_at)]
        assert (await store.list("me", limit=9, descending=False))[0] == files
        names = {file.content_name for file in (whole, replaced, new)} | {"foreign.content"}
        assert {path.name for path in folder.contents()} == names
    assert caplog.text.count(f"{lost.id} has lost its content") == 1


async def test_a_cancelled_commit_is_whole(folder: Folder) -> None:
    """Its file is there, and counts, though its caller is gone."""
    store = folder.open()
    upload = await store.begin()
    upload.claim(9_000)
    commit = asyncio.ensure_future(store.commit(upload, owner="me", filename="a", purpose="batch"))
    await asyncio.sleep(0)
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    upload.abandon()
    ((record,), _) = await store.list("me", limit=9)
    assert [path.name for path in folder.contents()] == [record.content_name]
    for _ in range(3):
        await put(store, b"x" * 10_000)
    with pytest.raises(RequestTooLargeError, match="together"):
        await store.begin()


@given(
    kept=st.sets(st.integers(0, 14)),
    limit=st.integers(1, 12),
    descending=st.booleans(),
    deleted=st.sets(st.integers(0, 14)),
)
@settings(max_examples=20)
def test_pages_show_everything_once_whatever_is_deleted_meanwhile(
    tmp_path_factory: pytest.TempPathFactory,
    kept: set[int],
    limit: int,
    descending: bool,
    deleted: set[int],
) -> None:
    """Files of two owners and two purposes; even that at the end of a page may be deleted."""
    ids = IdMaker()
    files = [
        FileRecord(
            id=ids.make("file-"), owner="me" if number in kept else "you", filename="a",
            purpose=str(number % 2), num_bytes=0, created_at=0,
        )
        for number in range(15)
    ]  # fmt: skip

    async def pages(store: FileStore) -> list[str]:
        seen: list[str] = []
        has_more = True
        while has_more:
            page, has_more = await store.list(
                "me", purpose="1", after=seen[-1] if seen else None, limit=limit,
                descending=descending,
            )  # fmt: skip
            assert len(page) == limit if has_more else len(page) <= limit
            seen += [file.id for file in page]
            for number in deleted:
                with suppress(NotFoundError):
                    await store.delete(files[number].id, files[number].owner)
        return seen

    schema = Schema(VERSION, TABLES, KINDS)
    folder = tmp_path_factory.mktemp("pages")
    for file in files:
        (folder / file.content_name).touch()
    with closing(Database(tmp_path_factory.mktemp("db") / "records.db", schema)) as database:
        seen = asyncio.run(pages(FileStore(folder, database, LIMITS, ids)))
    assert seen == sorted(set(seen), reverse=descending)
    wanted = {file.id for file in files if file.owner == "me" and file.purpose == "1"}
    left = {file.id for number, file in enumerate(files) if number not in deleted}
    assert wanted & left <= set(seen) <= wanted


def lock_out(folder: Path) -> None:
    try:
        Storage(folder, LIMITS)
    except StorageError:
        raise SystemExit(7) from None


def test_a_folder_belongs_to_one_process(tmp_path: Path) -> None:
    storage = Storage(tmp_path / "deep" / "data", LIMITS)
    other = multiprocessing.get_context("spawn").Process(
        target=lock_out, args=(tmp_path / "deep" / "data",)
    )
    other.start()
    other.join()
    assert other.exitcode == 7
    storage.close()
    Storage(tmp_path / "deep" / "data", LIMITS).close()


def test_a_folder_that_cannot_be_made_is_an_error_of_storage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as problem:
        Storage(tmp_path / "file" / "data", LIMITS)
    assert str(tmp_path) not in str(problem.value)


def test_ids_sort_by_age_even_when_the_clock_stands_or_goes_back() -> None:
    times = iter([5, 5, 3, 9])
    ids = IdMaker(lambda: next(times))
    made = [ids.make("file-") for _ in range(4)]
    assert made == sorted(made)
    assert len({len(file_id) for file_id in made}) == 1


async def test_results_that_grow_on_threads_are_counted_rightly(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder.open()
    uploads = [await store.begin(is_limited=False) for _ in range(3)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def grow(upload: Upload) -> None:
        for _ in range(5000):
            upload.count(2 * MIN_CHARGE)

    try:
        await asyncio.gather(*(asyncio.to_thread(grow, upload) for upload in uploads))
    finally:
        sys.setswitchinterval(before)
    for upload in uploads:
        upload.abandon()
    # As much fits as if they had never been.
    limits = replace(LIMITS, max_file_bytes=LIMITS.max_total_bytes)
    monkeypatch.setattr(store, "_limits", limits)
    upload = await store.begin()
    upload.claim(limits.max_total_bytes)
    with pytest.raises(RequestTooLargeError):
        upload.claim(1)
    upload.abandon()
