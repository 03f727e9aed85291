"""Data folders of older and newer versions."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.batch_jobs.records import State
from mlx_parallm.batch_jobs.storage import Storage
from mlx_parallm.types.errors import StorageError
from tests.unit.batch_jobs.storage.data_folders import (
    BATCHES,
    FILES,
    FORMER,
    LIMITS,
    UNREADABLE,
    Found,
    damaged,
    write_former,
)


def check_import(folder: Path) -> None:
    state = Found.of(folder)
    assert state.files == FORMER.files
    assert state.batches == FORMER.batches
    assert state.contents == [file.id[-7:].encode() for file in FORMER.files]
    assert state.others == FORMER.others


def test_the_former_layout_is_imported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_former(tmp_path)
    check_import(tmp_path)
    assert {name for name in UNREADABLE if name in caplog.text} == {
        name for name in UNREADABLE if name.endswith("json")
    }
    # What is deleted from now on does not come again.
    with closing(Storage(tmp_path, LIMITS)) as storage:
        asyncio.run(storage.files.delete(FILES[1].id, FILES[1].owner))
    assert [file.id for file in Found.of(tmp_path).files] == [FILES[0].id, FILES[2].id]


def test_a_record_wins_over_a_file_of_the_former_layout_that_is_back(tmp_path: Path) -> None:
    write_former(tmp_path)
    ended = replace(BATCHES[0])
    with closing(Storage(tmp_path, LIMITS)) as storage:
        asyncio.run(storage.batches.change(ended, status=State.COMPLETED))
    (tmp_path / "batches" / f"{ended.id}.json").write_text(json.dumps(asdict(BATCHES[0])))
    assert next(batch for batch in Found.of(tmp_path).batches if batch.id == ended.id) == ended


class CrashError(BaseException):
    """The end of a process."""


class Crasher:
    """Ends the process at one of the calls that change the folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.num_left = at
        for owner, name in (
            (Path, "rename"), (Path, "unlink"),
            ("mlx_parallm.storage.disk", "sync_folder"),
            ("mlx_parallm.batch_jobs.storage", "put"),
        ):  # fmt: skip
            self._patch(monkeypatch, owner, name)

    def _patch(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        if isinstance(owner, str):
            owner = __import__(owner, fromlist=[name])
        call = getattr(owner, name)

        def crashing(*args: Any, **kwargs: Any) -> Any:
            self.num_left -= 1
            if self.num_left < 0:
                raise CrashError
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, name, crashing)


def test_a_crash_anywhere_in_the_import_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = 0
    while True:
        folder = tmp_path / str(at)
        write_former(folder)
        with monkeypatch.context() as patched:
            crasher = Crasher(patched, at)
            try:
                Storage(folder, LIMITS).close()
            except CrashError:
                pass
            else:
                assert crasher.num_left == 0 or at > 15
        check_import(folder)
        if crasher.num_left >= 0:
            break
        at += 1
    # Each record is put and its file removed, each content renamed, and both folders are synced.
    assert at >= 2 * (len(FILES) + len(BATCHES)) + len(FILES) + 2


def test_an_older_version_leaves_the_contents(tmp_path: Path) -> None:
    # An older version removes what ends so and has no JSON file beside it.
    write_former(tmp_path)
    Found.of(tmp_path)
    names = [file.content_name for file in FILES]
    assert not any(name.endswith((".data", ".part")) or name.startswith("new-") for name in names)


def test_a_newer_version_keeps_the_folder_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("mlx_parallm.batch_jobs.storage.VERSION", 2)
        Storage(tmp_path, LIMITS).close()
    for _ in range(2):
        with pytest.raises(StorageError, match="a newer program wrote its records"):
            Storage(tmp_path, LIMITS)
    assert damaged(tmp_path) == []
