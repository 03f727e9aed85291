"""The store of files: whose they are, how many bytes, how long, and what a crash leaves."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.batch_jobs.files import MIN_CHARGE, FileLimits, FileRecord, FileStore
from mlx_parallm.batch_jobs.service import Storage
from mlx_parallm.storage.ids import IdMaker, page_of
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


def open_store(folder: Path, clock: Clock | None = None, limits: FileLimits = LIMITS) -> FileStore:
    return FileStore(folder / "files", limits, IdMaker(), clock or Clock())


async def put(store: FileStore, content: bytes, owner: str = "me", **more: object) -> FileRecord:
    upload = store.begin()
    try:
        upload.claim(len(content))
        upload.write(content)
        options = {"owner": owner, "filename": "a.txt", "purpose": "batch"} | more
        return await store.commit(upload, **options)  # type: ignore[arg-type]
    finally:
        upload.abandon()


async def test_a_file_is_there_after_a_restart_and_only_its_owners(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    record = await put(store, b"content")
    for opened in (store, open_store(tmp_path)):
        assert opened.get(record.id, "me") == record
        assert opened.path(record.id).read_bytes() == b"content"
        for name, owner in ((record.id, "you"), ("file-0", "me"), ("../x", "me")):
            with pytest.raises(NotFoundError):
                opened.get(name, owner)
            with pytest.raises(NotFoundError):
                opened.delete(name, owner)
        assert opened.list("you", limit=10) == ([], False)
    store.delete(record.id, "me")
    assert list((tmp_path / "files").iterdir()) == []


async def test_nobody_else_on_the_machine_can_read_it(tmp_path: Path) -> None:
    record = await put(open_store(tmp_path), b"x")
    assert (tmp_path / "files").stat().st_mode & 0o777 == 0o700
    for suffix in ("data", "json"):
        assert (tmp_path / "files" / f"{record.id}.{suffix}").stat().st_mode & 0o777 == 0o600


async def test_limits_of_a_file_and_of_all(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(RequestTooLargeError, match="larger than 10000"):
        await put(store, b"x" * 10_001)
    assert list((tmp_path / "files").iterdir()) == []
    records = [await put(store, b"x" * 10_000) for _ in range(3)]
    with pytest.raises(RequestTooLargeError, match="together"):
        await put(store, b"x" * 9_500)
    # Running uploads count, and release the bytes that they do not use.
    upload = store.begin()
    upload.claim(6_000)
    with pytest.raises(RequestTooLargeError, match="together"):
        store.begin()
    upload.abandon()
    assert len(open_store(tmp_path).list("me", limit=10)[0]) == 3
    store.delete(records[0].id, "me")
    await put(store, b"x" * 9_000)


async def test_empty_files_have_a_price_too(tmp_path: Path) -> None:
    store = open_store(
        tmp_path, limits=FileLimits(max_file_bytes=9, max_total_bytes=3 * MIN_CHARGE)
    )
    for _ in range(3):
        await put(store, b"")
    with pytest.raises(RequestTooLargeError):
        store.begin()
    assert store.begin(is_limited=False).num_bytes == 0


async def test_files_go_when_their_time_is_over_but_not_from_under_a_batch(tmp_path: Path) -> None:
    clock = Clock()
    store = open_store(tmp_path, clock)
    kept, used, over = [await put(store, b"x", expires_after_s=s) for s in (None, 60, 60)]
    store.use(used.id, "batch_1")
    store.use(used.id, "batch_2")
    clock.now += 60
    with pytest.raises(NotFoundError):
        store.get(over.id, "me")
    assert [file.id for file in store.list("me", limit=9)[0]] == [used.id, kept.id]
    with pytest.raises(InvalidRequestError, match="batch_1"):
        store.delete(used.id, "me")
    store.release(used.id, "batch_2")
    assert store.get(used.id, "me")
    store.release(used.id, "batch_1")
    assert [file.id for file in store.list("me", limit=9)[0]] == [kept.id]


async def test_what_a_crash_left_is_removed_and_what_cannot_be_read_is_kept(tmp_path: Path) -> None:
    record = await put(open_store(tmp_path), b"x")
    folder = tmp_path / "files"
    for name in ("new-0001", "file-2.data", "file-3.part"):
        (folder / name).write_bytes(b"half")
    for name in ("file-4.json", "file-4.data"):
        (folder / name).write_bytes(b"{")
    (folder / "file-5.json").write_text(json.dumps({"id": "file-5"}))
    assert [file.id for file in open_store(tmp_path).list("me", limit=9)[0]] == [record.id]
    left = {path.name for path in folder.iterdir()}
    assert left == {
        f"{record.id}.data", f"{record.id}.json", "file-4.json", "file-4.data", "file-5.json",
    }  # fmt: skip


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


@given(
    num_ids=st.integers(0, 30),
    limit=st.integers(1, 12),
    descending=st.booleans(),
    deleted=st.sets(st.integers(0, 29)),
)
def test_pages_show_everything_once_whatever_is_deleted_meanwhile(
    num_ids: int, limit: int, descending: bool, deleted: set[int]
) -> None:
    ids = [f"id-{number:04}" for number in range(num_ids)]
    seen: list[str] = []
    after = None
    while True:
        page = page_of(ids, after=after, limit=limit, descending=descending)
        assert len(page.ids) <= limit
        seen += page.ids
        if not page.has_more:
            break
        assert len(page.ids) == limit
        after = page.ids[-1]
        # The deleted ids may include the one that the next page follows.
        ids = [
            file_id for file_id in ids if file_id not in {f"id-{number:04}" for number in deleted}
        ]
    assert seen == sorted(seen, reverse=descending)
    assert len(set(seen)) == len(seen)
    assert set(ids) <= set(seen)
