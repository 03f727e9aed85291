"""The files of a job: its record, its events and its checkpoints.

``job.json`` is replaced whole; a folder without it is no job. ``events.jsonl`` grows by lines; one
that a crash has cut off is dropped. Adapters are in ``checkpoints/step-N``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_parallm.storage import disk
from mlx_parallm.storage.appended import AppendedFile
from mlx_parallm.storage.records import as_record, dumped
from mlx_parallm.training.jobs.records import Checkpoint, JobEvent, JobRecord
from mlx_parallm.types.errors import ParallmError, StorageError

logger = logging.getLogger(__name__)
JOB, EVENTS, CHECKPOINTS = "job.json", "events.jsonl", "checkpoints"
#: ``CHECKPOINT``: the record of a checkpoint, beside its adapter.
CHECKPOINT = "checkpoint.json"


class JobFiles:
    """The folder of one job. Its methods raise StorageError if the disk refuses them.

    Attributes:
        record: as it was saved last.
        last_step: the latest step that has an event; 0 before the first.
    """

    def __init__(self, folder: Path, record: JobRecord) -> None:
        """Open the folder of a job that was created."""
        self.record = record
        self._folder = folder
        self.last_step = 0
        self._events = AppendedFile.opened(folder / EVENTS)
        # Where each event begins.
        self._begins: list[int] = []
        self._settle()
        self._checkpoints = {each.step: each for each in _checkpoints(folder / CHECKPOINTS)}
        self._adapter_bytes = {
            step: _num_bytes(self.folder_of(each)) for step, each in self._checkpoints.items()
        }

    @classmethod
    def create(cls, folder: Path, record: JobRecord) -> JobFiles:
        """Make the folder of a new job."""
        with disk.storage_errors():
            disk.make_folder(folder)
            try:
                disk.replace_json(folder / JOB, record)
                return cls(folder, record)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise

    @classmethod
    def open_all(cls, root: Path) -> list[JobFiles]:
        """Open all jobs below a folder, oldest first; those that cannot be read are left."""
        jobs: list[JobFiles] = []
        with disk.storage_errors():
            disk.make_folder(root)
            for folder in sorted(path for path in root.iterdir() if path.is_dir()):
                if not (folder / JOB).is_file():
                    # Its process died while it was made.
                    shutil.rmtree(folder, ignore_errors=True)
                    continue
                try:
                    stored = json.loads((folder / JOB).read_bytes())
                    jobs.append(cls(folder, as_record(stored, JobRecord)))
                except (OSError, ValueError, TypeError, ParallmError) as problem:
                    logger.warning("the job %s cannot be read: %s", folder.name, problem)
        return jobs

    def _settle(self) -> None:
        """Count the events, and cut what is behind the last whole one."""
        begin = 0
        with disk.storage_errors():
            for line in self._events.read().splitlines(keepends=True):
                event = _whole_event(line)
                if event is None:
                    self._events.cut(begin)
                    return
                self._count(event, begin)
                begin += len(line)

    @property
    def num_events(self) -> int:
        """The number of its events."""
        return len(self._begins)

    def events(self, begin: int = 0, end: int | None = None) -> list[JobEvent]:
        """Return its events from one number to before another, by default all, oldest first."""
        end = self.num_events if end is None else min(end, self.num_events)
        if begin >= end:
            return []
        stop = self._begins[end] if end < self.num_events else self._events.size
        with disk.storage_errors():
            content = self._events.read(self._begins[begin], stop)
        return [as_record(json.loads(line), JobEvent) for line in content.splitlines()]

    @property
    def num_bytes(self) -> int:
        """The size of its events and of its checkpoints' adapters."""
        return self._events.size + sum(self._adapter_bytes.values())

    @property
    def checkpoints(self) -> Sequence[Checkpoint]:
        """Its checkpoints that are served, oldest first."""
        every = [self._checkpoints[step] for step in sorted(self._checkpoints)]
        return [checkpoint for checkpoint in every if checkpoint.is_served]

    def has_checkpoint(self, step: int) -> bool:
        """True if there is a checkpoint of this step."""
        return step in self._checkpoints

    def save(self, **changes: Any) -> JobRecord:
        """Change the record durably; return it."""
        changed = replace(self.record, **changes)
        disk.replace_json(self._folder / JOB, changed)
        self.record = changed
        return changed

    def set_status(self, **changes: Any) -> None:
        """Change the record, even if the disk refuses it: this is called for such a disk too."""
        try:
            self.save(**changes)
        except StorageError as problem:
            logger.warning("the state of job %s is not saved: %s", self.record.id, problem)
            self.record = replace(self.record, **changes)

    def append(self, event: JobEvent) -> None:
        """Add an event."""
        line = dumped(event).encode() + b"\n"
        begin = self._events.size
        with disk.storage_errors():
            self._events.append(line)
        self._count(event, begin)

    def _count(self, event: JobEvent, begin: int) -> None:
        self._begins.append(begin)
        self.last_step = max(self.last_step, event.data.get("step", 0))

    def put_checkpoint(self, checkpoint: Checkpoint, adapter: Mapping[str, bytes]) -> Path:
        """Write a checkpoint with the files of its adapter; return the folder of these."""
        folder = self.folder_of(checkpoint)
        with disk.storage_errors():
            disk.make_folder(folder)
        for name, content in adapter.items():
            disk.replace(folder / name, content)
        # The record comes last: without it there is no checkpoint.
        self._save_checkpoint(checkpoint)
        self._adapter_bytes[checkpoint.step] = _num_bytes(folder)
        return folder

    def _save_checkpoint(self, checkpoint: Checkpoint) -> None:
        disk.replace_json(self.folder_of(checkpoint) / CHECKPOINT, checkpoint)
        self._checkpoints[checkpoint.step] = checkpoint

    def drop_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint, with its files unless the result needs them."""
        if self.record.result_step == checkpoint.step:
            self._save_checkpoint(replace(checkpoint, is_served=False))
            return
        self._checkpoints.pop(checkpoint.step, None)
        self._adapter_bytes.pop(checkpoint.step, None)
        shutil.rmtree(self.folder_of(checkpoint), ignore_errors=True)

    def set_result(self, step: int | None, **changes: Any) -> None:
        """Keep the files of this step's checkpoint for the result; remove those it had alone.

        ``changes``: other fields of the record.
        """
        self.save(result_step=step, **changes)
        for checkpoint in list(self._checkpoints.values()):
            if not checkpoint.is_served:
                self.drop_checkpoint(checkpoint)

    @property
    def result_folder(self) -> Path | None:
        """The folder of the result's adapter; None without a result."""
        step = self.record.result_step
        return self.folder_of(self._checkpoints[step]) if step in self._checkpoints else None

    def folder_of(self, checkpoint: Checkpoint) -> Path:
        """Return the folder of a checkpoint's adapter."""
        return self._folder / CHECKPOINTS / f"step-{checkpoint.step}"

    def delete(self) -> None:
        """Remove the folder."""
        # Without its record it is no job, whatever of it stays.
        with contextlib.suppress(OSError):
            (self._folder / JOB).unlink()
        shutil.rmtree(self._folder, ignore_errors=True)


def _whole_event(line: bytes) -> JobEvent | None:
    """Return the event of a line; None if a crash has cut it off."""
    try:
        event = as_record(json.loads(line), JobEvent)
    except (ValueError, TypeError):
        return None
    return event if line.endswith(b"\n") else None


def _num_bytes(folder: Path) -> int:
    """Return the size of the files of a folder."""
    with disk.storage_errors():
        return sum(path.stat().st_size for path in folder.iterdir())


def _checkpoints(folder: Path) -> Iterator[Checkpoint]:
    if not folder.is_dir():
        return
    for own in folder.iterdir():
        path = own / CHECKPOINT
        if path.is_file():
            yield as_record(json.loads(path.read_bytes()), Checkpoint)
        else:
            shutil.rmtree(own, ignore_errors=True)
