"""Files that can be made again: whatever is wrong with their folder, none is read wrong."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_parallm.storage import cache_folder
from mlx_parallm.storage.cache_folder import CacheFolder, CacheForm

KEY = "a" * 64
CODE = bytes(range(256)) * 8
FORM = CacheForm(kind="kernel", version=1, owner="compiled kernels")


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_what_was_kept_is_found_by_another_store_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "when needed"
    assert CacheFolder(folder, FORM).get(KEY) is None
    CacheFolder(folder, FORM).put(KEY, CODE)
    assert CacheFolder(folder, FORM).get(KEY) == CODE
    assert CacheFolder(folder, FORM).get("b" * 64) is None
    assert CacheFolder(folder, FORM).count() == 1
    assert folder.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("length", [0, 1, 21, 60, 500])
def test_a_torn_file_is_not_read_and_is_replaced(tmp_path: Path, length: int) -> None:
    store = CacheFolder(tmp_path, FORM)
    store.put(KEY, CODE)
    whole = only_file(tmp_path).read_bytes()
    only_file(tmp_path).write_bytes(whole[:length])
    assert store.get(KEY) is None
    store.put(KEY, CODE)
    assert store.get(KEY) == CODE


@pytest.mark.parametrize("place", [0, 25, 60, -1])
def test_a_file_with_a_changed_byte_is_not_read(tmp_path: Path, place: int) -> None:
    store = CacheFolder(tmp_path, FORM)
    store.put(KEY, CODE)
    content = bytearray(only_file(tmp_path).read_bytes())
    content[place] ^= 1
    only_file(tmp_path).write_bytes(bytes(content))
    assert store.get(KEY) is None


def test_the_file_of_another_kernel_is_not_read(tmp_path: Path) -> None:
    store = CacheFolder(tmp_path, FORM)
    store.put(KEY, CODE)
    path = only_file(tmp_path)
    path.rename(path.with_name(path.name.replace("a", "b")))
    assert store.get("b" * 64) is None


def test_a_folder_that_cannot_be_made_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    store = CacheFolder(tmp_path / "file" / "kernels", FORM)
    for _ in range(2):
        store.put(KEY, CODE)
        assert store.get(KEY) is None
    assert store.problem is not None
    assert [str(tmp_path) in record.message for record in caplog.records] == [True]
    assert store.count() == 0


def test_a_full_disk_leaves_no_part_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    store = CacheFolder(tmp_path, FORM)
    monkeypatch.setattr(cache_folder.os, "replace", fail)
    store.put(KEY, CODE)
    assert store.problem is not None
    assert list(tmp_path.iterdir()) == []


def write_often(folder: str, code: bytes) -> None:
    store = CacheFolder(Path(folder), FORM)
    for _ in range(50):
        store.put(KEY, code)


def test_a_reader_beside_two_writers_sees_whole_files_only(tmp_path: Path) -> None:
    codes = [bytes([number]) * 200_000 for number in (1, 2)]
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_often, args=(str(tmp_path), code)) for code in codes]
    for writer in writers:
        writer.start()
    store, seen = CacheFolder(tmp_path, FORM), set[bytes | None]()
    while any(writer.is_alive() for writer in writers):
        seen.add(store.get(KEY))
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert seen - {None} <= set(codes)
    assert store.get(KEY) in codes
    assert [path.suffix for path in tmp_path.iterdir()] == [FORM.suffix]


def test_a_file_of_another_kind_or_version_is_not_read(tmp_path: Path) -> None:
    CacheFolder(tmp_path, FORM).put(KEY, CODE)
    assert CacheFolder(tmp_path, replace(FORM, version=2)).get(KEY) is None
    assert CacheFolder(tmp_path, replace(FORM, kind="plan")).get(KEY) is None
    assert CacheFolder(tmp_path, FORM).get(KEY) == CODE


def test_the_least_recently_used_files_of_the_kind_go_beyond_the_limit(tmp_path: Path) -> None:
    CacheFolder(tmp_path, FORM).put(KEY, CODE)
    store = CacheFolder(tmp_path, replace(FORM, kind="plan", max_files=3))
    for second, key in enumerate("abc"):
        store.put(key, CODE)
        os.utime(tmp_path / f"{key}.plan", (second, second))
    assert store.get("a") == CODE
    store.put("d", CODE)
    assert {key: store.get(key) is not None for key in "abcd"} == {
        "a": True,
        "b": False,
        "c": True,
        "d": True,
    }
    assert CacheFolder(tmp_path, FORM).get(KEY) == CODE


def test_without_a_folder_nothing_is_kept() -> None:
    store = CacheFolder(None, FORM)
    store.put(KEY, CODE)
    assert store.get(KEY) is None
    assert (store.count(), store.problem) == (0, None)
