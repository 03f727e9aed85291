"""The files of a session: its settings and state, its examples, its log and its step records.

The record of a step is a line of ``steps.jsonl``. With a log, a step is on disk before it is
applied: first its record, then its part of ``log.bin``. After a crash the longer of the two is cut
to the shorter one. Lines are flushed to the system and not to the disk, so a killed process loses
nothing, and a power cut the last steps.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from safetensors.numpy import load, save

from mlx_parallm.storage import disk
from mlx_parallm.storage.appended import AppendedFile, opened
from mlx_parallm.storage.records import as_record, dumped
from mlx_parallm.training.records import (
    Example,
    MezoRecord,
    SessionConfig,
    SessionState,
    StepRecord,
)
from mlx_parallm.training.start import StartParameters
from mlx_parallm.types.errors import StorageError

logger = logging.getLogger(__name__)
CONFIG, STATE, EXAMPLES = "config.json", "state.json", "examples.jsonl"
#: ``VALIDATION``: examples that steps are judged by; no such file if there are none.
VALIDATION = "validation.jsonl"
STEPS, LOG = "steps.jsonl", "log.bin"
# SEED_BYTES: of the log, for the seed of a step.
SEED_BYTES = 8
# CHUNK: records that are read at a time where all are read.
CHUNK = 4096
#: ``FACTORS``: first parameters that were measured or are an adapter's; no such file if drawn.
FACTORS = "factors.safetensors"
#: ``REFERENCE``: log-probabilities of the examples under the first parameters, if a loss has them.
REFERENCE = "reference.json"
FILES = (CONFIG, STATE, EXAMPLES, VALIDATION, STEPS, LOG, FACTORS, REFERENCE)
#: ``CHECKPOINTS``: pattern of the names of checkpoints, and of what is left of unfinished ones.
CHECKPOINTS = "checkpoint-*"
#: ``UNFINISHED``: is there while the others are made or deleted. If the process dies meanwhile, the
#: next one knows by it that the folder may be deleted.
UNFINISHED = "unfinished"


class SessionFiles:
    """The folder of one session. Its methods raise StorageError if the disk refuses them."""

    def __init__(self, folder: Path, config: SessionConfig) -> None:
        """Open the folder of a session that was created."""
        self.config = config
        self._folder = folder
        self._is_closed = False
        self._kind = config.record_kind
        #: The size of each checkpoint, by its step.
        self.checkpoint_bytes: dict[int, int] = {}
        self._log: AppendedFile | None = None
        with disk.storage_errors():
            if config.estimator.log_bytes:
                self._log = AppendedFile.opened(folder / LOG)
            self._steps = AppendedFile.opened(folder / STEPS)
            self._data_bytes = (folder / EXAMPLES).stat().st_size + _size(folder / VALIDATION)
            self._factor_bytes = _size(folder / FACTORS)
            self._reference_bytes = _size(folder / REFERENCE)
            # Where each record begins.
            self._begins: list[int] = []
            self._settle()

    @classmethod
    def create(
        cls,
        folder: Path,
        config: SessionConfig,
        state: SessionState,
        examples: bytes,
        start: StartParameters | None = None,
        validation: bytes = b"",
    ) -> SessionFiles:
        """Make the folder of a new session; see ``encoded`` for examples and validation data."""
        with disk.storage_errors():
            disk.make_folder(folder)
            try:
                (folder / UNFINISHED).touch()
                # A session that is there after a power cut has its examples.
                _write(folder / EXAMPLES, examples)
                if validation:
                    _write(folder / VALIDATION, validation)
                disk.replace_json(folder / STATE, state)
                if start is not None:
                    disk.replace(folder / FACTORS, save(start.arrays()))
                # A folder without this file is no session.
                disk.replace_json(folder / CONFIG, config)
                (folder / UNFINISHED).unlink()
            except BaseException:
                _remove(folder)
                raise
        return cls(folder, config)

    @classmethod
    def open_all(cls, root: Path) -> list[SessionFiles]:
        """Open all sessions below a folder, in the order of their ids.

        Sessions that cannot be read and other folders are left as they are, and the log names them.
        """
        sessions: list[SessionFiles] = []
        with disk.storage_errors():
            disk.make_folder(root)
            for folder in sorted(path for path in root.iterdir() if path.is_dir()):
                if (folder / CONFIG).is_file():
                    (folder / UNFINISHED).unlink(missing_ok=True)
                    with readable(folder.name):
                        sessions.append(cls.open(folder))
                elif (folder / UNFINISHED).is_file():
                    _remove(folder)
                else:
                    logger.warning("%s has no %s, so it is no session", folder, CONFIG)
        return sessions

    @classmethod
    def open(cls, folder: Path) -> SessionFiles:
        """Open the folder of a session that was created."""
        with disk.storage_errors():
            stored = json.loads((folder / CONFIG).read_bytes())
        return cls(folder, as_record(stored, SessionConfig))

    def read_state(self) -> SessionState:
        """Return the state that was saved last."""
        with disk.storage_errors():
            return as_record(json.loads((self._folder / STATE).read_bytes()), SessionState)

    def save_state(self, state: SessionState) -> None:
        """Save the state durably."""
        disk.replace_json(self._folder / STATE, state)

    def examples(self) -> list[Example]:
        """Return the examples."""
        return self._read(EXAMPLES)

    def validation(self) -> list[Example]:
        """Return the validation data; empty if there are none."""
        return self._read(VALIDATION) if (self._folder / VALIDATION).is_file() else []

    def _read(self, name: str) -> list[Example]:
        with disk.storage_errors():
            lines = (self._folder / name).read_bytes().splitlines()
        return [Example.from_json(json.loads(line)) for line in lines]

    def start(self) -> StartParameters | None:
        """Return the first parameters; None if none were saved."""
        path = self._folder / FACTORS
        with disk.storage_errors():
            if not path.is_file():
                return None
            return StartParameters.of_arrays(load(path.read_bytes()))

    def save_start(self, start: StartParameters) -> None:
        """Save first parameters durably."""
        content = save(start.arrays())
        disk.replace(self._folder / FACTORS, content)
        self._factor_bytes = len(content)

    def references(self) -> list[tuple[float, ...]] | None:
        """Return what a loss compares each example with; None if nothing was saved."""
        path = self._folder / REFERENCE
        with disk.storage_errors():
            return list(map(tuple, json.loads(path.read_bytes()))) if path.is_file() else None

    def save_references(self, references: Sequence[Sequence[float]]) -> None:
        """Save what a loss compares each example with, durably."""
        path = self._folder / REFERENCE
        disk.replace_json(path, list(map(list, references)))
        self._reference_bytes = _size(path)

    @property
    def num_steps(self) -> int:
        """The number of steps that were made."""
        return len(self._begins)

    @property
    def num_bytes(self) -> int:
        """The size of the data and of what grows with the steps."""
        log = 0 if self._log is None else self._log.size
        own = self._data_bytes + self._factor_bytes + self._reference_bytes
        return own + log + self._steps.size + sum(self.checkpoint_bytes.values())

    def append(self, record: StepRecord, logged: bytes = b"") -> None:
        """Write the record of a step, and its part of the log, which begins with its seed.

        Nothing is written if the disk refuses one of them.
        """
        self.check_open()
        begin = self._steps.size
        with disk.storage_errors():
            self._steps.append(dumped(record).encode() + b"\n")
            try:
                if self._log is not None:
                    self._log.append(logged)
            except OSError:
                self._steps.cut(begin)
                raise
        self._begins.append(begin)

    def log(self) -> bytes:
        """Return the log, whose parts are of one size; nothing without one."""
        with disk.storage_errors():
            return b"" if self._log is None else self._log.read()

    def records(self, after: int = 0, limit: int | None = None) -> list[StepRecord]:
        """Return the records of steps with numbers above ``after``, oldest first."""
        last = self.num_steps if limit is None else min(self.num_steps, after + limit)
        if after >= last:
            return []
        end = self._begins[last] if last < self.num_steps else self._steps.size
        with disk.storage_errors():
            content = self._steps.read(self._begins[after], end)
        return [as_record(json.loads(line), self._kind) for line in content.splitlines()]

    def all_records(self) -> Iterator[StepRecord]:
        """Yield the records of all steps, oldest first."""
        for after in range(0, self.num_steps, CHUNK):
            yield from self.records(after, limit=CHUNK)

    @property
    def folder(self) -> Path:
        """The folder."""
        return self._folder

    def sync_records(self) -> None:
        """Make all records survive a power cut, as a checkpoint behind them does."""
        with disk.storage_errors(), opened(self._steps.path, os.O_WRONLY) as descriptor:
            disk.sync(descriptor)

    def check_open(self) -> None:
        """Raise StorageError if nothing may be written any more."""
        if self._is_closed:
            raise StorageError("The files of the session are closed.")

    def delete(self) -> None:
        """Close and delete the files, and their folder if it has no others."""
        self.close()
        with disk.storage_errors(), contextlib.suppress(FileNotFoundError):
            (self._folder / UNFINISHED).touch()
            # Without this file it is no session, even if the process dies here.
            (self._folder / CONFIG).unlink()
        _remove(self._folder)

    def close(self) -> None:
        """Write no more steps: the folder may belong to another process now."""
        self._is_closed = True

    def _settle(self) -> None:
        """Cut records and log to the steps that both have."""
        content = self._steps.read()
        begin = 0
        while (end := content.find(b"\n", begin)) >= 0:
            self._begins.append(begin)
            begin = end + 1
        size, log = self.config.estimator.log_bytes, self._log
        count = len(self._begins) if log is None else min(len(self._begins), log.size // size)
        # After a power cut a file may end with zeros.
        while count and not self._is_whole(count - 1, content):
            count -= 1
        self._steps.cut(self._begins[count] if count < len(self._begins) else begin)
        if log is not None:
            log.cut(count * size)
        del self._begins[count:]

    def _is_whole(self, number: int, content: bytes) -> bool:
        """True if a line of ``content`` and the log have the same step, by its number from 0."""
        begin = self._begins[number]
        try:
            line = content[begin : content.index(b"\n", begin)]
            record = as_record(json.loads(line), self._kind)
        except (ValueError, TypeError):
            return False
        return record.step == number + 1 and self._is_logged(record, number)

    def _is_logged(self, record: StepRecord, number: int) -> bool:
        """True if the log has the seed of a step, or there is no log."""
        if self._log is None or not isinstance(record, MezoRecord):
            return True
        begin = number * self.config.estimator.log_bytes
        return self._log.read(begin, begin + SEED_BYTES) == record.seed.to_bytes(
            SEED_BYTES, "little"
        )


@contextlib.contextmanager
def readable(session_id: str) -> Iterator[None]:
    """Log what is wrong with the files of a session, and go on without it."""
    try:
        yield
    except (OSError, StorageError) as problem:
        logger.warning("the training session %s is left out: %s", session_id, problem)
    except (ValueError, KeyError, TypeError) as problem:
        name = type(problem).__name__
        logger.warning("the training session %s is damaged: %s: %s", session_id, name, problem)


def encoded(examples: Iterable[Example]) -> bytes:
    """Return examples as they are kept: a JSON object in each line."""
    return "".join(dumped(example.to_json()) + "\n" for example in examples).encode()


def _write(path: Path, data: bytes) -> None:
    """Write a new file durably, but for its name in the folder."""
    descriptor = disk.create(path)
    try:
        disk.write_all(descriptor, data)
        disk.sync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Delete a session's files, and their folder if it has no others; errors are ignored."""
    parts = (Path(name).with_suffix(".part") for name in FILES)
    checkpoints = (path.name for path in folder.glob(CHECKPOINTS))
    for name in (*FILES, *parts, *checkpoints, UNFINISHED):
        with contextlib.suppress(OSError):
            (folder / name).unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def _size(path: Path) -> int:
    """Return the size of a file in bytes; 0 if there is none."""
    return path.stat().st_size if path.is_file() else 0
