"""The files of sessions after crashes and power cuts, and when they are damaged."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm.training.mezo.log import StepLog
from mlx_parallm.training.records import MezoRecord, SessionState
from mlx_parallm.training.session_files import CONFIG, FILES, LOG, STATE, STEPS, SessionFiles
from mlx_parallm.training.start import StartParameters
from mlx_parallm.types.errors import StorageError
from mlx_parallm.types.training import Step
from tests.unit.training.worker_sessions import config_of

NUM_STEPS = 4
LOG_FORMAT = StepLog(1, lambda _: 1.0)


def record_of(step: int) -> MezoRecord:
    return MezoRecord(
        step=step, seed=step * 11, loss_plus=1.0, loss_minus=2.0, gradients=(0.5,), mean_square=0.1
    )


def add_step(files: SessionFiles) -> None:
    record = record_of(files.num_steps + 1)
    files.append(record, LOG_FORMAT.record(Step(record.seed, [record.step / 8])))


def new_files(folder: Path) -> SessionFiles:
    config = config_of()(folder.name, 0)
    return SessionFiles.create(folder, config, SessionState(), b"")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a session of some steps."""
    files = new_files(tmp_path / "mezo_1")
    for _ in range(NUM_STEPS):
        add_step(files)
    return tmp_path / "mezo_1"


def test_every_file_counts_that_grows_with_the_data_or_the_steps(tmp_path: Path) -> None:
    config = config_of()("mezo_1", 0)
    start = StartParameters({"a": np.ones((2, 3), np.float32)})
    folder = tmp_path / "mezo_1"
    files = SessionFiles.create(folder, config, SessionState(), b"{}\n", start, b"{} \n")
    files.save_references([(0.5, 0.25)])
    add_step(files)
    assert {path.name for path in folder.iterdir()} == set(FILES)
    counted = sum((folder / name).stat().st_size for name in FILES if name not in (CONFIG, STATE))
    assert files.num_bytes == SessionFiles.open(folder).num_bytes == counted


@pytest.mark.parametrize("name", [LOG, STEPS])
def test_steps_that_were_cut_anywhere_end_at_the_last_whole_one(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    log = (folder / LOG).read_bytes()
    lines = [12] * NUM_STEPS if name == LOG else [len(line) + 1 for line in content.splitlines()]
    ends = [sum(lines[: count + 1]) for count in range(NUM_STEPS)]
    for cut in range(len(content) + 1):
        copy = folder.parent / f"cut-{cut}"
        shutil.copytree(folder, copy)
        (copy / name).write_bytes(content[:cut])
        files = SessionFiles.open(copy)
        whole = sum(end <= cut for end in ends)
        assert [record.step for record in files.records()] == list(range(1, whole + 1))
        assert files.log() == log[: 12 * whole]
        add_step(files)
        again = SessionFiles.open(copy)
        assert list(again.all_records()) == [record_of(step + 1) for step in range(whole + 1)]
        assert LOG_FORMAT.steps(again.log())[-1] == Step((whole + 1) * 11, [(whole + 1) / 8])


@pytest.mark.parametrize("name", [LOG, STEPS])
def test_a_step_of_zeros_was_never_written(folder: Path, name: str) -> None:
    """After a power cut a file may have its length and not its content."""
    content = (folder / name).read_bytes()
    zeros = bytes(12) if name == LOG else bytes(len(content.splitlines()[-1])) + b"\n"
    (folder / name).write_bytes(content[: -len(zeros)] + zeros)
    files = SessionFiles.open(folder)
    assert [record.step for record in files.all_records()] == [1, 2, 3]
    assert len(files.log()) == 3 * 12


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"id": "mezo_1"}', b"\xff"])
def test_a_damaged_session_is_left_out_and_kept(
    folder: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / CONFIG).write_bytes(content)
    new_files(folder.parent / "mezo_2")
    sessions = SessionFiles.open_all(folder.parent)
    assert [files.config.id for files in sessions] == ["mezo_2"]
    assert (folder / CONFIG).read_bytes() == content
    assert "mezo_1 is damaged" in caplog.text


def test_closed_files_take_no_step(folder: Path) -> None:
    """Another process may use the folder by then."""
    files = SessionFiles.open(folder)
    files.close()
    with pytest.raises(StorageError):
        add_step(files)
    assert SessionFiles.open(folder).num_steps == NUM_STEPS


def test_sessions_hold_no_files_open(tmp_path: Path) -> None:
    before = len(os.listdir("/dev/fd"))
    sessions = [new_files(tmp_path / f"mezo_{number}") for number in range(20)]
    assert len(os.listdir("/dev/fd")) == before
    assert len(sessions) == 20


class KilledError(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("moment", range(1, 15))
def test_a_session_that_was_not_whole_yet_is_removed(
    tmp_path: Path, moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making or deleting that is killed leaves the whole session, or nothing of it."""
    calls = 0

    def dies(self: Path, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= moment:
            raise KilledError
        return unlink(self, *args, **kwargs)

    folder = tmp_path / "mezo_1"
    new_files(folder)
    unlink = Path.unlink
    with monkeypatch.context() as patched, contextlib.suppress(KilledError):
        patched.setattr(Path, "unlink", dies)
        SessionFiles.open(folder).delete()
    assert [files.config.id for files in SessionFiles.open_all(tmp_path)] == (
        ["mezo_1"] if moment == 1 else []
    )
    assert folder.exists() == (moment == 1)


def test_other_folders_and_files_are_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    notes = tmp_path / "mezo_1" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    assert SessionFiles.open_all(tmp_path) == []
    assert notes.read_text() == "mine"
    assert "mezo_1 has no config.json" in caplog.text
    # A session may be made in a folder that has other files, which stay when it is deleted.
    new_files(notes.parent).delete()
    assert [path.name for path in notes.parent.iterdir()] == ["notes.txt"]


def test_a_session_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "mezo_1" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")

    def full(path: Path, content: bytes) -> None:
        raise StorageError("The data folder cannot be used: No space left on device.")

    monkeypatch.setattr("mlx_parallm.storage.disk.replace", full)
    with pytest.raises(StorageError):
        new_files(notes.parent)
    assert [path.name for path in notes.parent.iterdir()] == ["notes.txt"]
